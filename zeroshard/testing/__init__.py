"""Real processes, and one training under any policy: for this project's tests, and for users' own."""

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
