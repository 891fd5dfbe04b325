"""Lion."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
__getattr__ = missing(__name__)
