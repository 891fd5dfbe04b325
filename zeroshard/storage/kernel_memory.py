"""Owns the system calls for memory whose addresses stay while its pages come and go.

Addresses are plain integers here: the caller keeps them alive.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

CHUNK_NBYTES = 2 << 20
"""The bytes that a kernel maps as one huge page, and that move at once."""

_RESERVED = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE if hasattr(mmap, "PROT_READ") else 3
_FIXED = 0x10
_NO_RESERVE = 0x4000
_MAY_MOVE = 1
_MOVE_FIXED = 2
_KEEP_OLD = 4
_DONT_NEED = 4
_HUGE_PAGES = 14
_FAILED = ctypes.c_void_p(-1).value


class KernelMemory:
    """The private anonymous mappings of this process.

    Raises:
        OSError: the kernel refused (in all functions); its number has the reason.
    """

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_size_t
        pointer = ctypes.c_void_p
        for name, arguments in {
            "mmap": (pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
            "mremap": (pointer, size, size, ctypes.c_int, pointer),
        }.items():
            getattr(self._libc, name).argtypes = arguments
            getattr(self._libc, name).restype = pointer
        self._libc.munmap.argtypes = (pointer, size)
        self._libc.madvise.argtypes = (pointer, size, ctypes.c_int)

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses without memory: a read there ends the process. A chunk or more begins at a multiple of CHUNK_NBYTES."""
        if nbytes < CHUNK_NBYTES:
            return self._map(None, nbytes, _RESERVED)
        start = self._map(None, nbytes + CHUNK_NBYTES, _RESERVED)
        address = -(-start // CHUNK_NBYTES) * CHUNK_NBYTES
        if address > start:
            self.unmap(start, address - start)
        if start + CHUNK_NBYTES > address:
            self.unmap(address + nbytes, start + CHUNK_NBYTES - address)
        return address

    def fill(self, address: int, nbytes: int) -> None:
        """Map zeros there. A page takes memory at its first write; a range of exactly CHUNK_NBYTES gets huge pages."""
        self._map(address, nbytes, _READ_WRITE)
        if nbytes == CHUNK_NBYTES:
            self._libc.madvise(address, nbytes, _HUGE_PAGES)  # a wish

    def hide(self, address: int, nbytes: int) -> None:
        """Hide the range, as `reserve` left it: memory that was there goes back to the kernel."""
        try:
            self._map(address, nbytes, _RESERVED)
        except OSError:  # too many mappings: then zeros are read there
            self._libc.madvise(address, nbytes, _DONT_NEED)

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Move pages, without a copy: afterwards `target` has those of `source`, and `source` has none."""
        flags = _MAY_MOVE | _MOVE_FIXED | _KEEP_OLD
        self._check(self._libc.mremap(source, nbytes, nbytes, flags, target))

    def unmap(self, address: int, nbytes: int) -> None:
        """Release the addresses to the kernel."""
        self._libc.munmap(address, nbytes)

    def _map(self, address: int | None, nbytes: int, protection: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE | (0 if address is None else _FIXED)
        return self._check(self._libc.mmap(address, nbytes, protection, flags, -1, 0))

    def _check(self, address: int | None) -> int:
        if address is None or address == _FAILED:
            raise OSError(ctypes.get_errno(), "no memory mapping")
        return address


def kernel_memory() -> KernelMemory | None:
    """Return None where the kernel cannot move pages and keep the addresses (Linux before 5.7, a filter of system calls)."""
    try:
        kernel = KernelMemory()
        one = kernel.reserve(mmap.PAGESIZE)
        other = kernel.reserve(mmap.PAGESIZE)
    except (OSError, AttributeError, TypeError):
        return None
    try:
        kernel.fill(one, mmap.PAGESIZE)
        ctypes.memset(one, 1, 1)
        kernel.move(one, other, mmap.PAGESIZE)
        moved = ctypes.string_at(other, 1) == b"\1" and ctypes.string_at(one, 1) == b"\0"
        kernel.hide(one, mmap.PAGESIZE)
        return kernel if moved else None
    except OSError:
        return None
    finally:
        for address in (one, other):
            kernel.unmap(address, mmap.PAGESIZE)
