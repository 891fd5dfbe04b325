"""Owns the place of a part in a whole: integers only.

A tensor-parallel dimension cuts a parameter along one of its own dimensions, and each of its ranks holds one slab. In the flattened
whole a slab is a row of equal runs, one every `stride` elements. A parameter that nobody cuts is the slab of all of it, in one run.

    shape (3, 4), dimension 1, from 2 to 4       whole   . . a b . . c d . . e f
                                                 here    a b c d e f        runs of 2, one every 4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """Parts of a flattened whole: `count` runs of `numel` elements each, the first at `start`, one every `stride` elements."""

    start: int
    numel: int
    stride: int
    count: int = 1

    @property
    def stop(self) -> int:
        """The end of the last."""
        return self.start + (self.count - 1) * self.stride + self.numel

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Give (start, stop, before) of what lies in a range: elements of the whole, and how many of the runs' come before them."""
        first = max((start - self.start) // self.stride, 0) if self.count > 1 else 0
        for number in range(first, self.count):
            begin = self.start + number * self.stride
            if begin >= stop:
                return
            low = max(begin, start)
            high = min(begin + self.numel, stop)
            if low < high:
                yield low, high, number * self.numel + low - begin


@dataclass(frozen=True)
class Placement:
    """The slab of a whole of shape `shape` that lies here: `start` to `stop` of the dimension `dim`, and all of the others."""

    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Placement:
        """Place all of it."""
        return cls(tuple(shape), 0, 0, shape[0] if len(shape) else 0)

    @classmethod
    def chunk(cls, shape: Sequence[int], dim: int, rank: int, world_size: int) -> Placement:
        """Place one of the chunks of a dimension, as torch.chunk cuts it: all have one size, and the last ones may have less."""
        size = -(-shape[dim] // world_size)
        start = min(rank * size, shape[dim])
        return cls(tuple(shape), dim, start, min(start + size, shape[dim]))

    @cached_property
    def is_whole(self) -> bool:
        return not self.shape or self.stop - self.start == self.shape[self.dim]

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the slab."""
        if not self.shape:
            return ()
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The place of the slab's first element in each dimension of the whole."""
        return tuple(self.start if dim == self.dim else 0 for dim in range(len(self.shape)))

    @cached_property
    def _all(self) -> Runs:
        """The slab in the flattened whole."""
        if self.is_whole:
            return Runs(0, prod(self.shape), max(prod(self.shape), 1))
        row = prod(self.shape[self.dim + 1 :])
        numel = (self.stop - self.start) * row
        return Runs(self.start * row, numel, self.shape[self.dim] * row, prod(self.shape[: self.dim]))

    def part(self, whole: Tensor) -> Tensor:
        """Return the slab of a whole, as a view."""
        if self.is_whole:
            return whole
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def runs(self, start: int, stop: int) -> Iterator[Runs]:
        """Find elements `start` to `stop` of the flattened slab in the flattened whole: at most three kinds of runs, in order."""
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
        """Give (start, stop, before) of each contiguous piece: elements of the flattened whole, and how many of the slab come
        before them, from its element `start` on."""
        before = 0
        for runs in self.runs(start, stop):
            for low, high, within in runs.between(runs.start, runs.stop):
                yield low, high, before + within
            before += runs.numel * runs.count
