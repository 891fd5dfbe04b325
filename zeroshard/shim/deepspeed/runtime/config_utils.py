"""What a config's blocks are made of."""

from __future__ import annotations

from deepspeed._missing import missing
from zeroshard.config.fields import Block as DeepSpeedConfigModel

__all__ = ["DeepSpeedConfigModel"]
__getattr__ = missing(__name__)
