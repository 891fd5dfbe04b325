"""Owns memory that the other ranks of this host read in place: one unnamed file, mapped by all.

The file has no name (memfd), so nothing is left behind however a process ends, and a container's small /dev/shm does not
matter. The file is sparse: a page exists from its first use on and is freed with the tensor that used it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import insort
from collections import deque

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)


class SharedFile:
    """The memory of this process that others may read. A forked process does not have it.

    Raises:
        OSError: the system does not allow it.
    """

    def __init__(self) -> None:
        self._size = os.sysconf("SC_PHYS_PAGES") * _PAGE  # this host's memory: unused addresses cost nothing
        self.descriptor = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        """The file descriptor that other ranks receive; -1 once it is closed."""
        try:
            os.ftruncate(self.descriptor, self._size)
            self._base = _mapped(self.descriptor, self._size, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self.descriptor)
            raise
        _unmap_with(self, self._base, self._size)
        self._end = 0
        self._process = os.getpid()
        self._is_closed = False
        self._free: list[tuple[int, int]] = []
        """The freed ranges as (start, bytes), by start; adjacent ones are merged."""
        self._returned = deque[tuple[int, int]]()
        """The ranges that any thread has freed, and that are not yet in the list above."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor of zeros. Its pages are freed with the last tensor that views them."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = -(-numel * dtype.itemsize // _PAGE) * _PAGE
        start = self._take(nbytes)
        memory = (ctypes.c_char * nbytes).from_address(self._base + start)
        # This keeps the object, and so the mapping, as long as the memory is in use.
        weakref.finalize(memory, self._give_back, start, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8, count=numel * dtype.itemsize).view(dtype)

    def discard(self, tensor: Tensor) -> None:
        """Free the pages of a whole tensor from `empty`. Its content is undefined until it is written."""
        self._discard(tensor.data_ptr() - self._base, -(-tensor.nbytes // _PAGE) * _PAGE)

    def _discard(self, start: int, nbytes: int) -> None:
        if _advise(self._base + start, nbytes, mmap.MADV_REMOVE):
            ctypes.memset(self._base + start, 0, nbytes)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the offset in the file of a tensor's first element; None if it is not in the file."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._end else None

    def _take(self, nbytes: int) -> int:
        if self._returned:
            while self._returned:
                insort(self._free, self._returned.popleft())
            merged: list[tuple[int, int]] = []
            for start, size in self._free:
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((start, size))
            self._free = merged
        for number, (start, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[number : number + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
                return start
        if self._end + nbytes > self._size:
            raise MemoryError(f"ranks of one host share at most the host's memory ({self._size:,} bytes)")
        start = self._end
        self._end = self._end + nbytes
        return start

    def _give_back(self, start: int, nbytes: int) -> None:
        if self._is_closed or os.getpid() != self._process:  # a rank may still read it; the last mapping frees it
            return
        self._discard(start, nbytes)
        self._returned.append((start, nbytes))

    def hand_over(self) -> None:
        """Close the descriptor, once every rank has received it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Close the descriptor. Ranges freed later keep their pages until the last mapping ends: others may still read them."""
        self.hand_over()
        self._is_closed = True


class Window:
    """Another rank's file, as this process reads it. The window closes the file's descriptor.

    Raises:
        OSError: the system does not allow it.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            self._base = _mapped(descriptor, size, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.close = _unmap_with(self, self._base, size)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the other rank's elements as a 1-D tensor, to be read only, valid as long as the window."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        nbytes = numel * dtype.itemsize
        memory = (ctypes.c_char * nbytes).from_address(self._base + offset)
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype)


def _mapped(descriptor: int, size: int, protection: int) -> int:
    """Map the whole file and return its address. Forked children do not have the mapping.

    A child's writes would change this process's memory, and a child that outlives the process would keep it allocated.
    """
    map_file = _LIBC.mmap
    map_file.restype = ctypes.c_void_p
    map_file.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address: int | None = map_file(None, size, protection, mmap.MAP_SHARED | _NO_RESERVE, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _advise(address, size, mmap.MADV_DONTFORK)
    return address


def _advise(address: int, nbytes: int, advice: int) -> int:
    return int(_LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice))


def _unmap_with(owner: object, address: int, size: int) -> weakref.finalize[..., object]:
    """Unmap the file when its owner is deleted, or when the returned finalizer is called."""
    finalizer = weakref.finalize(owner, _unmap, os.getpid(), address, size)
    finalizer.atexit = False
    return finalizer


def _unmap(process: int, address: int, size: int) -> None:
    if os.getpid() == process:  # in a child, other data may be there
        _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
