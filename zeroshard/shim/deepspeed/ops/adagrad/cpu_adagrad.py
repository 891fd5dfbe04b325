"""torch's Adagrad with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._missing import missing
from zeroshard import UsageError

__all__ = ["DeepSpeedCPUAdagrad"]
__getattr__ = missing(__name__)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad; weight decay is added to the gradient."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        amsgrad: bool = False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        if amsgrad or not fp32_optimizer_states:
            raise UsageError("DeepSpeedCPUAdagrad has neither amsgrad nor states in 16 bits: leave both arguments out.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
