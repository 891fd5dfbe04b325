"""Plans: dry runs of the engine itself, for the memory and the time of a training before it is queued."""

from zeroshard.planning.planner import Plan, plan

__all__ = ["Plan", "plan"]
