"""Owns fp16's loss scale over shards: torch's GradScaler decides, as it does elsewhere, on the norm of all gradients."""

from __future__ import annotations

import math
from typing import Any

import torch


class NormOfShards(torch.optim.Optimizer):
    """What a `torch.amp.GradScaler` is shown in the place of a sharded optimizer: one gradient, zero, or not finite.

    A scaler looks at each parameter's gradient; of a sharded model no rank has them all. The norm is the same on every rank,
    so all skip the same steps, and change the scale alike.

    Args:
        optimizer: the sharded one.
        scale: of the loss, in the backwards of this step; gradients are divided by it here. Every rank must call it.
    """

    def __init__(self, optimizer: Any, scale: float, device: torch.device) -> None:
        witness = torch.zeros(1, device=device, requires_grad=True)
        super().__init__([witness], {})
        self._sharded = optimizer
        norm = optimizer.clip_grad_norm_(None, scale)
        witness.grad = torch.full_like(witness, 0.0 if math.isfinite(norm) else math.inf)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The sharded optimizer's; a scaler calls it where the gradients are finite."""
        return self._sharded.step(*args, **kwargs)
