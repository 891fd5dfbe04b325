"""Owns the order of shards in the step: the groups that one call of the optimizer updates.

States in memory where the optimizer steps are updated in place, in one call. The rest passes through frames, see
frames.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from zeroshard.policy import Policy
from zeroshard.step.frames import SUB_GROUP_NUMEL, Frames, numel_of, packed
from zeroshard.step.resident import Resident
from zeroshard.step.travelling import Travelling

LENT_NUMEL = 1 << 26
"""The most elements whose gradients are lent at once if they must be cast to a wider dtype first: 256 MiB."""


def _cast_numel(resident: Resident) -> int:
    return resident.shard.numel if resident.gradient_parts is None else 0


class SubGroups:
    """The shards that this rank updates, in groups.

    Args:
        states: how many tensors of state the optimizer keeps for each parameter.

    Raises:
        UsageError: a shard does not fit into the buffers that the policy allows, twice.
    """

    def __init__(self, residents: Sequence[Resident], policy: Policy, states: int) -> None:
        self._residents = list(residents)
        here: list[Resident] = []
        copied: list[Resident] = []
        travelling: list[Travelling] = []
        for resident in residents:
            if isinstance(resident, Travelling):
                travelling.append(resident)
            elif resident.is_copied_to_rest:
                copied.append(resident)
            else:
                here.append(resident)
        most = min(SUB_GROUP_NUMEL, policy.offload_optimizer.sub_group_numel)
        self._in_place = packed(here, (_cast_numel, LENT_NUMEL))
        # A part is copied while the next is updated.
        self._in_place += packed(copied, (numel_of, most))
        self._frames = Frames(travelling, policy, states)

    @property
    def nbytes(self) -> int:
        """The bytes of all allocated frames."""
        return self._frames.nbytes

    def run(self, on_left: Callable[[Sequence[Resident]], None]) -> Iterator[Sequence[Resident]]:
        """Yield each group in turn, in memory. Afterwards its changes are written back, and `on_left` is called with it."""
        with self._abandoned_on_error():
            travels = bool(self._frames.groups)
            if travels:
                self._frames.begin()
            groups: list[Sequence[Resident]] = [*self._in_place, *self._frames.groups]
            for residents in groups:
                if travels:
                    self._frames.read_on(residents)
                for resident in residents:
                    resident.enter()
                yield residents
                for resident in residents:
                    resident.leave(write=True, update_rest=True)
                if travels:
                    self._frames.take_back(residents)
                on_left(residents)
            if travels:
                self._frames.notice_other_states()

    def prefetch(self) -> None:
        """Start to read for the next step all values except its gradients, as far as frames are free."""
        if self._frames.groups:
            with self._abandoned_on_error():
                self._frames.prefetch()

    @contextmanager
    def opened(self, resident: Resident, *, write: bool = False, read: bool = True) -> Iterator[None]:
        """Point the optimizer's tensors, inside the block, at one shard's master weights and states in memory.

        Args:
            write: store changes inside, and values that are set in the optimizer's state.
            read: False where all of it will be overwritten.
        """
        if not isinstance(resident, Travelling):
            resident.shard.master.wait()
            if write:
                resident.shard.master.before_write()
            yield
            return
        with self._abandoned_on_error(), self._frames.opened(resident, write=write, read=read):
            yield

    def settle(self) -> None:
        """Drop values that were read ahead, wait for writes in flight, and raise their errors."""
        with self._abandoned_on_error():
            self._frames.settle()

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Abandon unfinished transfers if the code inside raises, so that a checkpoint can be loaded after."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop values in frames and in flight, with their errors. Values at rest will be read or written again."""
        self._frames.abandon()
        for resident in self._residents:
            resident.abandon()
        self._frames.forget()
