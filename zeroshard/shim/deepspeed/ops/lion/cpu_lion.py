"""zeroshard's Lion with the arguments of DeepSpeed's on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed._missing import missing
from zeroshard import Lion, UsageError

__all__ = ["DeepSpeedCPULion"]
__getattr__ = missing(__name__)


class DeepSpeedCPULion(Lion):
    """Lion. DeepSpeed's default lr is ten times the paper's."""

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        if not fp32_optimizer_states:
            raise UsageError(
                "DeepSpeedCPULion(fp32_optimizer_states=False) is not offered: states have the master weights' dtype."
            )
        super().__init__(model_params, lr, betas, weight_decay)
