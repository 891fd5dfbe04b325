"""Owns CPU memory beside an accelerator. Called by `Storages`."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.memory_slot import MemorySlot
from zeroshard.storage.transfers import CPU, Copies, aligned_bytes, in_pages

SLAB_NBYTES = 256 << 20
"""Slots are cut from slabs of this size: torch rounds pinned memory up to a power of two."""


@final
class CpuStorage(Storage):
    """CPU memory, pinned where `pin` says so, that is taken once and kept."""

    def __init__(self, copies: Copies, *, pin: bool) -> None:
        self.device, self._copies, self._pin = CPU, copies, pin
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._nbytes = 0

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        nbytes = numel * dtype.itemsize
        memory = self._take(in_pages(nbytes))[:nbytes].view(dtype).zero_()
        self._nbytes += nbytes
        return self.around(label, memory)

    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        """A slot for memory that is there, and may be a part of that of another."""
        assert whole is None or isinstance(whole, MemorySlot)
        return MemorySlot(label, memory, self, self._copies, whole)

    def _take(self, nbytes: int) -> Tensor:
        if not self._pin or nbytes > SLAB_NBYTES:
            return aligned_bytes(nbytes, pin=self._pin)
        if self._slab.numel() < nbytes:
            self._slab = aligned_bytes(SLAB_NBYTES, pin=True)
        taken, self._slab = self._slab[:nbytes], self._slab[nbytes:]
        return taken

    def close(self) -> None:
        return

    @property
    def nbytes(self) -> int:
        return self._nbytes
