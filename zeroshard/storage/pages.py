"""Owns memory of a CPU whose pages come and go while its addresses stay: ranges, and the pool of pages that one model keeps.

[Note: parked pages]
To give memory back to the kernel and to take it again costs a page fault, and zeros, for each page: 35 ms for 64 MiB. So pages that
a unit gives back are moved aside (0.1 ms), and moved to where the next unit needs them. What waits so, and what units hold, is
never more than units held at once before, nor than `limit_nbytes`; what is above goes to the kernel.
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
    """The pool of one model. See [Note: parked pages].

    Attributes:
        limit_nbytes: what is parked and what units hold are at most so much together, as far as that is for `Pages` to say.
    """

    def __init__(self, kernel: KernelMemory) -> None:
        self.kernel = kernel
        self.limit_nbytes = 0
        self._held = self._most_held = 0
        self._parked: dict[int, list[int]] = {}
        """Addresses of pages that wait, by size."""
        self._empty: dict[int, list[int]] = {}
        """Addresses where pages have waited, by size."""
        self._all: dict[int, int] = {}
        """Every address that was reserved, and its bytes."""
        weakref.finalize(self, _unmap_all, kernel, self._all).atexit = False

    @property
    def parked_nbytes(self) -> int:
        """Bytes that wait."""
        return sum(size * len(addresses) for size, addresses in self._parked.items())

    def hold(self, nbytes: int) -> None:
        """A unit holds so much more; or, if it is negative, less."""
        self._held += nbytes
        self._most_held = max(self._most_held, self._held)

    def trim(self) -> None:
        """Give to the kernel what is parked above what may be. Odd sizes, which fit fewer, go first."""
        over = -self._room
        if over <= 0:
            return
        for size in sorted(self._parked):
            while over > 0 and self._parked[size]:
                address = self._parked[size].pop()
                self.kernel.hide(address, size)
                self._empty.setdefault(size, []).append(address)
                over -= size

    @property
    def _room(self) -> int:
        return min(self.limit_nbytes, self._most_held) - self._held - self.parked_nbytes

    def put(self, address: int, nbytes: int) -> None:
        """Memory at these reserved addresses, of undefined content."""
        parked = self._parked.get(nbytes)
        if parked:
            source = parked.pop()
            try:
                self.kernel.move(source, address, nbytes)
            except OSError:  # too many mappings, say
                self.kernel.unmap(source, self._all.pop(source))
            else:
                self._empty.setdefault(nbytes, []).append(source)
                return
        self.kernel.fill(address, nbytes)

    def take(self, address: int, nbytes: int) -> None:
        """The memory at these addresses is needed no longer. They are to be hidden next."""
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
        self._parked.setdefault(nbytes, []).append(target)

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
    """`nbytes` of addresses, in pieces of CHUNK_NBYTES and a last one of what is left, each with memory or without.

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
        """`numel` (at least 1) elements from `offset` on, with a storage of their own, which keeps `owner` alive too."""
        array: Any = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(self._address + offset)
        array.owner = self if owner is None else owner  # which lives as long as the storage
        return torch.frombuffer(array, dtype=dtype)

    def pieces(self, offset: int, nbytes: int) -> range:
        """The numbers of the pieces that these bytes lie in."""
        return range(bisect_right(self._starts, offset) - 1, bisect_right(self._starts, offset + nbytes - 1))

    def fill(self, pieces: range) -> None:
        """Memory where there is none, of undefined content.

        Raises:
            OSError: there is none left.
        """
        for piece in pieces:
            if not self._has_memory[piece]:
                self._pages.put(*self._piece(piece))
                self._has_memory[piece] = True

    def empty(self, pieces: range) -> None:
        """Give the memory back, to the pool or the kernel."""
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
    """Ranges that parts are cut from, one after another: a piece of them has memory while any part in it has."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._range: Range | None = None
        self._users: list[int] = []
        self._used = self._nbytes = 0

    def part(self, nbytes: int) -> Part:
        """Room for so many bytes (at least 1), without memory.

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
    """A part of an arena, made by it. Its memory is given back when neither this nor its tensor lives."""

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
        """Memory, of undefined content.

        Raises:
            OSError: there is none left.
        """
        if not self._is_filled:
            self._range.fill(self._pieces)
            self._is_filled = True
            for piece in self._pieces:
                self._users[piece] += 1

    def empty(self) -> None:
        """The end of `fill`."""
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
