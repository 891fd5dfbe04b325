"""Owns how far a CPU falls behind where it has no instructions for a dtype, and torch multiplies element by element. Called by
initialize, shard and doctor."""

from __future__ import annotations

import time
import warnings
from functools import cache

import torch
import torch.distributed as dist

_SIZE = 128
_ROUNDS = 5
_FAR = 8.0
"""A processor that can is within 3, one that cannot beyond 30."""


@cache
def slowdown(dtype: torch.dtype) -> float:
    """The time of a matrix product on this CPU, by that of the same product in fp32: measured, in some milliseconds, once."""
    return _seconds(dtype) / _seconds(torch.float32)


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether training in a dtype takes many times as long as in fp32. Accelerators are taken at their word."""
    return device.type == "cpu" and dtype.is_floating_point and dtype.itemsize < 4 and slowdown(dtype) > _FAR


def warn_if_emulated(dtype: torch.dtype, device: torch.device) -> None:
    """Once a run, from rank 0."""
    if is_emulated(dtype, device) and not (dist.is_initialized() and dist.get_rank()):
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"this CPU has no instructions for {name}: a matrix product takes {slowdown(dtype):.0f} times as long as in fp32. "
            "Train in fp32 here, or on an accelerator.",
            stacklevel=3,
        )


def _seconds(dtype: torch.dtype) -> float:
    """The least of a few rounds."""
    a = torch.ones(_SIZE, _SIZE, dtype=dtype, device="cpu")
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        a @ a
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
