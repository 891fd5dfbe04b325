"""Owns the Lion optimizer, which torch.optim lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.torch_private import foreach_add_, foreach_lerp, foreach_lerp_, foreach_mul_, foreach_sign_


class Lion(torch.optim.Optimizer):
    """The Lion optimizer, which uses the sign of the momentum (Chen et al., arXiv:2302.06675, algorithm 2).

    For a parameter p with momentum m and gradient g:

        c = b1 * m + (1 - b1) * g
        p = p - lr * (sign(c) + weight_decay * p)
        m = b2 * m + (1 - b2) * g

    It keeps one state tensor for each parameter, where Adam keeps two. Use an lr 3 to 10 times smaller than for AdamW.

    Args:
        params: parameters or param groups.
        lr: the learning rate.
        betas: the weights b1 and b2.
        weight_decay: the decoupled weight decay.

    Raises:
        UsageError: a value is outside its range.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:  # fmt: skip
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(
                f"Lion needs lr >= 0, weight_decay >= 0 and betas in [0, 1), not {lr=}, {weight_decay=}, "
                f"{betas=}. Change the values outside these ranges."
            )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient.

        Args:
            closure: a function that recomputes the loss and the gradients before the update.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            momenta = [self.state[p]["exp_avg"] for p in parameters]
            lr = group["lr"]
            beta1, beta2 = group["betas"]
            directions = foreach_lerp(gradients, momenta, beta1)
            foreach_sign_(directions)
            foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            foreach_add_(parameters, directions, alpha=-lr)
            foreach_lerp_(momenta, gradients, 1 - beta2)
        return loss
