"""Owns the memory of the device that computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import final

import torch
from torch import Tensor

from zeroshard.storage.base import DeviceStorage, MemorySlot, Slot
from zeroshard.storage.buffers import ArenaBuffer, FlatBuffer, PagedBuffer, ResizedBuffer
from zeroshard.storage.kernel_memory import kernel_memory
from zeroshard.storage.pages import Arena, Pages
from zeroshard.storage.transfers import Copies

SMALL_NBYTES = 64 << 10
"""Memory that comes and goes and is smaller than this is torch's: malloc keeps such blocks, and a page would be mostly empty."""

FREE_SHARE = 1 / 16
"""The share of an accelerator's memory that optional uses of memory leave free, for a longer sequence."""


@final
class AcceleratorStorage(DeviceStorage):
    """The memory of `device`, which may be the CPU."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self.device = device
        self._copies = copies
        self._nbytes = 0
        kernel = kernel_memory() if device.type == "cpu" else None
        self._pages = None if kernel is None else Pages(kernel)
        self._arena = None if self._pages is None else Arena(self._pages)

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self._nbytes += numel * dtype.itemsize
        return self.around(label, torch.zeros(numel, dtype=dtype, device=self.device))

    def taking(self, label: str, memory: Tensor, before_write: Callable[[], None]) -> Slot:
        self._nbytes += memory.nbytes
        return MemorySlot(label, memory, self, self._copies, before_write=before_write)

    def transient_slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self._nbytes += numel * dtype.itemsize
        buffer: FlatBuffer | None = None
        if self._arena is not None and numel * dtype.itemsize >= SMALL_NBYTES:
            with suppress(OSError):
                buffer = ArenaBuffer(label, numel, dtype, self._arena)
        if buffer is None:
            # Live until it is first emptied: torch makes no view of a freed storage, and the optimizer needs its views.
            buffer = ResizedBuffer(label, torch.zeros(numel, dtype=dtype, device=self.device))
        return MemorySlot(label, buffer.tensor, self, self._copies, buffer=buffer)

    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype, *, comes_and_goes: bool) -> FlatBuffer:
        if comes_and_goes and self._pages is not None and numel * dtype.itemsize >= SMALL_NBYTES:
            with suppress(OSError):
                return PagedBuffer(label, numel, dtype, self._pages)
        return ResizedBuffer(label, torch.zeros(numel, dtype=dtype, device=self.device))

    def keep_freed_at_most(self, nbytes: int) -> None:
        if self._pages is not None:
            self._pages.limit_nbytes = nbytes
            self._pages.trim()

    @property
    def freed_nbytes(self) -> int:
        return 0 if self._pages is None else self._pages.freed_nbytes

    def has_room(self, nbytes: int) -> bool:
        if self.device.type == "cpu":
            return False
        free, total = torch.accelerator.get_memory_info(self.device)
        ours = free + torch.accelerator.memory_reserved(self.device)
        return nbytes + total * FREE_SHARE <= ours - torch.accelerator.max_memory_allocated(self.device)

    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        assert whole is None or isinstance(whole, MemorySlot)
        return MemorySlot(label, memory, self, self._copies, whole)
