"""Owns CPU memory beside an accelerator."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from zeroshard.storage.base import MemoryStorage, Slot
from zeroshard.storage.transfers import CPU, Copies, aligned_bytes, in_pages

SLAB_NBYTES = 256 << 20
"""Slots are cut from slabs of at least this size: torch rounds pinned memory up to a power of two."""
_LEFT = 1 / 16
"""The share of a slab, cut into slots of one size, that may be left over for smaller ones."""


@final
class CpuStorage(MemoryStorage):
    """CPU memory that is allocated once and kept; pinned if `pin` is True."""

    def __init__(self, copies: Copies, *, pin: bool) -> None:
        super().__init__(CPU, copies)
        self.pin = pin
        self._rests: list[Tensor] = []
        """The parts of slabs that no slot has taken."""

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        nbytes = numel * dtype.itemsize
        memory = self._take(in_pages(nbytes))[:nbytes].view(dtype).zero_()
        self._nbytes += nbytes
        return self.around(label, memory)

    def _take(self, nbytes: int) -> Tensor:
        if not self.pin:
            return aligned_bytes(nbytes, pin=False)
        fitting = [rest for rest in self._rests if rest.numel() >= nbytes]
        if fitting:
            slab = min(fitting, key=Tensor.numel)
            self._rests = [rest for rest in self._rests if rest is not slab]
        else:
            slab = aligned_bytes(slab_nbytes(nbytes, self._nbytes), pin=True)
        if slab.numel() > nbytes:
            self._rests.append(slab[nbytes:])
        return slab[:nbytes]


def slab_nbytes(nbytes: int, taken: int) -> int:
    """Return the size of a slab for a slot of `nbytes`, and others like it, where `taken` bytes were taken before.

    A power of two, of which little is left over. The next slots may never come: no more than was taken is laid by for them.
    """
    sizes = [max(SLAB_NBYTES, 1 << (nbytes - 1).bit_length())]
    while sizes[-1] * 2 <= taken:
        sizes.append(sizes[-1] * 2)
    left = {size: size % nbytes / size for size in sizes}
    return next((size for size in sizes if left[size] <= _LEFT), min(sizes, key=left.__getitem__))
