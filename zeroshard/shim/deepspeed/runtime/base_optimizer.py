"""What an engine's optimizer is an instance of."""

from __future__ import annotations

from deepspeed._missing import missing
from zeroshard.step.sharded_optimizer import ShardedOptimizer as DeepSpeedOptimizer

ZeROOptimizer = DeepSpeedOptimizer
__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
__getattr__ = missing(__name__)
