"""Adam."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__getattr__ = missing(__name__)
