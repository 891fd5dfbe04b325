"""Plans: a dry run of the engine itself, that says what a training takes before it is queued."""

from zeroshard.plan.planner import plan
from zeroshard.plan.result import Plan

__all__ = ["Plan", "plan"]
