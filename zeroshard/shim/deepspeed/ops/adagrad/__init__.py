"""Adagrad."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
__getattr__ = missing(__name__)
