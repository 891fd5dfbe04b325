"""Training with a config: one object that trains a model, in the shape that DeepSpeed users know."""

from zeroshard.engine.engine import Engine
from zeroshard.engine.progress import StepReport

__all__ = ["Engine", "StepReport"]
