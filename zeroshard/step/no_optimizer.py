"""Owns the stand-in for the optimizer of a model that is only evaluated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroshard.errors import UsageError


class NoOptimizer(torch.optim.Optimizer):
    """A stand-in for the optimizer of a model that is only evaluated."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Raise, since there is nothing to update."""
        raise UsageError(
            "this model was sharded without an optimizer, for evaluation only. Pass shard() an optimizer to train."
        )
