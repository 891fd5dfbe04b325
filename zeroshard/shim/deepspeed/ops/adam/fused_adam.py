"""torch's fused Adam with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._missing import missing
from zeroshard import UsageError

__all__ = ["FusedAdam"]
__getattr__ = missing(__name__)


class FusedAdam(torch.optim.Adam):
    """Adam whose weight decay is apart from the gradient (AdamW), unless `adam_w_mode` is false (L2); 0 by default."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        refuse(type(self).__name__, bias_correction, amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=bool(adam_w_mode))


def refuse(name: str, bias_correction: bool, amsgrad: bool) -> None:
    """What DeepSpeed refuses, and what torch's Adam has not.

    Raises:
        UsageError: names the argument.
    """
    if amsgrad:
        raise UsageError(f"{name} has no amsgrad, as DeepSpeed's: use torch.optim.AdamW(amsgrad=True).")
    if not bias_correction:
        raise UsageError(f"{name}(bias_correction=False) is not offered: torch's Adam always corrects.")
