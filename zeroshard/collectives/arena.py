"""Owns memory that the other ranks of this host read in place: one unnamed file of this process, mapped by all. Called by shared_memory.

The file has no name (memfd), so nothing is left behind however a process ends, and a container's small /dev/shm does not matter. It is
sparse: pages exist from their first use on, and are given back with the tensor that used them.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import weakref
from bisect import insort

import torch
from torch import Tensor

RESERVED = 1 << 38
"""Addresses of one arena. They cost nothing; a process that may not have so many (ulimit -v) goes without shared memory."""
_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000
_PUNCH_HOLE = 0x3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class Arena:
    """Memory of this process that others may read.

    Attributes:
        descriptor: of the file, to be handed to the other ranks.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, RESERVED)
        self._map = mapped(self.descriptor)
        self._base = address_of(self._map)
        self._end = 0
        self._free: list[tuple[int, int]] = []
        """(start, numel of bytes) of ranges that were given back, by start; neighbours are one."""
        self._libc = ctypes.CDLL(None, use_errno=True)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor with undefined content. Its pages are given back with the last tensor that looks at them."""
        nbytes = -(-max(numel * dtype.itemsize, 1) // _PAGE) * _PAGE
        start = self._take(nbytes)
        memory = (ctypes.c_char * nbytes).from_buffer(self._map, start)
        weakref.finalize(memory, self._give_back, start, nbytes)
        return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Where a tensor's first element lies in the file; None where it is no memory of the arena's."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._end else None

    def _take(self, nbytes: int) -> int:
        for number, (start, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[number : number + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
                return start
        start, self._end = self._end, self._end + nbytes
        if self._end > RESERVED:
            raise MemoryError(f"more than {RESERVED:,} bytes of memory that ranks share")
        return start

    def _give_back(self, start: int, nbytes: int) -> None:
        self._libc.fallocate64(
            self.descriptor, _PUNCH_HOLE, ctypes.c_longlong(start), ctypes.c_longlong(nbytes)
        )  # without it the pages stay, and are used again
        insort(self._free, (start, nbytes))
        merged: list[tuple[int, int]] = []
        for one in self._free:
            if merged and sum(merged[-1]) == one[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + one[1])
            else:
                merged.append(one)
        self._free = merged

    def close(self) -> None:
        """No further rank is given it. The memory goes with the last tensor."""
        os.close(self.descriptor)


class Window:
    """Another rank's arena, as this process reads it."""

    def __init__(self, descriptor: int) -> None:
        self._map = mapped(descriptor)
        os.close(descriptor)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The other rank's elements, 1-D."""
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)


def mapped(descriptor: int) -> mmap.mmap:
    """The whole file."""
    return mmap.mmap(descriptor, RESERVED, flags=mmap.MAP_SHARED | _NO_RESERVE)


def address_of(mapping: mmap.mmap) -> int:
    """Where it begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
