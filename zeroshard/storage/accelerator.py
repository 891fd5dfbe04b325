"""Owns the memory of the device that computes. Called by `Storages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.memory_slot import MemorySlot
from zeroshard.storage.transfers import Copies


@final
class AcceleratorStorage(Storage):
    """Memory of `device`. Where that is the CPU, it is CPU memory too."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self.device, self._copies = device, copies
        self._nbytes = 0

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self._nbytes += numel * dtype.itemsize
        return self.around(label, torch.zeros(numel, dtype=dtype, device=self.device))

    def taking(self, label: str, memory: Tensor, before_write: Callable[[], None]) -> Slot:
        """A slot in memory that was made for it."""
        self._nbytes += memory.nbytes
        return MemorySlot(label, memory, self, self._copies, before_write=before_write)

    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        """A slot for memory that is there, and may be a part of that of another."""
        assert whole is None or isinstance(whole, MemorySlot)
        return MemorySlot(label, memory, self, self._copies, whole)

    def close(self) -> None:
        return

    @property
    def nbytes(self) -> int:
        return self._nbytes
