"""Training with a config, through an object with the methods of DeepSpeed's engine."""

from zeroshard.engine.engine import Engine
from zeroshard.engine.progress import StepReport

__all__ = ["Engine", "StepReport"]
