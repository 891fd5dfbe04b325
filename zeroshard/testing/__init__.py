"""Real processes, a plain reference loop, and the parity check: for this project's tests, and for users' own."""

from zeroshard.testing.parity import Run, Workload, ranks_agree, train, train_ddp, train_reference, whole_parameters
from zeroshard.testing.ranks import RankError, run_ranks

__all__ = [
    "RankError",
    "Run",
    "Workload",
    "ranks_agree",
    "run_ranks",
    "train",
    "train_ddp",
    "train_reference",
    "whole_parameters",
]
