"""Owns the arithmetic of the global gradient norm and of clipping. Called by bucket and the sharded optimizer.

The squares are summed shard by shard in the same order under every policy, and over ranks in rank order, in fp64: so the
norm, and with it a clipped step, has the same bits whoever holds the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROW_NUMEL = 1024
"""Elements whose squares are summed in fp32; the rows are then summed in fp64. One fp32 sum over 16 M elements is off by
6e-4 on a CPU, rows of 1024 by 1e-10, at the same speed."""


def sum_of_squares(flat: Tensor) -> Tensor:
    """The sum of squares of a 1-D tensor, as fp64 of shape []."""
    whole_rows = flat.numel() // ROW_NUMEL * ROW_NUMEL
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rows = torch.linalg.vector_norm(flat[:whole_rows].view(-1, ROW_NUMEL), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole_rows:], dtype=dtype)
    total: Tensor = rows.double().square().sum() + rest.double().square()
    return total


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `max_norm` (as torch.nn.utils.clip_grad_norm_)."""
    return min(max_norm / (total_norm + 1e-6), 1.0)


def scale_(flats: Sequence[Tensor], coefficient: float) -> None:
    """Multiply in place; a coefficient of 1 touches nothing."""
    if coefficient != 1.0:
        for flat in flats:
            flat.mul_(coefficient)


def sum_of_parts(parts: Sequence[Tensor]) -> float:
    """The sum in the order of shards, wherever each lies (with a ratio below 1, on two devices)."""
    device = parts[0].device
    return float(torch.stack([part.to(device) for part in parts]).sum())
