"""Owns a slot that is memory, of an accelerator or of the CPU. Called by the storages of those places, and by bucket."""

from __future__ import annotations

from typing import final

from torch import Tensor

from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.transfers import CPU, LANDED, Copies, Transfer


@final
class MemorySlot(Slot):
    """`memory` [numel] of `storage`."""

    def __init__(self, label: str, memory: Tensor, storage: Storage, copies: Copies) -> None:
        super().__init__(label, memory.numel(), memory.dtype)
        self._memory, self._storage, self._copies = memory, storage, copies
        self._last: Transfer = LANDED

    def memory_in(self, storage: Storage) -> Tensor | None:
        return self._memory if storage is self._storage else None

    def read(self, out: Tensor) -> Transfer:
        return self._copies.copy(out, self._memory, self._last)

    def write(self, source: Tensor) -> Transfer:
        self._last = self._copies.copy(self._memory, source, self._last)
        return self._last

    def prefetch(self) -> None:
        return

    def wait(self) -> None:
        self._last.wait(CPU)
        self._last = LANDED
