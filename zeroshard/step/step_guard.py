"""Owns the refusal of the taken optimizer's own `step`: it looks at shards, and has gradients for a step of ours alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeroshard.errors import UsageError


class StepGuard:
    """Refuses `optimizer.step()` but where it is `lifted`; after zeroshard was taken off, too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_lifted = False
        self.is_removed = False
        optimizer.register_step_pre_hook(self._before_step)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A step of ours."""
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        name = type(optimizer).__name__
        if self.is_removed:
            raise UsageError(
                f"{name}.step() was called after remove(): it holds shards of what zeroshard had taken, and would update nothing. "
                "Make a new optimizer from model.parameters()."
            )
        if not self._is_lifted:
            raise UsageError(
                f"{name}.step() was called on the optimizer that zeroshard took: it would update nothing. Call step() and "
                "zero_grad() on sharded.optimizer (with a config, engine.step())."
            )
