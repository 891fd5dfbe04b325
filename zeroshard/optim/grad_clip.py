"""Owns the global gradient norm and clipping over shards. Called by the sharded optimizer.

The squares are summed shard by shard in the same order under every policy, and over ranks in rank order, in fp64: so the
norm, and with it a clipped step, has the same bits whoever holds the shards.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most `max_norm` (as torch.nn.utils.clip_grad_norm_)."""
    return min(max_norm / (total_norm + 1e-6), 1.0)


def scale_(flats: Sequence[Tensor], coefficient: float) -> None:
    """Multiply in place; a coefficient of 1 touches nothing."""
    if coefficient != 1.0:
        for flat in flats:
            flat.mul_(coefficient)
