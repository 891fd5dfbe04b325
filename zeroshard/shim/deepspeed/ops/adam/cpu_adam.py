"""torch's fused Adam with the arguments of DeepSpeed's on the CPU; zeroshard steps it wherever the states rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed._missing import missing
from deepspeed.ops.adam.fused_adam import refuse
from zeroshard import UsageError

__all__ = ["DeepSpeedCPUAdam"]
__getattr__ = missing(__name__)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam whose weight decay is apart from the gradient (AdamW), unless `adamw_mode` is false (L2); 0 by default."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        refuse(type(self).__name__, bias_correction, amsgrad)
        if not fp32_optimizer_states:
            raise UsageError(
                "DeepSpeedCPUAdam(fp32_optimizer_states=False) is not offered: states have the master weights' dtype."
            )
        # Groups of another Adam (accelerate hands them over) name their own kernel, and their own kind of decay.
        groups = [_without_kernels(one) if isinstance(one, dict) else one for one in model_params]
        super().__init__(groups, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=bool(adamw_mode))


def _without_kernels(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("foreach", "fused", "decoupled_weight_decay")}
