"""Owns the rounding of optimizer states that rest in a narrow dtype: stochastic, and the same over any number of ranks.

Rounded to the nearest, a state would stop: Adam's second moment changes by a thousandth in a step, and neighbours in bf16 are 0.4 %
apart. So a value is rounded up with a probability equal to its distance from the lower neighbour. The random bits are a hash of the
parameter's name, the state's name, the parameter's step count and the element's place in the parameter. So they depend neither on
shards nor on buckets, and a resumed run continues with the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_NUMEL = {"cpu": 1 << 20}
"""The elements that are rounded at once: few on a CPU, so that the hash stays in its cache."""
_MOST_CHUNK_NUMEL = 1 << 23

_32_BITS = 0xFFFFFFFF
_STRIDE = 0x9E3779B9
"""An odd number: the places of 2**32 elements, times this number, are different in 32 bits."""
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B
"""The factors of a hash of 32 bits whose bits are nearly independent (Wellons, "lowbias32")."""


def key_of(name: str, step: Any) -> Any:
    """Return the start of the random bits of a parameter's state in a step, in [0, 2**32).

    Args:
        name: the parameter's and the state's name.
        step: the parameter's step count. If it is a tensor on an accelerator, the result is one, too, and the host does not wait.
    """
    if isinstance(step, Tensor):
        step = step.detach().to(torch.int64) if step.device.type != "cpu" else int(step.item())
    return _hashed((step * _STRIDE + zlib.crc32(name.encode())) & _32_BITS)


def round_(flat: Tensor, dtype: torch.dtype, parts: Sequence[tuple[int, int, int, Any]]) -> None:
    """Round a tensor in place, stochastically, to values that `dtype` represents. Values that it represents do not change.

    Args:
        flat: [numel], contiguous, fp32 or fp64 (rounded to fp32 first).
        dtype: bfloat16.
        parts: (first element in `flat`, number of elements, first element in the parameter, `key_of` the parameter) of each
            parameter. Elements of no parameter must be 0.
    """
    assert dtype == torch.bfloat16
    for low, bits in random_bits(flat, parts, CHUNK_NUMEL.get(flat.device.type, _MOST_CHUNK_NUMEL)):
        chunk = flat[low : low + bits.numel()]
        values = chunk if chunk.dtype == torch.float32 else chunk.float()
        not_numbers = values.isnan()
        # A float's bits are ordered as its size is: what is added to the bits that are dropped carries into those that stay.
        values.view(torch.int32).add_(bits).bitwise_and_(-0x10000)
        values.masked_fill_(not_numbers, torch.nan)
        if values is not chunk:
            chunk.copy_(values)


def random_bits(flat: Tensor, parts: Sequence[tuple[int, int, int, Any]], most: int) -> Iterator[tuple[int, Tensor]]:
    """Yield, for each chunk of at most `most` elements of a flat tensor, its first element and 16 random bits of each, as int32.

    Args:
        parts: see `round_`. Those of other elements are the same for all.
    """
    places = torch.arange(min(most, flat.numel()), dtype=torch.int32, device=flat.device).mul_(_signed(_STRIDE))
    for low in range(0, flat.numel(), most):
        bits = torch.zeros_like(places[: min(most, flat.numel() - low)])
        for begin, stop, key in _within(parts, low, low + bits.numel()):
            torch.add(places[: stop - begin], key, out=bits[begin - low : stop - low])
        _hash_(bits)
        yield low, bits


def _within(parts: Sequence[tuple[int, int, int, Any]], low: int, high: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (begin, stop, start of the hash) of the parts between two elements."""
    for start, numel, parameter_start, key in parts:
        begin, stop = max(start, low), min(start + numel, high)
        if begin < stop:
            place = (begin - start + parameter_start) * _STRIDE & _32_BITS
            yield begin, stop, _signed((key + place) & _32_BITS)


def _signed(number: Any) -> Any:
    """Return the int32 with the bits of a number in [0, 2**32)."""
    if isinstance(number, Tensor):
        return number.to(torch.int32)
    return number - (1 << 32) if number >= 1 << 31 else number


def _hashed(number: Any) -> Any:
    """Hash a number in [0, 2**32), or a tensor of int64."""
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        number = ((number ^ (number >> shift)) * factor) & _32_BITS
    return number ^ (number >> 16)


def _hash_(bits: Tensor) -> None:
    """Replace a tensor of int32 by 16 random bits each: the upper half of the hash, whose last shift leaves it as it is."""
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(factor))
    bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
