"""zeroshard's Lion with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from deepspeed._missing import missing
from zeroshard import Lion

__all__ = ["FusedLion"]
__getattr__ = missing(__name__)


class FusedLion(Lion):
    """Lion. DeepSpeed's default lr is ten times the paper's."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, weight_decay)
