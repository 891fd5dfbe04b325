"""Owns memory of a CPU whose pages come and go while its addresses stay: ranges, and the pool of pages that one model keeps.

[Note: freed pages]
Memory that goes to the kernel and comes back costs a page fault, and zeros, for each page: 35 ms for 64 MiB. So the pages of a
resharded unit are moved aside (0.1 ms), and then to the addresses of the next unit. Pages aside and pages of units together are
never more than units held at once before, nor than `limit_nbytes`; further pages go to the kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from zeroshard.storage.kernel_memory import CHUNK_NBYTES, KernelMemory
from zeroshard.storage.transfers import in_pages

BLOCK_NBYTES = 64 << 20
"""Addresses that an arena reserves at once."""


class Pages:
    """The pool of one model. See [Note: freed pages].

    Attributes:
        limit_nbytes: the limit on freed pages together with the units' memory, as far as `Pages` controls it.
    """

    def __init__(self, kernel: KernelMemory) -> None:
        self.kernel = kernel
        self.limit_nbytes = 0
        self._held = self._most_held = 0
        self._freed: dict[int, list[int]] = {}
        """Addresses of pages that wait, by size."""
        self._empty: dict[int, list[int]] = {}
        """Addresses where pages have waited, by size."""
        self._all: dict[int, int] = {}
        """Every address that was reserved, and its bytes."""
        weakref.finalize(self, _unmap_all, kernel, self._all).atexit = False

    @property
    def freed_nbytes(self) -> int:
        """The number of bytes of freed pages that are kept."""
        return sum(size * len(addresses) for size, addresses in self._freed.items())

    def hold(self, nbytes: int) -> None:
        """Count the bytes that a unit holds from now on; a negative number: no longer."""
        self._held += nbytes
        self._most_held = max(self._most_held, self._held)

    def trim(self) -> None:
        """Give freed pages above the limit to the kernel. Odd sizes, which fit fewer units, go first."""
        over = -self._room
        if over <= 0:
            return
        for size in sorted(self._freed):
            while over > 0 and self._freed[size]:
                address = self._freed[size].pop()
                self.kernel.hide(address, size)
                self._empty.setdefault(size, []).append(address)
                over -= size

    @property
    def _room(self) -> int:
        return min(self.limit_nbytes, self._most_held) - self._held - self.freed_nbytes

    def put(self, address: int, nbytes: int) -> None:
        """Put memory of undefined content at these reserved addresses."""
        freed = self._freed.get(nbytes)
        if freed:
            source = freed.pop()
            try:
                self.kernel.move(source, address, nbytes)
            except OSError:  # such as too many mappings
                self.kernel.unmap(source, self._all.pop(source))
            else:
                self._empty.setdefault(nbytes, []).append(source)
                return
        self.kernel.fill(address, nbytes)

    def take(self, address: int, nbytes: int) -> None:
        """Park the memory at these addresses, if there is room. The caller hides the addresses next."""
        if nbytes > self._room:
            return
        try:
            target = self._place(nbytes)
        except OSError:
            return
        try:
            self.kernel.move(address, target, nbytes)
        except OSError:
            self._empty[nbytes].append(target)
            return
        self._freed.setdefault(nbytes, []).append(target)

    def _place(self, nbytes: int) -> int:
        empty = self._empty.setdefault(nbytes, [])
        if empty:
            return empty.pop()
        address = self.kernel.reserve(nbytes)
        self._all[address] = nbytes
        return address


def _unmap_all(kernel: KernelMemory, mapped: dict[int, int]) -> None:
    for address, nbytes in mapped.items():
        kernel.unmap(address, nbytes)


class Range:
    """A range of `nbytes` addresses, in pieces of CHUNK_NBYTES and a shorter last one. Each piece has memory or has none.

    The addresses are reserved as long as this, or a tensor of it, lives.

    Raises:
        OSError: there are no addresses (RLIMIT_AS).
    """

    def __init__(self, pages: Pages, nbytes: int) -> None:
        self._pages = pages
        self._nbytes = _whole_pages(nbytes)
        self._address = pages.kernel.reserve(self._nbytes)
        weakref.finalize(self, pages.kernel.unmap, self._address, self._nbytes).atexit = False
        self._starts = range(0, self._nbytes, CHUNK_NBYTES)
        self._has_memory = [False] * len(self._starts)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype, owner: object = None) -> Tensor:
        """Return `numel` (at least 1) elements from `offset` on, in a storage of their own, which keeps `owner` alive too."""
        array: Any = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(self._address + offset)
        array.owner = self if owner is None else owner  # which lives as long as the storage
        return torch.frombuffer(array, dtype=dtype)

    def pieces(self, offset: int, nbytes: int) -> range:
        """Return the numbers of the pieces that contain these bytes."""
        return range(bisect_right(self._starts, offset) - 1, bisect_right(self._starts, offset + nbytes - 1))

    def fill(self, pieces: range) -> None:
        """Give memory of undefined content to pieces without memory.

        Raises:
            OSError: there is none left.
        """
        for piece in pieces:
            if not self._has_memory[piece]:
                self._pages.put(*self._piece(piece))
                self._has_memory[piece] = True

    def empty(self, pieces: range) -> None:
        """Return the memory to the pool or the kernel."""
        for piece in pieces:
            if self._has_memory[piece]:
                self._pages.take(*self._piece(piece))
                self._has_memory[piece] = False
        if pieces:
            start, (last, nbytes) = self._piece(pieces[0])[0], self._piece(pieces[-1])
            self._pages.kernel.hide(start, last + nbytes - start)

    def _piece(self, number: int) -> tuple[int, int]:
        start = self._starts[number]
        return self._address + start, min(CHUNK_NBYTES, self._nbytes - start)


class Arena:
    """A list of ranges that parts are cut from, one after another. A piece has memory while any part in it has."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._range: Range | None = None
        self._users: list[int] = []
        self._used = self._nbytes = 0

    def part(self, nbytes: int) -> Part:
        """Make a part of this many bytes (at least 1), without memory.

        Raises:
            OSError: there are no addresses.
        """
        if self._range is None or self._used + nbytes > self._nbytes:
            self._nbytes = max(BLOCK_NBYTES, -(-nbytes // CHUNK_NBYTES) * CHUNK_NBYTES)
            self._range = Range(self._pages, self._nbytes)
            self._users = []
            self._used = 0
            self._users = [0] * (self._nbytes // CHUNK_NBYTES)
        part = Part(self._range, self._users, self._used, nbytes)
        self._used += -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES
        return part


class Part:
    """A part of an arena, made by it. Its memory is freed when neither this nor its tensor is alive."""

    def __init__(self, of: Range, users: list[int], offset: int, nbytes: int) -> None:
        self._range = of
        self._users = users
        self._offset = offset
        self._pieces = of.pieces(offset, nbytes)
        self._is_filled = False

    def __del__(self) -> None:
        self.empty()

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return all of the range as a tensor."""
        return self._range.tensor(self._offset, numel, dtype, self)

    def fill(self) -> None:
        """Give the part memory of undefined content.

        Raises:
            OSError: there is none left.
        """
        if not self._is_filled:
            self._range.fill(self._pieces)
            self._is_filled = True
            for piece in self._pieces:
                self._users[piece] += 1

    def empty(self) -> None:
        """Give the part's memory back."""
        if not self._is_filled:
            return
        for piece in self._pieces:
            self._users[piece] -= 1
            if not self._users[piece]:
                self._range.empty(range(piece, piece + 1))
        self._is_filled = False


_LINE_NBYTES = 64


def _whole_pages(nbytes: int) -> int:
    return max(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, in_pages(nbytes))
