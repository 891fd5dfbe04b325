"""Owns the blocks and segments that an accelerator's allocator takes for the tensors of a dry run.

The rules follow torch's caching allocator with default settings, on one stream (torch 2.11 to 2.13: constants in
c10/core/AllocatorConfig.h, rules in c10/cuda/CUDACachingAllocator.cpp). Segments are never returned to the driver:
torch does that only when memory runs out, after which it retries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

BLOCK_NBYTES = 512
"""Blocks are multiples of this."""
SMALL_NBYTES = 1 << 20
"""Blocks of at most this size are small and share small segments. A larger block is split only if the rest is above this size."""
SMALL_SEGMENT_NBYTES = 2 << 20
LARGE_SEGMENT_NBYTES = 20 << 20
LARGE_NBYTES = 10 << 20
"""Blocks above SMALL_NBYTES and below this size share segments of LARGE_SEGMENT_NBYTES. Larger ones get a segment each."""
ROUND_NBYTES = 2 << 20
"""Segments of one larger block are multiples of this."""


class MemoryBlock(NamedTuple):
    """A range of memory, `nbytes` bytes from `start`: one tensor's memory, or free."""

    start: int
    nbytes: int
    is_small: bool


class Segments:
    """A caching allocator without memory.

    Attributes:
        reserved: the bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._top = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Free blocks as (bytes, start), ascending, by `is_small`. The first that is large enough is taken."""
        self._by_start: dict[int, MemoryBlock] = {}
        self._by_end: dict[int, MemoryBlock] = {}

    def take(self, nbytes: int) -> MemoryBlock:
        """Return a block of at least `nbytes` bytes."""
        size = _in_multiples(nbytes, BLOCK_NBYTES)
        is_small = size <= SMALL_NBYTES
        free = self._free[is_small]
        index = bisect_left(free, (size, 0))
        if index < len(free):
            whole = self._by_start[free[index][1]]
            self._remove(whole)
        else:
            segment = _in_multiples(size, ROUND_NBYTES)
            if is_small:
                segment = SMALL_SEGMENT_NBYTES
            elif size < LARGE_NBYTES:
                segment = LARGE_SEGMENT_NBYTES
            whole = MemoryBlock(self._top, segment, is_small)
            self._top += segment + BLOCK_NBYTES  # a gap, so that blocks of different segments are never adjacent
            self.reserved += segment
        rest = whole.nbytes - size
        if rest > SMALL_NBYTES or (is_small and rest):
            self._add(MemoryBlock(whole.start + size, rest, is_small))
            return whole._replace(nbytes=size)
        return whole

    def give_back(self, block: MemoryBlock) -> None:
        """Free a block and merge it with adjacent free blocks."""
        for other in (self._by_end.get(block.start), self._by_start.get(block.start + block.nbytes)):
            if other is not None:
                self._remove(other)
                block = MemoryBlock(min(block.start, other.start), block.nbytes + other.nbytes, block.is_small)
        self._add(block)

    def _add(self, block: MemoryBlock) -> None:
        insort(self._free[block.is_small], (block.nbytes, block.start))
        self._by_start[block.start] = block
        self._by_end[block.start + block.nbytes] = block

    def _remove(self, block: MemoryBlock) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.nbytes, block.start))]
        del self._by_start[block.start]
        del self._by_end[block.start + block.nbytes]


def _in_multiples(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
