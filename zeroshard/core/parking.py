"""Owns model states that are parked to free their memory: `offload_states`, `reload_states`.

Only the accelerator's memory is parked; without an accelerator, CPU memory is parked on disk. The memory is freed, and the
user's tensors show placeholders in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.core.schedule import Schedule
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.step import StepState
from zeroshard.core.storage.base import Slot, Storage
from zeroshard.core.storage.buffers import BufferPool, FlatBuffer
from zeroshard.core.storage.storages import Storages
from zeroshard.errors import UsageError
from zeroshard.policy import Offload, Place

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class _Parked:
    """Parked memory, and the place of its content.

    Attributes:
        content: all of the memory, as bytes, in its present place.
        is_transient: whether `zero_grad` drops the content.
    """

    memory: FlatBuffer
    content: Slot
    is_transient: bool


class Parking:
    """The parked states of one model."""

    def __init__(self, schedule: Schedule, step: ShardedStep, storages: Storages, pool: BufferPool) -> None:
        self._schedule = schedule
        self._step = step
        self._storages = storages
        self._pool = pool
        self._parked: list[_Parked] = []
        self._storage: Storage | None = None

    def offload(self, states: Iterable[str], place: Place, offload: Offload) -> int:
        """Park states and return the number of freed bytes. Nothing happens if `place` is the accelerator's own memory.

        Raises:
            UsageError: an unknown name, states parked already, waiting gradients, a pinned unit, or a parameter of a user's class.
            StorageError: there is no room. States that were parked until then are reloaded.
        """
        wanted = list(states)
        unknown = [state for state in wanted if state not in STATES]
        if unknown:
            raise UsageError(
                f"the model states are {', '.join(STATES)}, and {unknown[0]!r} is none of them. Name some of these."
            )
        if self._schedule.live.parked:
            raise UsageError("model states are parked already: call reload_states() first.")
        if self._schedule.awaits_step:
            raise UsageError("gradients await a step: call step() before offload_states().")
        self._storage = self._storages.open(place, offload)
        if self._storage is self._storages.accelerator:
            return 0
        try:
            if "parameters" in wanted:
                for unit in self._schedule.units:
                    if unit.appearance.keeps_classes:
                        raise UsageError(
                            f"{unit.label} has a parameter of a class of your own, whose readers would see NaN while it is parked: "
                            "use nn.Parameter there, or offload the other model states."
                        )
            self._schedule.settle()
            self._step.sub_groups.settle()
            self._pool.clear()
            for unit in self._schedule.units:
                unit.park(parameters="parameters" in wanted)
            pending = self._copy(wanted)
        except BaseException:
            self.reload()
            raise
        self._step.park(states="optimizer" in wanted)
        self._schedule.live.parked = frozenset(wanted)
        for one in pending:
            one.memory.free()
        self._parked = pending
        return sum(one.content.nbytes for one in pending if not one.memory.nbytes)

    def _copy(self, states: Sequence[str]) -> list[_Parked]:
        assert self._storage is not None
        copied: dict[int, _Parked] = {}  # by address: states may share memory
        for memory, is_transient in self._memory(states):
            address = memory.tensor.untyped_storage().data_ptr()
            if memory.nbytes and address not in copied:
                content = self._storage.slot("parked model states", memory.nbytes, torch.uint8)
                content.write(memory.tensor.view(torch.uint8))
                copied[address] = _Parked(memory, content, is_transient)
        for one in copied.values():
            one.content.wait()
        return list(copied.values())

    def _memory(self, states: Sequence[str]) -> Iterator[tuple[FlatBuffer, bool]]:
        """Yield the accelerator memory of these states, and whether `zero_grad` frees it."""
        tensors: list[Tensor] = []
        if "parameters" in states:
            # A flat buffer keeps its memory if the user has a view of a parameter: a read of freed memory would end the process.
            yield from ((unit.flat, False) for unit in self._schedule.units if not unit.sharded_at_rest)
        if "gradients" in states:
            for unit in self._schedule.units:
                for gradients in unit.gradients:
                    buffers = gradients.buffers()
                    yield from ((buffer, True) for buffer in buffers)
                    if not buffers:
                        tensors += gradients.tensors()
        for unit in self._schedule.units:
            for bucket in unit.buckets:
                if "parameters" in states:
                    tensors += bucket.tensors("parameters")
                if "optimizer" in states and bucket.copies:
                    tensors += bucket.tensors("master")
        if "optimizer" in states:
            tensors += [one for one in self._step.kept_in(self._storages.accelerator) if one.ndim]
        for tensor in tensors:
            yield self._storages.memory_under("parked model states", tensor), False

    def reload(self) -> None:
        """Reload all parked states."""
        while self._parked:  # states that fail to reload stay parked, and may be reloaded later
            one = self._parked[-1]
            # If neither holds, `zero_grad` has dropped this gradient in the meantime.
            if not one.is_transient or self._schedule.state is not StepState.CLEAN:
                one.memory.allocate()
                whole = one.memory.tensor
                one.content.read(whole.view(torch.uint8)).wait(whole.device)
            self._parked.pop()
        for unit in self._schedule.units:
            unit.unpark()
        if self._schedule.live.parked:
            self._step.unpark()
        self._schedule.live.parked = frozenset()
        if self._storage is not None and self._storage is not self._storages.accelerator:
            self._storage.close()
        self._storage = None
