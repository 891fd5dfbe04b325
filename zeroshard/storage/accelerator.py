"""Owns the memory of the device that computes."""

from __future__ import annotations

from contextlib import suppress
from typing import final

import torch

from zeroshard.storage.base import DeviceStorage, MemorySlot, Slot
from zeroshard.storage.buffers import FlatBuffer, PagedBuffer, ResizedBuffer
from zeroshard.storage.pages import Arena, Pages, Part, Range, kernel_memory
from zeroshard.storage.transfers import Copies

SMALL_NBYTES = 64 << 10
"""Memory that comes and goes and is smaller than this is torch's: malloc keeps such blocks, and a page would be mostly empty."""

FREE_SHARE = 1 / 16
"""The share of an accelerator's memory that optional uses of memory leave free, for a longer sequence."""


@final
class AcceleratorStorage(DeviceStorage):
    """The memory of `device`, which may be the CPU."""

    def __init__(self, device: torch.device, copies: Copies) -> None:
        super().__init__(device, copies)
        kernel = kernel_memory() if device.type == "cpu" else None
        self._pages = None if kernel is None else Pages(kernel)
        self._arena = None if self._pages is None else Arena(self._pages)

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self._nbytes += numel * dtype.itemsize
        return self.around(label, torch.zeros(numel, dtype=dtype, device=self.device))

    def transient_slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        nbytes = numel * dtype.itemsize
        self._nbytes += nbytes
        buffer: FlatBuffer | None = None
        if self._arena is not None and nbytes >= SMALL_NBYTES:
            with suppress(OSError):
                buffer = PagedBuffer(label, dtype, self._arena.part(nbytes), is_filled=False)
        if buffer is None:
            # Live until it is first emptied: torch makes no view of a freed storage, and the optimizer needs its views.
            buffer = ResizedBuffer(label, torch.zeros(numel, dtype=dtype, device=self.device))
        return MemorySlot(label, buffer.tensor, self, self._copies, buffer=buffer)

    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype, *, comes_and_goes: bool) -> FlatBuffer:
        nbytes = numel * dtype.itemsize
        if comes_and_goes and self._pages is not None and nbytes >= SMALL_NBYTES:
            with suppress(OSError):
                part = Part(Range(self._pages, nbytes), 0, nbytes, is_unit=True)
                return PagedBuffer(label, dtype, part, is_filled=True)
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
