"""Optimizers that no sharding is right for are refused, whatever is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import UsageError, ZeroRedundancyOptimizer
from zeroshard.testing import run_ranks


class Mine(torch.optim.LBFGS):
    pass


class Prodigy(torch.optim.Optimizer):
    """Stands for the library's, by its name."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})


REFUSED = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS looks at all parameters at once"),
    "a subclass": (Mine, "Mine looks at all parameters at once"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
    "Prodigy": (Prodigy, "Prodigy estimates one step size from all parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_zero_redundancy_optimizer_refuses_by_name(name: str) -> None:
    cls, message = REFUSED[name]

    def body(rank: int) -> None:
        model = nn.Linear(4, 4)
        for elementwise in (None, False, True):
            with pytest.raises(UsageError, match=message):
                ZeroRedundancyOptimizer(model.parameters(), cls, lr=0.1, elementwise=elementwise)

    run_ranks(body, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_shard_refuses_by_name(name: str) -> None:
    cls, message = REFUSED[name]
    for elementwise in (None, False, True):
        model = nn.Linear(4, 4)
        with pytest.raises(UsageError, match=message):
            zeroshard.shard(model, cls(model.parameters(), lr=0.1), elementwise=elementwise)
