"""Owns the place of a part in a whole: integers only.

Tensor parallelism cuts a parameter along one of the parameter's dimensions, and each of the ranks holds one slab. In the
flattened whole a slab is a series of equal runs, one every `stride` elements. An uncut parameter is one slab in one run.

    shape (3, 4), dimension 1, from 2 to 4       whole   . . a b . . c d . . e f
                                                 slab    a b c d e f        runs of 2, one every 4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """A pattern in a flattened whole: `count` runs of `numel` elements, the first at `start`, and one every `stride` elements."""

    start: int
    numel: int
    stride: int
    count: int = 1

    @property
    def stop(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.numel

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs' parts in a range: (start, stop) in the whole, and the number of the runs' elements before the part."""
        first = max((start - self.start) // self.stride, 0) if self.count > 1 else 0
        for number in range(first, self.count):
            begin = self.start + number * self.stride
            if begin >= stop:
                return
            low = max(begin, start)
            high = min(begin + self.numel, stop)
            if low < high:
                yield low, high, number * self.numel + low - begin

    def common(self, other: Runs) -> Iterator[Common]:
        """Yield the blocks that two patterns have in common: few if their strides agree, or if one of them is contiguous."""
        strides = {runs.stride for runs in (self, other) if runs.count > 1}
        stride = next(iter(strides), max(self.stop, other.stop, 1))
        pairs: tuple[tuple[Runs, Runs], ...] = ((self, other),)
        if len(strides) > 1:  # cut along different dimensions
            stride = other.stride
            rows = range(self.count)
            pairs = tuple((Runs(self.start + row * self.stride, self.numel, self.numel), other) for row in rows)
        own = 0
        for mine, theirs in pairs:
            for a, here in mine._rows(stride):
                for b, there in theirs._rows(stride):
                    yield from _common_rows(a, own + here, b, there, stride)
            own += mine.numel * mine.count

    def _rows(self, stride: int) -> Iterator[tuple[Runs, int]]:
        """Yield the same elements as runs that cross no multiple of `stride`, each with the number of elements before the run."""
        if self.count > 1 and self.stride == stride and self.start % stride + self.numel <= stride:
            yield self, 0
            return
        before = 0
        for number in range(self.count):
            start = self.start + number * self.stride
            stop = start + self.numel
            while start < stop:
                whole = (stop - start) // stride
                if start % stride or not whole:
                    size = min(stride - start % stride, stop - start)
                    yield Runs(start, size, stride), before
                else:
                    size = whole * stride
                    yield Runs(start, stride, stride, whole), before
                start += size
                before += size


@dataclass(frozen=True, slots=True)
class Common:
    """A part of the intersection of two patterns of runs: `count` blocks of `numel` elements.

    Attributes:
        here, every: the place of the first block among the elements of the first pattern, and the distance to the next block.
        there, other_every: the same for the second pattern.
    """

    count: int
    numel: int
    here: int
    every: int
    there: int
    other_every: int


def _common_rows(a: Runs, here: int, b: Runs, there: int, stride: int) -> Iterator[Common]:
    """Intersect two patterns with the same stride, in which no run crosses a multiple of the stride."""
    first_a, first_b = a.start // stride, b.start // stride
    first = max(first_a, first_b)
    count = min(first_a + a.count, first_b + b.count) - first
    low_a, low_b = a.start % stride, b.start % stride
    low = max(low_a, low_b)
    numel = min(low_a + a.numel, low_b + b.numel) - low
    if count > 0 and numel > 0:
        here += (first - first_a) * a.numel + low - low_a
        there += (first - first_b) * b.numel + low - low_b
        yield Common(count, numel, here, a.numel, there, b.numel)


@dataclass(frozen=True)
class Placement:
    """A rank's slab of a whole of shape `shape`: `start` to `stop` of the dimension `dim`, and all of the other dimensions."""

    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Placement:
        return cls(tuple(shape), 0, 0, shape[0] if len(shape) else 0)

    @classmethod
    def chunk(cls, shape: Sequence[int], dim: int, rank: int, world_size: int) -> Placement:
        """Place one chunk of a dimension, as torch.chunk cuts it: chunks have the same size or are smaller at the end."""
        size = -(-shape[dim] // world_size)
        start = min(rank * size, shape[dim])
        return cls(tuple(shape), dim, start, min(start + size, shape[dim]))

    @cached_property
    def is_whole(self) -> bool:
        return not self.shape or self.stop - self.start == self.shape[self.dim]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The place of the slab's first element in each dimension of the whole."""
        return tuple(self.start if dim == self.dim else 0 for dim in range(len(self.shape)))

    @cached_property
    def _all(self) -> Runs:
        if self.is_whole:
            return Runs(0, prod(self.shape), max(prod(self.shape), 1))
        row = prod(self.shape[self.dim + 1 :])
        numel = (self.stop - self.start) * row
        return Runs(self.start * row, numel, self.shape[self.dim] * row, prod(self.shape[: self.dim]))

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole tensor, as a view."""
        if self.is_whole:
            return whole
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def runs(self, start: int, stop: int) -> Iterator[Runs]:
        """Yield the patterns, at most three, of elements `start` to `stop` of the flattened slab in the flattened whole."""
        every = self._all
        while start < stop:
            number, within = divmod(start, every.numel)
            begin = every.start + number * every.stride
            count = (stop - start) // every.numel
            if within or not count:  # a part of one run
                numel = min(every.numel - within, stop - start)
                yield Runs(begin + within, numel, every.stride)
            else:
                numel = count * every.numel
                yield Runs(begin, every.numel, every.stride, count)
            start += numel

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the contiguous pieces of elements `start` to `stop` of the flattened slab.

        Each piece is (start, stop) in the flattened whole, with the number of requested elements before it.
        """
        before = 0
        for runs in self.runs(start, stop):
            for low, high, within in runs.between(runs.start, runs.stop):
                yield low, high, before + within
            before += runs.numel * runs.count
