"""Owns the order of shards in the step: the groups that one call updates, and the transfers of offloaded shards.

What is memory where the optimizer steps is updated in place, in one call. The rest goes through
frames, a fixed amount of CPU memory: while one sub-group is updated, those after it are read and those before it are written.

    frame 0   | read 0 | step 0 | write 0         | read 3 ...
    frame 1   | read 1          | step 1 | write 1 ...
    frame 2   | read 2                   | step 2 | write 2 ...
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch

from zeroshard.errors import UsageError
from zeroshard.policy import Policy
from zeroshard.step.resident import Frame, Resident
from zeroshard.storage.base import Storage
from zeroshard.storage.storages import STAGING_SHARE, Storages, buffers_nbytes

SUB_GROUP_NUMEL = 1 << 22
"""Elements of a sub-group, where the policy allows more: large enough for a disk, small enough that several fit in memory."""


LENT_NUMEL = 1 << 26
"""Elements whose gradients are lent at once where they have fewer digits than what they update, and are cast for it: 256 MiB."""


class SubGroup:
    """The residents that one call updates, in one place."""

    def __init__(self, residents: list[Resident]) -> None:
        self.residents = residents
        self.frame: Frame | None = None

    @property
    def step(self) -> Storage:
        """The storage in which the optimizer steps."""
        return self.residents[0].shard.step

    @property
    def travels(self) -> bool:
        """Whether part of the group rests in other memory than the optimizer's step."""
        return not all(resident.is_in_place for resident in self.residents)

    def start(self, frame: Frame) -> None:
        """Start to read all values except the gradients."""
        self.frame = frame
        for resident in self.residents:
            resident.start(frame)

    def start_gradients(self) -> None:
        """Start to read the gradients, which are complete."""
        for resident in self.residents:
            resident.start_gradient()

    def leave(self, *, write: bool) -> Frame | None:
        """Start to write the group back, and return its frame."""
        frame = self.frame
        self.frame = None
        for resident in self.residents:
            resident.leave(write=write, update_rest=write)
        return frame


class SubGroups:
    """The shards that this rank updates, in sub-groups.

    Args:
        states: how many tensors of state the optimizer keeps for each parameter.

    Raises:
        UsageError: a shard does not fit into the buffers that the policy allows, twice.
    """

    def __init__(self, residents: Sequence[Resident], storages: Storages, policy: Policy, states: int) -> None:
        self._residents = list(residents)
        self._storages = storages
        self._offload = policy.offload_optimizer
        self._states = states
        self._is_bounded = policy.uses_disk
        self._open: Resident | None = None
        self._plan()
        if self._largest > self._limit // 2:
            self._refuse()

    def _plan(self) -> None:
        here = [resident for resident in self._residents if _stays_here(resident)]
        travelling = [resident for resident in self._residents if not _stays_here(resident)]
        needs = {resident: resident.nbytes(self._states) for resident in travelling}
        self._largest = max(needs.values(), default=0)
        self._limit = buffers_nbytes(self._offload) * (STAGING_SHARE - 1) // STAGING_SHARE
        if not self._is_bounded:
            self._limit = max(self._limit, 2 * self._largest)
        most = min(SUB_GROUP_NUMEL, self._offload.sub_group_numel)
        numel = sum(resident.shard.numel for resident in travelling)
        typical = math.ceil(sum(needs.values()) / max(numel, 1) * most)
        self._frame_nbytes = max(min(typical, self._limit // 4), self._largest)
        self._groups = [SubGroup(part) for residents in _by_step(here) for part in _lent_together(residents)]
        for residents in _by_step(travelling):
            self._groups += _pack(residents, needs, self._frame_nbytes, most)
        self._travelling = [group for group in self._groups if group.travels]
        # One frame's worth is left over: for states that the first step makes, and for gradients in 16 bits as they are lent.
        in_flight = 1 + self._offload.read_ahead + self._offload.write_behind
        frames = self._limit // max(self._frame_nbytes, 1) - 1
        frames = max(min(frames if in_flight == 3 else min(frames, in_flight), len(self._travelling)), 1)
        steps = {group.step for group in self._groups}
        self._frames_left = {step: max(frames // len(steps), 1) for step in steps}
        self._free: dict[Storage, deque[Frame]] = {step: deque() for step in steps}

    def _refuse(self) -> None:
        offload = self._offload
        largest = max(self._residents, key=lambda resident: resident.nbytes(self._states)).shard
        raise UsageError(
            f"{largest.master.label} needs {self._largest:,} bytes of CPU memory for the step of this rank's "
            f"{largest.numel:,} elements, and as much again beside it; {offload.buffer_count} buffers of "
            f"{offload.buffer_numel:,} elements leave {self._limit:,}. Allow more (in a config, "
            "offload_optimizer.buffer_size), or cut smaller buckets (bucket_numel; in a config, reduce_bucket_size)."
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all allocated frames."""
        lent = [group.frame for group in self._travelling if group.frame is not None]
        return sum(frame.nbytes for frame in [*chain.from_iterable(self._free.values()), *lent])

    # ------------------------------------------------------------------ the step

    def run(self, on_left: Callable[[list[Resident]], None]) -> Iterator[list[Resident]]:
        """Yield each sub-group in turn, in memory. Afterwards its changes are written back, and `on_left` is called with it."""
        with self._abandoned_on_error():
            self._close()
            for group in self._travelling:
                if group.frame is not None:
                    group.start_gradients()
            waiting = deque(group for group in self._travelling if group.frame is None)
            for group in self._groups:
                for started in self._read_ahead(waiting, group):
                    started.start_gradients()
                for resident in group.residents:
                    resident.enter()
                yield group.residents
                frame = group.leave(write=True)
                if frame is not None:
                    self._free[group.step].append(frame if self._offload.write_behind else frame.empty())
                on_left(group.residents)
            self._notice_other_states()

    def _read_ahead(self, waiting: deque[SubGroup], now: SubGroup | None = None) -> Iterator[SubGroup]:
        """Start the first waiting groups: `now` even if that blocks, and the next ones while frames are free."""
        while waiting and (waiting[0] is now or self._offload.read_ahead):
            frame = self._take_frame(waiting[0].step, block=waiting[0] is now)
            if frame is None:
                return
            group = waiting.popleft()
            group.start(frame)
            yield group

    def prefetch(self) -> None:
        """Start to read for the next step all values except its gradients, as far as frames are free."""
        if self._open is not None:
            return
        with self._abandoned_on_error():
            for _ in self._read_ahead(deque(group for group in self._travelling if group.frame is None)):
                pass

    def _take_frame(self, step: Storage, *, block: bool) -> Frame | None:
        free = self._free[step]
        idle = next((frame for frame in free if frame.is_idle), None)
        if idle is None and self._frames_left[step]:
            self._frames_left[step] -= 1
            return Frame(step.room(self._frame_nbytes, torch.uint8))
        if idle is None and not block:
            return None
        frame = (idle or free[0]).empty()
        free.remove(frame)
        return frame

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
        self._take_back_frames()
        for resident in self._residents:
            resident.abandon()
        if self._open is not None:
            self._free[self._open.shard.step].append(self._open_frame)
            self._open = None
        for frame in chain.from_iterable(self._free.values()):
            frame.forget()

    def _take_back_frames(self) -> None:
        """Take back the frames whose values are no longer needed."""
        for group in self._travelling:
            if group.frame is not None:
                for resident in group.residents:
                    resident.abandon()
                self._free[group.step].append(group.frame)
                group.frame = None

    def _notice_other_states(self) -> None:
        """Form the sub-groups again if the optimizer keeps another number of states than assumed."""
        kept = max((resident.states for resident in self._residents), default=0)
        if kept in (0, self._states):
            return
        self._states = kept
        self.settle()
        self._plan()
        if self._largest > self._limit // 2:
            warnings.warn(
                f"the optimizer keeps {kept} states for each parameter, and the largest shard needs {2 * self._largest:,} bytes "
                f"of CPU memory where the buffers leave {self._limit:,}: allow more (buffer_size), or cut smaller buckets.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ outside of the step

    @contextmanager
    def opened(self, resident: Resident, *, write: bool = False, read: bool = True) -> Iterator[None]:
        """Point the optimizer's tensors, inside the block, at one shard's master weights and states in memory.

        Args:
            write: what is changed inside, or set in the optimizer's state, comes to rest.
            read: False where all of it will be overwritten.
        """
        if resident.is_in_place:
            resident.shard.master.wait()
            yield
            return
        with self._abandoned_on_error():
            if self._open is resident and read:
                resident.refresh()
            else:
                self.settle()
                frame = self._take_frame(resident.shard.step, block=True)
                assert frame is not None
                self._open = resident
                self._open_frame = frame
                resident.start(frame, read=read)
                resident.enter()
            try:
                yield
            finally:
                if write:
                    resident.leave(write=True, update_rest=False)
                    self._close()

    def _close(self) -> None:
        """Close the shard that `opened` has in memory."""
        if self._open is not None:
            resident = self._open
            self._open = None
            resident.leave(write=False, update_rest=False)
            self._free[resident.shard.step].append(self._open_frame)

    def settle(self) -> None:
        """Drop values that were read ahead, wait for writes in flight, and raise their errors."""
        with self._abandoned_on_error():
            self._close()
            self._take_back_frames()
            for frame in chain.from_iterable(self._free.values()):
                frame.empty()


def _by_step(residents: Sequence[Resident]) -> list[list[Resident]]:
    """Group residents by the place of the optimizer's step. With a ratio, some step on the accelerator."""
    found: dict[Storage, list[Resident]] = {}
    for resident in residents:
        found.setdefault(resident.shard.step, []).append(resident)
    return list(found.values())


def _lent_together(residents: Sequence[Resident]) -> list[list[Resident]]:
    """Split residents so that each part casts at most `LENT_NUMEL` elements of gradients, or those of one resident."""
    groups: list[list[Resident]] = [[]]
    cast = 0
    for resident in residents:
        numel = resident.shard.numel if resident.gradient_parts is None else 0
        if cast and cast + numel > LENT_NUMEL:
            groups.append([])
            cast = 0
        groups[-1].append(resident)
        cast += numel
    return [group for group in groups if group]


def _stays_here(resident: Resident) -> bool:
    """Return whether a step copies nothing of the resident to another place."""
    return resident.is_in_place and (
        resident.shard.rest is resident.shard.master or resident.shard.rest.memory_in(resident.shard.step) is not None
    )


def _pack(residents: Sequence[Resident], needs: Mapping[Resident, int], nbytes: int, numel: int) -> list[SubGroup]:
    groups: list[SubGroup] = []
    room = 0
    left = 0
    for resident in residents:
        need = needs[resident]
        if not groups or need > room or resident.shard.numel > left:
            groups.append(SubGroup([]))
            room = nbytes
            left = numel
        groups[-1].residents.append(resident)
        room = room - need
        left = left - resident.shard.numel
    return groups
