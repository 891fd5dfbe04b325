"""fp16."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.runtime.fp16 import fused_optimizer, loss_scaler

__all__ = ["fused_optimizer", "loss_scaler"]
__getattr__ = missing(__name__)
