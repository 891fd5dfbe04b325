"""Tools for tests: functions that run in several processes, and training runs under any policy."""

from zeroshard.testing.parity import Run, Workload, train, whole_parameters
from zeroshard.testing.ranks import RankError, run_ranks

__all__ = [
    "RankError",
    "Run",
    "Workload",
    "run_ranks",
    "train",
    "whole_parameters",
]
