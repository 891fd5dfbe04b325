"""Plans: dry runs of the engine itself, which give the memory of a training run before it is queued."""

from zeroshard.tools.planning.planner import plan
from zeroshard.tools.planning.table import Plan, Row

__all__ = ["Plan", "Row", "plan"]
