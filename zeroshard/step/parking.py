"""Owns model states that leave their place for a while, so that something else may use it: `offload_states`, `reload_states`.

Called by shard. What is parked is memory of the accelerator (without one: CPU memory, and the place to park is the disk).
Its storage is given back; the tensors that the user can see look at placeholders meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.policy import Offload, Place
from zeroshard.schedule.schedule import Schedule
from zeroshard.step.sharded_optimizer import ShardedOptimizer
from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.buffer_pool import BufferPool
from zeroshard.storage.storages import Storages

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class _Parked:
    """A storage that was given back. `content` is all of it, as bytes, wherever it is now."""

    memory: Tensor
    content: Slot

    def reload(self) -> None:
        self.memory.untyped_storage().resize_(self.content.nbytes)
        self.content.read(self.memory).wait(self.memory.device)


class Parking:
    """What of one model is parked."""

    def __init__(self, schedule: Schedule, optimizer: ShardedOptimizer, storages: Storages, pool: BufferPool) -> None:
        self._schedule, self._optimizer, self._storages, self._pool = schedule, optimizer, storages, pool
        self._parked: list[_Parked] = []
        self._storage: Storage | None = None

    def offload(self, states: Iterable[str], place: Place, offload: Offload) -> int:
        """Park states; returns the bytes that were given back. On a place that is where they are already, nothing happens.

        Raises:
            UsageError: something is parked already, or a step has begun.
            StorageError: there is no room; what was parked until then is back.
        """
        wanted = list(states)
        unknown = [state for state in wanted if state not in STATES]
        if unknown:
            raise UsageError(f"the model states are {', '.join(STATES)}, and {unknown[0]!r} is none of them.")
        if self._schedule.parked:
            raise UsageError("model states are parked already: call reload_states() first.")
        if self._schedule.awaits_step:
            raise UsageError("offload_states between backward and step: end the step first.")
        self._storage = self._storages.open(place, offload)
        if self._storage is self._storages.accelerator:
            return 0
        try:
            self._schedule.settle()
            self._optimizer.settle()
            self._pool.clear()
            for unit in self._schedule.units:
                unit.park(parameters="parameters" in wanted)
            pending = self._copy(wanted)
        except BaseException:
            self.reload()
            raise
        self._optimizer.park(states="optimizer" in wanted)
        self._schedule.parked = frozenset(wanted)
        for one in pending:
            one.memory.untyped_storage().resize_(0)
        self._parked = pending
        return sum(one.content.nbytes for one in pending)

    def _copy(self, states: Sequence[str]) -> list[_Parked]:
        assert self._storage is not None
        copied: dict[int, _Parked] = {}
        for tensor in self._memory(states):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in copied:
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)  # type: ignore[call-overload]
                content = self._storage.slot("parked model states", storage.nbytes(), torch.uint8)
                content.write(memory)
                copied[storage.data_ptr()] = _Parked(memory, content)
        for one in copied.values():
            one.content.wait()
        return list(copied.values())

    def _memory(self, states: Sequence[str]) -> Iterator[Tensor]:
        """Memory of the accelerator, where these states rest."""
        for unit in self._schedule.units:
            for bucket in unit.buckets:
                if "parameters" in states:
                    yield from bucket.tensors("parameters")
                if "optimizer" in states and not bucket.updates_parameters_in_place:
                    yield from bucket.tensors("master")
            for gradients in unit.gradients if "gradients" in states else ():
                yield from gradients.tensors()
        for state_ in self._optimizer.state.values() if "optimizer" in states else ():
            for value in state_.values():
                if isinstance(value, Tensor) and value.ndim and value.device == self._storages.accelerator.device:
                    yield value

    def reload(self) -> None:
        """Bring back what was parked."""
        while self._parked:  # what fails stays parked, and may be tried again
            self._parked[-1].reload()
            self._parked.pop()
        for unit in self._schedule.units:
            unit.unpark()
        if self._schedule.parked:
            self._optimizer.unpark()
        self._schedule.parked = frozenset()
        if self._storage is not None and self._storage is not self._storages.accelerator:
            self._storage.close()
        self._storage = None
