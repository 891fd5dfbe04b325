"""Helpers of checkpoints."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.checkpoint import utils

__all__ = ["utils"]
__getattr__ = missing(
    __name__,
    DeepSpeedCheckpoint="`zeroshard inspect` shows a checkpoint, and `zeroshard import-deepspeed` reads DeepSpeed's.",
)
