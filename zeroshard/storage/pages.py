"""Owns CPU memory that keeps its addresses while its pages come and go: ranges, and one model's pool of pages.

[Note: freed pages]
Memory that goes to the kernel and comes back costs a page fault, and zeros, for each page: 35 ms for 64 MiB. So the pages of a
resharded unit are moved aside (0.1 ms), and then to the addresses of the next unit. Pages stay aside only while they and the pages
of units together exceed neither `limit_nbytes` nor the most that units have held at once. Other pages go to the kernel.

`BufferPool` cannot do this: it lends other addresses each time, while autograd and the optimizer keep views of units and gradients.
An accelerator does not need any of this: torch's allocator frees and allocates memory under such views, in the order of
its streams.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zeroshard.storage.transfers import in_pages

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
    """The private anonymous mappings of this process. Addresses are plain integers: the caller keeps them alive.

    If the kernel refuses, `reserve`, `fill` and `move` raise an OSError, whose `errno` has the reason.
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
        """Reserve addresses without memory: a read there ends the process. Ranges of a chunk or more are aligned to chunks."""
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
        """Map zeros at these addresses. A page takes memory at its first write. A range of CHUNK_NBYTES may get a huge page."""
        self._map(address, nbytes, _READ_WRITE)
        if nbytes == CHUNK_NBYTES:
            self._libc.madvise(address, nbytes, _HUGE_PAGES)  # only a hint

    def hide(self, address: int, nbytes: int) -> None:
        """Hide the range, so that it is as `reserve` left it: its memory goes back to the kernel."""
        try:
            self._map(address, nbytes, _RESERVED)
        except OSError:  # too many mappings: then zeros are read there
            self._libc.madvise(address, nbytes, _DONT_NEED)

    def move(self, source: int, target: int, nbytes: int) -> None:
        """Move pages without a copy: afterwards `target` has the pages of `source`, and `source` has none."""
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
    """Return the kernel's functions; None where it cannot move pages and keep addresses (Linux before 5.7, filtered calls)."""
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


class Pages:
    """The pool of freed pages of one model. See [Note: freed pages]."""

    def __init__(self, kernel: KernelMemory) -> None:
        self.kernel = kernel
        self.limit_nbytes = 0
        """The limit on freed pages together with the units' memory, as far as `Pages` controls it."""
        self._held = self._most_held = 0
        self._freed = defaultdict[int, list[int]](list)
        """The addresses of pages that are kept for the next units, by size."""
        self._empty = defaultdict[int, list[int]](list)
        """Addresses where pages were kept before, by size."""
        self._all: dict[int, int] = {}
        """Every address that was reserved, and its bytes."""
        weakref.finalize(self, _unmap_all, kernel, self._all).atexit = False

    @property
    def freed_nbytes(self) -> int:
        """The number of bytes of freed pages that are kept."""
        return sum(size * len(addresses) for size, addresses in self._freed.items())

    def hold(self, nbytes: int) -> None:
        """Count bytes that a unit holds from now on, or no longer holds if the number is negative."""
        self._held += nbytes
        self._most_held = max(self._most_held, self._held)

    def trim(self) -> None:
        """Give freed pages above the limit to the kernel. The smallest ranges, which fit fewer units, go first."""
        over = -self._room
        if over <= 0:
            return
        for size in sorted(self._freed):
            while over > 0 and self._freed[size]:
                address = self._freed[size].pop()
                self.kernel.hide(address, size)
                self._empty[size].append(address)
                over -= size

    @property
    def _room(self) -> int:
        return min(self.limit_nbytes, self._most_held) - self._held - self.freed_nbytes

    def put(self, address: int, nbytes: int) -> None:
        """Put memory of undefined content at these reserved addresses."""
        if self._freed[nbytes]:
            source = self._freed[nbytes].pop()
            try:
                self.kernel.move(source, address, nbytes)
            except OSError:  # such as too many mappings
                self.kernel.unmap(source, self._all.pop(source))
            else:
                self._empty[nbytes].append(source)
                return
        self.kernel.fill(address, nbytes)

    def take(self, address: int, nbytes: int) -> None:
        """Keep the memory at these addresses for the next unit, if there is room. The caller hides the addresses next."""
        if nbytes > self._room:
            return
        with suppress(OSError):  # such as too many mappings
            # The target leaves the list first: during calls of the kernel another thread may take one.
            if self._empty[nbytes]:
                target = self._empty[nbytes].pop()
            else:
                target = self.kernel.reserve(nbytes)
                self._all[target] = nbytes
            try:
                self.kernel.move(address, target, nbytes)
            except OSError:
                self._empty[nbytes].append(target)
                raise
            self._freed[nbytes].append(target)


def _unmap_all(kernel: KernelMemory, mapped: dict[int, int]) -> None:
    for address, nbytes in mapped.items():
        kernel.unmap(address, nbytes)


class Range:
    """Addresses of at least one byte, with memory or without. The memory is freed when neither this object nor its tensor is alive.

    The pool counts the memory of a unit (`is_unit`). If no addresses are left (RLIMIT_AS), the constructor raises
    OSError.
    """

    def __init__(self, pages: Pages, nbytes: int, *, is_unit: bool = False) -> None:
        self.nbytes = 0
        """The number of bytes of live memory now."""
        size = max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, in_pages(nbytes))
        self.address = pages.kernel.reserve(size)
        self._pages = pages
        self._all_nbytes = nbytes
        self._size = size
        self.is_unit = is_unit
        self._unmap = weakref.finalize(self, pages.kernel.unmap, self.address, size)
        self._unmap.atexit = False

    def __del__(self) -> None:
        self.empty()

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor over all of the range's memory, with its own torch storage object."""
        array: Any = (ctypes.c_uint8 * self._all_nbytes).from_address(self.address)
        array.owner = self  # the array lives as long as the storage
        return torch.frombuffer(array, dtype=dtype)

    def fill(self) -> None:
        """Give the range memory of undefined content or raise OSError if there is none left."""
        try:
            for address, nbytes in self._pieces():
                self._pages.put(address, nbytes)
        except OSError:
            self._pages.kernel.hide(self.address, self._size)
            raise
        self.nbytes = self._all_nbytes
        if self.is_unit:
            self._pages.hold(self.nbytes)
            self._pages.trim()

    def empty(self) -> None:
        """Give the memory back to the pool or the kernel."""
        if not self.nbytes:
            return
        if self.is_unit:
            self._pages.hold(-self.nbytes)
        self.nbytes = 0
        if self._unmap.alive:  # if the garbage collector ended a cycle, the addresses may be in other use
            for address, nbytes in self._pieces():
                self._pages.take(address, nbytes)
            self._pages.kernel.hide(self.address, self._size)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        """Yield (address, bytes) of the pieces that move at once: of CHUNK_NBYTES, and a shorter last one."""
        for start in range(0, self._size, CHUNK_NBYTES):
            yield self.address + start, min(CHUNK_NBYTES, self._size - start)
