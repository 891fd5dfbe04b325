"""The accelerator of this process."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.accelerator.real_accelerator import (
    DeepSpeedAccelerator,
    get_accelerator,
    is_current_accelerator_supported,
)

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported"]
__getattr__ = missing(__name__, set_accelerator="torch knows the accelerator; CUDA_VISIBLE_DEVICES hides some.")
