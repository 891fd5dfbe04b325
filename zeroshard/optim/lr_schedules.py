"""Owns the learning-rate schedules that DeepSpeed configs name, and the lookup of torch's. Called by engine.

A schedule counts optimizer steps from i = -1; its constructor sets the rate for i = -1, and the n-th `step()` that for i = n - 1.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from zeroshard.config.schema import SchedulerBlock
from zeroshard.errors import ConfigError


class WarmupLR:
    """From `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps`, then constant.

    With N = max(2, warmup_num_steps), for i < N: lr = min + (max - min) * gamma, where gamma = ln(i + 1) / ln(N) ("log") or
    i / N ("linear"); gamma = 1 after. At i = -1 the rate is min, and at i = 0 gamma is 0: so the first two steps run at min.

    Args:
        optimizer: whose param groups' `lr` is set.
        warmup_max_lr: None takes each group's own lr.
        last_batch_iteration: i to start from.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: float = 0.0, warmup_max_lr: float | None = 0.001,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if not isinstance(warmup_num_steps, int) or warmup_num_steps <= 0:
            raise ConfigError(
                f"scheduler.params.warmup_num_steps: a positive integer was expected, not {warmup_num_steps!r}."
            )
        if warmup_type not in ("log", "linear"):
            warnings.warn(f"unknown warmup_type {warmup_type!r}; using 'log'.", stacklevel=2)
            warmup_type = "log"
        self.optimizer = optimizer
        self._min = warmup_min_lr
        self._max = [group["lr"] if warmup_max_lr is None else warmup_max_lr for group in optimizer.param_groups]
        self._steps, self._type = max(2, warmup_num_steps), warmup_type
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def _gamma(self) -> float:
        i = self.last_batch_iteration
        if i < 0:
            return 0.0
        if i >= self._steps:
            return 1.0
        return math.log(i + 1) / math.log(self._steps) if self._type == "log" else i / self._steps

    def get_lr(self) -> list[float]:
        """The rate of each param group at the present step."""
        gamma = self._gamma()
        return [self._min + (largest - self._min) * gamma for largest in self._max]

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken."""
        self.step(state["last_batch_iteration"])


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, then down to 0 at `total_num_steps` T: gamma = max(0, (T - i) / max(1, T - N)) for i >= N."""

    def __init__(self, optimizer: torch.optim.Optimizer, total_num_steps: int, **warmup: Any) -> None:
        if not isinstance(total_num_steps, int) or total_num_steps <= 0:
            raise ConfigError(
                f"scheduler.params.total_num_steps: a positive integer was expected, not {total_num_steps!r}."
            )
        self._total = total_num_steps
        super().__init__(optimizer, **warmup)

    def _gamma(self) -> float:
        i = self.last_batch_iteration
        if i < self._steps:
            return super()._gamma()
        return max(0.0, (self._total - i) / max(1, self._total - self._steps))


SCHEDULES: dict[str, type[WarmupLR]] = {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR}


def create_scheduler(block: SchedulerBlock, optimizer: torch.optim.Optimizer) -> Any:
    """Make the schedule that the block names."""
    cls = SCHEDULES.get(block.type) or getattr(torch.optim.lr_scheduler, block.type, None)
    if cls is None:
        raise ConfigError(f"scheduler.type: unknown {block.type!r}; known here: {', '.join(SCHEDULES)}, and any class of "
                          "torch.optim.lr_scheduler.")  # fmt: skip
    try:
        return cls(optimizer, **block.params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params: {block.type} refuses them: {error}") from error
