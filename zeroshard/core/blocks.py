"""Owns tensors that are made of parts of other tensors: integers only.

A file may hold one tensor for each expert where the model holds all experts in one. Then each tensor of one side is a few
blocks of tensors of the other side, and a block is a strided view of its source:

    source "fused", shape (2, 4, 3): two experts, each with 2 rows of `gate` and 2 rows of `up`, 3 columns
    target "1.up", shape (2, 3)      TensorBlock("fused", offset=18, strides=(3, 1), starts=(0, 0), shape=(2, 3))

So a range of the source, which a rank holds, is written to runs of the target, and the other way around.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


class TensorBlock(NamedTuple):
    """A part of a target, and its origin.

    Attributes:
        source: the name of the tensor that has the values.
        offset, strides: the place of the values among the flattened source's elements.
        starts, shape: the place of the block in the target.
    """

    source: str
    offset: int
    strides: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, source: str, shape: Sequence[int]) -> TensorBlock:
        return cls(source, 0, row_major(shape), (0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> int:
        """The number of elements that the flattened source must have at least."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1

    def narrow(self, dim: int, start: int, stop: int) -> TensorBlock | None:
        """Return the part of the block in a range of the target's dimension, counted from the range's start, or None."""
        low = max(self.starts[dim], start)
        high = min(self.starts[dim] + self.shape[dim], stop)
        if low >= high:
            return None
        offset = self.offset + (low - self.starts[dim]) * self.strides[dim]
        return TensorBlock(
            self.source, offset, self.strides, _put(self.starts, dim, low - start), _put(self.shape, dim, high - low)
        )


@dataclass(frozen=True)
class Target:
    """A tensor that is made of blocks, which cover it once.

    Attributes:
        group: a number that tensors have in common if they share memory when transformers saves them, and so one file.
        is_whole: whether the tensor is all of another one, under another name or the same.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[TensorBlock, ...]
    group: int = -1
    is_whole: bool = False

    @classmethod
    def whole(cls, name: str, source: str, shape: Sequence[int]) -> Target:
        return cls(name, tuple(shape), (TensorBlock.whole(source, shape),), is_whole=True)


@dataclass(frozen=True)
class Copy:
    """The copy of a strided box: from or to elements that are `here`, and to or from elements that are `there`."""

    shape: tuple[int, ...]
    here: int
    strides: tuple[int, ...]
    there: int
    other_strides: tuple[int, ...]

    @classmethod
    def from_source(cls, block: TensorBlock, target: Sequence[int]) -> Copy:
        """Copy a block from its source, which is here, into a target with the shape `target`."""
        strides = row_major(target)
        there = sum(start * stride for start, stride in zip(block.starts, strides, strict=True))
        return cls(block.shape, block.offset, block.strides, there, strides)

    def reversed(self) -> Copy:
        return Copy(self.shape, self.there, self.other_strides, self.here, self.strides)

    def within(self, start: int, stop: int) -> Iterator[Copy]:
        """Yield the parts of the box whose elements here are in a range. They are few, as a range cuts rows only at its ends."""
        last = self.here + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        if 0 in self.shape or last < start or self.here >= stop:
            return
        if start <= self.here and last < stop:
            yield self
            return
        dim = max((dim for dim, size in enumerate(self.shape) if size > 1), key=lambda dim: self.strides[dim])
        stride, size = self.strides[dim], self.shape[dim]
        inner = last - self.here - (size - 1) * stride  # from an index's first element to its last
        whole = range(max(-((self.here - start) // stride), 0), min((stop - 1 - self.here - inner) // stride + 1, size))
        touched = range(
            max(-((self.here + inner - start) // stride), 0), min((stop - 1 - self.here) // stride + 1, size)
        )
        if whole:
            yield self._narrow(dim, whole.start, whole.stop)
        for index in touched:
            if index not in whole:
                yield from self._narrow(dim, index, index + 1).within(start, stop)

    def _narrow(self, dim: int, start: int, stop: int) -> Copy:
        here, there = self.here + start * self.strides[dim], self.there + start * self.other_strides[dim]
        return Copy(_put(self.shape, dim, stop - start), here, self.strides, there, self.other_strides)

    def runs(self, memory: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the box as contiguous runs there: the place of a run's first element, and its elements here, as a view.

        Args:
            memory: 1-D memory for elements here.
            start: the place of the memory's first element among the elements here.
        """
        dims = sorted(
            (dim for dim, size in enumerate(self.shape) if size > 1), key=lambda dim: -self.other_strides[dim]
        )
        shape = [self.shape[dim] for dim in dims]
        view = memory.as_strided(
            shape, [self.strides[dim] for dim in dims], memory.storage_offset() + self.here - start
        )
        outer, numel = len(dims), 1
        while outer and self.other_strides[dims[outer - 1]] == numel:
            outer -= 1
            numel *= shape[outer]
        for index in itertools.product(*map(range, shape[:outer])):
            place = sum(one * self.other_strides[dim] for one, dim in zip(index, dims, strict=False))
            yield self.there + place, view[index]


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


# ---------------------------------------------------------------------- operations on a target's blocks

Blocks = tuple[TensorBlock, ...]


def narrowed(blocks: Blocks, dim: int, start: int, stop: int) -> Blocks:
    """Return the blocks of a range of one dimension."""
    return tuple(part for block in blocks if (part := block.narrow(dim, start, stop)) is not None)


def moved(blocks: Blocks, dim: int, by: int) -> Blocks:
    """Return the blocks at a higher place in one dimension."""
    return tuple(block._replace(starts=_put(block.starts, dim, block.starts[dim] + by)) for block in blocks)


def permuted(blocks: Blocks, dims: Sequence[int]) -> Blocks:
    """Return the blocks after a permutation of the dimensions."""
    return tuple(
        TensorBlock(
            one.source, one.offset, *(tuple(part[dim] for dim in dims) for part in (one.strides, one.starts, one.shape))
        )
        for one in blocks
    )


def with_dimension(blocks: Blocks, dim: int) -> Blocks:
    """Return the blocks with a new dimension of size 1."""
    return tuple(
        TensorBlock(
            one.source,
            one.offset,
            *((*part[:dim], new, *part[dim:]) for part, new in ((one.strides, 1), (one.starts, 0), (one.shape, 1))),
        )
        for one in blocks
    )


def without_dimension(blocks: Blocks, dim: int) -> Blocks:
    """Return the blocks without a dimension of size 1."""
    return tuple(
        TensorBlock(
            one.source, one.offset, *(part[:dim] + part[dim + 1 :] for part in (one.strides, one.starts, one.shape))
        )
        for one in blocks
    )


def reshaped(blocks: Blocks, old: Sequence[int], new: Sequence[int]) -> Blocks:
    """Return the blocks after a reshape of a tensor that has elements."""
    blocks = tuple(blocks)
    for dim in reversed([dim for dim, size in enumerate(old) if size == 1]):
        blocks = without_dimension(blocks, dim)
    sizes = [size for size in old if size > 1]
    wanted = [size for size in new if size > 1]
    dim = 0
    while wanted:  # each round: as many old dimensions as have the elements of as many new ones
        mine, theirs = sizes.pop(0), [wanted.pop(0)]
        while mine != prod(theirs):
            if mine < prod(theirs):
                inner = sizes.pop(0)
                blocks = tuple(part for block in blocks for part in _merged(block, dim, inner))
                mine *= inner
            else:
                theirs.append(wanted.pop(0))
        for number in range(1, len(theirs)):
            inner = prod(theirs[number:])
            blocks = tuple(part for block in blocks for part in _divided(block, dim, inner))
            dim += 1
        dim += 1
    for dim, size in enumerate(new):
        if size == 1:
            blocks = with_dimension(blocks, dim)
    return blocks


def _merged(block: TensorBlock, dim: int, inner: int) -> Iterator[TensorBlock]:
    """Merge a dimension with the next one, of size `inner`. What becomes no strided view is yielded row by row."""
    (stride, inner_stride), (start, inner_start), (size, inner_size) = (
        part[dim : dim + 2] for part in (block.strides, block.starts, block.shape)
    )

    def put(offset: int, stride: int, start: int, size: int) -> TensorBlock:
        new = zip((block.strides, block.starts, block.shape), (stride, start, size), strict=True)
        return TensorBlock(block.source, offset, *((*part[:dim], value, *part[dim + 2 :]) for part, value in new))

    if inner_size == inner and (stride == inner_stride * inner or size == 1):
        yield put(block.offset, inner_stride, start * inner, size * inner)
    elif inner == 1:
        yield put(block.offset, stride, start, size)
    else:
        for row in range(size):
            place = (start + row) * inner + inner_start
            yield put(block.offset + row * stride, inner_stride, place, inner_size)


def _divided(block: TensorBlock, dim: int, inner: int) -> Iterator[TensorBlock]:
    """Divide a dimension into two, the second of size `inner`: at most three blocks, as only the first and last row may be cut."""
    start, stop = block.starts[dim], block.starts[dim] + block.shape[dim]
    low, high = -(-start // inner) * inner, stop // inner * inner
    cuts = sorted({start, stop, *(cut for cut in (low, high) if start < cut < stop)})
    for begin, end in itertools.pairwise(cuts):
        whole = begin % inner == 0 and end % inner == 0
        stride = block.strides[dim]
        new = zip(
            (block.strides, block.starts, block.shape),
            (
                (stride * inner, stride),
                divmod(begin, inner),
                ((end - begin) // inner, inner) if whole else (1, end - begin),
            ),
            strict=True,
        )
        offset = block.offset + (begin - start) * stride
        yield TensorBlock(block.source, offset, *((*part[:dim], *pair, *part[dim + 1 :]) for part, pair in new))
