"""The engine."""

from __future__ import annotations

from deepspeed._missing import missing
from zeroshard import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
__getattr__ = missing(__name__)
