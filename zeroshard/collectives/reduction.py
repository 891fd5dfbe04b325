"""Owns the arithmetic of a reduction: sums in rank order, divided after. Called by the collectives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 16
"""Elements that a CPU sums and divides at once: small enough that the second pass finds them in the cache."""


def sum_into(contributions: Sequence[Tensor], divisor: float, out: Tensor, accumulate: bool) -> None:
    """out (+)= (c0 + c1 + ... ) / divisor, in this order, in fp32 at least. `out` may be one of the contributions."""
    if len(contributions) == 1 and divisor == 1.0:
        if accumulate:
            out.add_(contributions[0])
        elif not _is_same(out, contributions[0]):
            out.copy_(contributions[0])
        return
    dtype = torch.promote_types(contributions[0].dtype, torch.float32)
    step = CHUNK_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    for low in range(0, out.numel(), step):
        high = min(low + step, out.numel())
        parts = [contribution[low:high].to(dtype) for contribution in contributions]
        target = out[low:high]
        # What is summed in place must not be needed later, as a third contribution.
        room = target if not accumulate and target.dtype == dtype and len(parts) == 2 else None
        total = torch.add(parts[0], parts[1], out=room) if len(parts) > 1 else parts[0]
        for part in parts[2:]:
            total.add_(part)
        if accumulate:
            target.add_(torch.div(total, divisor))
        else:
            torch.div(total, divisor, out=target)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.stride() == other.stride()
