"""One class is the optimizer of every precision here."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer as BF16_Optimizer

__all__ = ["BF16_Optimizer"]
__getattr__ = missing(__name__)
