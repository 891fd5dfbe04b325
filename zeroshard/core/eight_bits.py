"""Owns the code of optimizer states that rest in 8 bits.

256 elements of a parameter, counted from its first one, are a block, and have a scale: the largest magnitude among them. A code
stands for a share of the scale, in floating point whose fraction has fewer bits the smaller the share is:

    codes for each power of two                            16             8              4
    shares, in a block without negative values             1 to 2**-10    to 2**-18      to 1.5 * 2**-26, and 0
    shares, in another block: a sign and 7 bits            1 to 2**-5     to 2**-9       to 1.5 * 2**-13, and 0

The sign of the scale tells which of the two it is, so no list has to say which states are squares. The largest share is 1, so a
value that was decoded is encoded as it was. A block with an infinite or NaN value is decoded as NaN.

In the first kind of block, a value that is not 0 never becomes 0, however small it is: where a second moment became 0 before the
first one did, Adam would divide by its epsilon. In the second kind, it becomes 0 with a probability that keeps the mean.

Shards are cut only between blocks (see layout.py), and only a parameter's own size decides whether its states rest in 8 bits.
Operations here are exact or rounded in one way (no logarithm), so a value's code is the same in a tensor of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.core.rounding import random_bits

BLOCK_NUMEL = 256
"""The elements of a block."""
LEAST_NUMEL = 4096
"""States of parameters with fewer elements stay as they are: their bytes are few, and norms and biases are sensitive."""
CODES = torch.uint8
"""The dtype that stands for states in 8 bits."""
NBYTES = 1 + 4 / BLOCK_NUMEL
"""The bytes of an element, with its part of a scale."""

_CHUNK_NUMEL = {"cpu": 1 << 18}
"""The elements that are coded at once: few on a CPU, so that they stay in its cache. A multiple of `BLOCK_NUMEL`."""
_MOST_CHUNK_NUMEL = 1 << 21

_SHIFT = 21
"""A code's place among the 32 bits that it is rounded from."""
_POWER = 1 << 23
"""The distance of two powers of two, as the bits of floats."""
_ONE = 127 * _POWER
"""The bits of 1.0."""


class _Kind(NamedTuple):
    """A kind of block.

    Attributes:
        most: the code of a share of 1, and so the number of codes that are not 0.
        fine, middle: how many powers of two have 16 codes each, and how many have at least 8.
    """

    most: int
    fine: int
    middle: int


_UNSIGNED, _SIGNED = _Kind(255, 10, 18), _Kind(127, 5, 9)
_LEAST_SIGNED = 1.5 * 2.0**-13
"""The share of the first code of signed blocks, below which shares become 0 or this."""


def is_coded(shape: Sequence[int]) -> bool:
    """Return whether the states of a parameter of this shape, the whole one's, rest in 8 bits."""
    return prod(shape) >= LEAST_NUMEL


class EightBits:
    """The memory of one state of a shard in 8 bits, and of the parts that stay as they are, in their own dtype.

    Args:
        numel: the elements of the shard, a multiple of `BLOCK_NUMEL`.
        kept: (first element in the shard, number of elements) of the parts that stay.
    """

    def __init__(self, numel: int, kept: Sequence[tuple[int, int]]) -> None:
        assert numel % BLOCK_NUMEL == 0
        self._numel = numel
        self._kept = kept

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a state whose own dtype is `dtype`."""
        return sum(part.numel() * part.itemsize for part in self._cut(None, dtype))

    def close(self, values: Tensor, rest: Tensor, parts: Iterable[tuple[int, int, int, Any]] | None) -> None:
        """Encode a state.

        Args:
            values: [numel], floating-point. Elements of no parameter must be 0.
            rest: [nbytes], uint8, overwritten.
            parts: rounds stochastically, with the random bits of these parts (see `random_bits`); None: to the nearest.
        """
        kept, scales, codes = self._cut(rest, values.dtype)
        for low, stop, bits in self._chunks(values, parts):
            _encode(values[low:stop], codes[low:stop], scales[low // BLOCK_NUMEL : stop // BLOCK_NUMEL], bits)
        if self._kept:
            kept.copy_(torch.cat([values[start : start + numel] for start, numel in self._kept]))

    def open(self, rest: Tensor, values: Tensor, ends: Iterable[int] = ()) -> None:
        """Decode a state from `rest` [nbytes], uint8, into `values` [numel], floating-point.

        Args:
            ends: the ends of parameters, behind which the rest of the block becomes 0, also if the block is NaN.
        """
        kept, scales, codes = self._cut(rest, values.dtype)
        for low, stop, _ in self._chunks(values, None):
            _decode(codes[low:stop], scales[low // BLOCK_NUMEL : stop // BLOCK_NUMEL], values[low:stop])
        for end in ends:
            values[end : end + -end % BLOCK_NUMEL].zero_()
        if self._kept:
            parts = kept.split([numel for _, numel in self._kept])
            for (start, numel), part in zip(self._kept, parts, strict=True):
                values[start : start + numel].copy_(part)

    def _cut(self, rest: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the memory into parts that stay, scales and codes: the widest dtype first, so that each part is aligned."""
        numels = [sum(numel for _, numel in self._kept), self._numel // BLOCK_NUMEL, self._numel]
        dtypes = (dtype, torch.float32, CODES)
        nbytes = [numel * one.itemsize for numel, one in zip(numels, dtypes, strict=True)]
        if rest is None:
            rest = torch.empty(sum(nbytes), dtype=CODES, device="meta")
        kept, scales, codes = (part.view(one) for part, one in zip(rest.split(nbytes), dtypes, strict=True))
        return kept, scales, codes

    def _chunks(
        self, values: Tensor, parts: Iterable[tuple[int, int, int, Any]] | None
    ) -> Iterator[tuple[int, int, Tensor | int]]:
        """Yield (start, stop, the random numbers in [0, 2**21) of the elements); without parts, one half for all of them."""
        most = _CHUNK_NUMEL.get(values.device.type, _MOST_CHUNK_NUMEL)
        if parts is not None:
            for low, bits in random_bits(values, list(parts), most):
                # Each of 2**16 numbers stands for the middle of its 32, so none rounds a value that a code represents.
                yield low, low + bits.numel(), bits.bitwise_left_shift_(_SHIFT - 16).bitwise_or_(1 << _SHIFT - 17)
            return
        for low in range(0, self._numel, most):
            yield low, min(low + most, self._numel), 1 << _SHIFT - 1


def _encode(values: Tensor, codes: Tensor, scales: Tensor, bits: Tensor | int) -> None:
    blocks = values.float().view(-1, BLOCK_NUMEL)
    if isinstance(bits, Tensor):
        bits = bits.view_as(blocks)
    sizes = blocks.abs()
    largest = sizes.amax(1)  # NaN, if a value is
    largest.masked_fill_(~largest.isfinite(), torch.nan)
    is_negative = blocks < 0
    is_signed = is_negative.any(1)
    torch.where(is_signed, -largest, largest, out=scales)
    shares = sizes / largest.masked_fill(largest == 0, 1.0)[:, None]
    is_signed = is_signed[:, None]
    most, fine, middle = _of_kind(is_signed)
    # A float's bits are ordered as its size is, and evenly between two powers of two. So are codes: a code's distance from that of
    # 1 is a sum of distances that stop at the ends of ranges, and what is added to it carries into the code.
    places = shares.view(torch.int32) - _ONE
    places.clamp_(max=0)
    codes_off = places + places.maximum(middle) + places.maximum(fine) * 2
    codes_off.add_(bits).bitwise_right_shift_(_SHIFT).add_(most)
    # Below the first code, floats are not even.
    is_small = places < _places_of((1 - most) << _SHIFT, fine, middle)
    small = torch.where(is_signed, shares * (2.0**_SHIFT / _LEAST_SIGNED) >= (1 << _SHIFT) - bits, sizes > 0)
    found = torch.where(is_small, small.to(torch.int32), codes_off)
    found += is_negative.logical_and_(found > 0).to(torch.int32) << 7
    codes.view_as(found).copy_(found)


def _decode(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    # The share that each code stands for: in blocks without negative values, then in others.
    code = torch.arange(512, dtype=torch.int32, device=codes.device)
    most, fine, middle = _of_kind(code >= 256)
    code &= 255
    size = code & most
    sign = (code - size) << 24  # 128 becomes a float's sign bit
    places = _places_of((size - most) << _SHIFT, fine, middle).add_(_ONE)
    shares = places.masked_fill_(size == 0, 0).bitwise_or_(sign).view(torch.float32)
    found = codes.view(-1, BLOCK_NUMEL).to(torch.int32)
    found += (scales < 0).to(torch.int32)[:, None] << 8
    values.copy_((shares.index_select(0, found.view(-1)).view_as(found) * scales.abs()[:, None]).view(-1))


def _places_of(off: Tensor, fine: Tensor, middle: Tensor) -> Tensor:
    """Return the distance of a share's bits from those of 1, for a code's distance from that of 1, shifted."""
    of_fine, of_middle = fine * 4, fine * 2 + middle * 2
    found = off.maximum(of_fine) >> 2
    found += (off.minimum(of_fine).maximum(of_middle) - of_fine) >> 1
    found += off.minimum(of_middle) - of_middle
    return found


def _of_kind(is_signed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each block's kind, as int32: the code of 1, and the ends of the ranges as distances from the bits of 1."""
    signed = is_signed.to(torch.int32)
    most, fine, middle = (one + signed * (other - one) for one, other in zip(_UNSIGNED, _SIGNED, strict=True))
    return most, fine * -_POWER, middle * -_POWER
