"""Owns `engine.optimizer`: the user's own optimizer, with DeepSpeed's attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zeroshard.core.sharded_step import ShardedStep
from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler


class EngineOptimizer(torch.optim.Optimizer):
    """An engine's optimizer. Its `step()` takes the engine's step, but does not advance the scheduler.

    Groups, states, hooks, state dicts and all other attributes come from the user's optimizer.
    """

    # torch's own `__init__` would create other groups and hooks.
    def __init__(self, step: ShardedStep, loss_scaler: LossScaler) -> None:
        self._step = step
        self.loss_scaler = loss_scaler

    def __getattr__(self, name: str) -> Any:
        if name in ("_step", "loss_scaler"):
            raise AttributeError(name)
        return getattr(self._step.inner, name)

    def __repr__(self) -> str:
        return repr(self._step.inner)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Clip, update and count; see `Engine.step`."""
        return self._step.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step. Only `Engine.zero_grad` also restarts the count of microbatches."""
        self._step.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the user's optimizer, with this rank's shards."""
        return self._step.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this rank's shards into the user's optimizer."""
        self._step.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the user's optimizer."""
        self._step.inner.add_param_group(param_group)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer, or the one that the config names."""
        return self._step.inner

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes during the run."""
        return isinstance(self.loss_scaler, DynamicLossScaler)

    def needs_scaler(self) -> bool:
        """Return whether a loss must be scaled before its backward, as `engine.backward` does."""
        return self.dynamic_loss_scale or self.loss_scaler.scale != 1

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, or the last norm was infinite or NaN."""
        return self._step.overflow

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied before its backward; 1 except under fp16."""
        return self._step.loss_scale

    cur_scale = loss_scale
    """DeepSpeed's name for `loss_scale`."""
