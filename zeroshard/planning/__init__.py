"""Plans: dry runs of the engine itself, which give the memory and the time of a training run before it is queued."""

from zeroshard.planning.planner import Plan, plan

__all__ = ["Plan", "plan"]
