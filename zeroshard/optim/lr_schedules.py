"""Owns the learning-rate schedules that DeepSpeed configs name, and the lookup of torch's schedules.

A schedule counts optimizer steps from i = -1. Its constructor sets the rate for i = -1, and the n-th call of `step()` sets
the rate for i = n - 1. The formulas match DeepSpeed 0.19.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zeroshard.errors import ConfigError, UsageError

if TYPE_CHECKING:  # `zeroshard config check` creates schedules without torch, whose import takes seconds
    import torch

PerGroup = float | Sequence[float]
"""One number for all param groups, or one number for each group."""

_SECOND_BETA = 0.99
"""Adam's second beta, if the schedule changes the momentum."""


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rate of each param group as a number, even if the group stores it as a tensor; NaN if it has none."""
    of_groups = (group.get("lr") for group in optimizer.param_groups)
    return [float("nan" if rate is None else rate) for rate in of_groups]


def _set_rates(optimizer: torch.optim.Optimizer, new: Iterable[float]) -> None:
    """Set the rates. Tensors are changed in place, since a captured or compiled step reads them."""
    for group, rate in zip(optimizer.param_groups, new, strict=True):
        if hasattr(group["lr"], "fill_"):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class LRSchedule(ABC):
    """A schedule that computes the `lr` of each param group from the number of optimizer steps."""

    last_batch_iteration: int

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.step(last_batch_iteration)

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group at the current step."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate that each param group has now."""
        return rates(self.optimizer)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next step, or to a given step."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def _apply(self) -> None:
        _set_rates(self.optimizer, self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` takes."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.step(state["last_batch_iteration"])

    def _per_group(self, value: PerGroup, name: str, optimizer: torch.optim.Optimizer) -> list[float]:
        count = len(optimizer.param_groups)
        if isinstance(value, Sequence):
            values = list(value)
        else:
            values = [value] * count
        if len(values) != count:
            raise ConfigError(
                f"scheduler.params.{name}: {len(values)} values for {count} param groups. Set one value, or one for "
                "each group."
            )
        return values


class _WarmsUp(LRSchedule):
    """The warm-up that three schedules share; `warmup_num_steps` is at least 2, also if the caller sets 0."""

    warmup_num_steps: int
    warmup_type: str

    def _set_warmup(self, num_steps: int, shape: str) -> None:
        self.warmup_num_steps = max(2, _steps(num_steps, "warmup_num_steps"))
        if shape not in ("log", "linear"):
            warnings.warn(f"unknown warmup_type {shape!r}; using 'log'.", stacklevel=3)
            shape = "log"
        self.warmup_type = shape

    def _rise(self, i: int) -> float:
        if i < 0:
            return 0.0
        if i >= self.warmup_num_steps:
            return 1.0
        if self.warmup_type == "linear":
            return i / self.warmup_num_steps
        return math.log(i + 1) / math.log(self.warmup_num_steps)

    def _warn_if_longer(self, total: int) -> None:
        if 0 < total < self.warmup_num_steps:  # with 0, no step runs
            warnings.warn(
                f"the warm-up ({self.warmup_num_steps} steps) is longer than total_num_steps ({total}).", stacklevel=3
            )


class WarmupLR(_WarmsUp):
    """A schedule that rises from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` and then stays constant.

    With N = max(2, warmup_num_steps): lr = min + (max - min) * gamma. For 0 <= i < N, gamma is ln(i + 1) / ln(N) ("log") or
    i / N ("linear"). It is 1 afterwards. The first two steps run at min, since gamma is 0 at i = -1 and i = 0.

    Args:
        optimizer: the optimizer whose param groups get the `lr`.
        warmup_min_lr: the rate at the start.
        warmup_max_lr: the rate after the warm-up; None means each group's own lr.
        warmup_num_steps: the number of steps of the warm-up.
        warmup_type: "log" or "linear".
        last_batch_iteration: the i to start from.

    Attributes:
        min_lrs, max_lrs: the two rates of each param group.
        warmup_num_steps, warmup_type: N, and "log" or "linear".
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: PerGroup = 0.0, warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if warmup_max_lr is None:
            warmup_max_lr = rates(optimizer)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr", optimizer)
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr", optimizer)
        self._set_warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def _gamma(self) -> float:
        return self._rise(self.last_batch_iteration)

    def get_lr(self) -> list[float]:
        gamma = self._gamma()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """A schedule that warms up like `WarmupLR` and then falls linearly to 0 at `total_num_steps`.

    With T = total_num_steps: gamma = max(0, (T - i) / max(1, T - N)) for i >= N.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = _steps(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_if_longer(self.total_num_steps)

    def _gamma(self) -> float:
        i = self.last_batch_iteration
        if i < self.warmup_num_steps:
            return super()._gamma()
        return max(0.0, (self.total_num_steps - i) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_WarmsUp):
    """A schedule of each group's own lr: a warm-up from `warmup_min_ratio`, then half a cosine to `cos_min_ratio`.

    With m = warmup_min_ratio, c = cos_min_ratio, T = total_num_steps, and N and gamma as in `WarmupLR`: the lr is
    multiplied by m + (1 - m) * gamma for 0 <= i < N, and afterwards by c + (1 - c) * (1 + cos(pi * p)) / 2, with
    p = min(1, (i - N + 1) / max(1, T - N)). At i = -1 the factor is 0.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = _steps(total_num_steps, "total_num_steps")
        self._set_warmup(warmup_num_steps, warmup_type)
        self._warn_if_longer(self.total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = rates(optimizer)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        return [rate * self.get_lr_ratio() for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Return the factor of each group's own learning rate at the current step."""
        i = self.last_batch_iteration
        steps = self.warmup_num_steps
        if i < 0:
            return 0.0
        if i < steps:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._rise(i)
        progress = min(1.0, (i - steps + 1) / max(1, self.total_num_steps - steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class LRRangeTest(LRSchedule):
    """A rising schedule, to find the rate at which training diverges (Smith, arXiv:1803.09820).

    lr = min * (1 + rate * (i + 1) / size)

    Args:
        lr_range_test_staircase: whether to round (i + 1) / size down.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_range_test_min_lr: PerGroup = 1e-3, lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr", optimizer)
        self.step_size = _steps(lr_range_test_step_size, "lr_range_test_step_size", least=1)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]


class OneCycle(LRSchedule):
    """A cycle from `cycle_min_lr` to `cycle_max_lr` and back, followed by a decay (Smith, arXiv:1803.09820).

    The cycle has `cycle_first_step_size + cycle_second_step_size` steps. Afterwards the lr is the minimum, divided by
    1 + decay_lr_rate * n / decay_step_size in step n after the cycle. With a decay_step_size of 0, nothing decays.

    Args:
        cycle_first_stair_count, cycle_second_stair_count: the number of stairs in each half; 0 means a ramp.
        cycle_momentum: whether Adam's first beta falls from `cycle_max_mom` to `cycle_min_mom` and rises again. In the
            first step it is the minimum, as in DeepSpeed. After the cycle it is the maximum, multiplied by
            1 + decay_mom_rate * n / decay_step_size. The second beta is 0.99.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: PerGroup, cycle_max_lr: PerGroup, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: int = 0, cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8, cycle_max_mom: PerGroup = 0.9, decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self._first = float(cycle_first_step_size)
        self._second = float(cycle_second_step_size)
        if self._first <= 0 or self._second < 0:
            raise ConfigError(
                "scheduler.params: cycle_first_step_size must be positive and cycle_second_step_size not negative, not "
                f"{cycle_first_step_size!r} and {cycle_second_step_size!r}. Change them."
            )
        self._stairs = (cycle_first_stair_count, cycle_second_stair_count)
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr", optimizer)
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr", optimizer)
        self._min_momentum = self._per_group(cycle_min_mom, "cycle_min_mom", optimizer)
        self._max_momentum = self._per_group(cycle_max_mom, "cycle_max_mom", optimizer)
        self._decay = (decay_step_size, decay_lr_rate, decay_mom_rate)
        self._moves_momentum = cycle_momentum and any("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self._moves_momentum:
            warnings.warn(f"{type(optimizer).__name__} has no betas: cycle_momentum is off.", stacklevel=2)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self._first + self._second:
            s = self._position()
            return [low + (high - low) * s for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [rate / self._decay_factor(self._decay[1]) for rate in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param group at the current step; None if they do not change."""
        if not self._moves_momentum:
            return None
        if self.last_batch_iteration < self._first + self._second:
            s = self._position()
            pairs = zip(self._min_momentum, self._max_momentum, strict=True)
            firsts = [high - (high - low) * s for low, high in pairs]
        else:
            firsts = [high * self._decay_factor(self._decay[2]) for high in self._max_momentum]
        return [(first, _SECOND_BETA) for first in firsts]

    def _position(self) -> float:
        """Return the position in the cycle: 0 at its ends, 1 at its top."""
        total = self._first + self._second
        count = self.last_batch_iteration + 1
        ratio = self._first / total
        x = 1.0 + count / total - math.floor(1 + count / total)
        stairs = self._stairs[x > ratio]
        if stairs > 0:
            # Count whole steps: a quotient slightly below a stair would be rounded down to the stair before.
            offset = count % total
            if offset <= self._first:
                return math.floor(offset * stairs / self._first) / stairs
            return math.floor((total - offset) * stairs / self._second) / stairs
        if x <= ratio:
            return x / ratio
        return (x - 1) / (ratio - 1)

    def _decay_factor(self, rate: float) -> float:
        size = self._decay[0]
        if not size:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self._first - self._second + 1) / size

    def _apply(self) -> None:
        super()._apply()
        moments = self.get_mom()
        if moments is not None and self.last_batch_iteration < 0:
            # As in DeepSpeed, the betas start at their minimum, like the rate.
            moments = [(first, _SECOND_BETA) for first in self._min_momentum]
        for group, betas in zip(self.optimizer.param_groups, moments or (), strict=False):
            group["betas"] = betas


class Floor:
    """A wrapper that keeps a scheduler's rates at `min_lr` or above."""

    def __init__(self, schedule: Any, optimizer: torch.optim.Optimizer, min_lr: float) -> None:
        self.schedule = schedule
        self.optimizer = optimizer
        self.min_lr = min_lr
        self._hold()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule. First restore its own rates, from which some of torch's schedules compute the next."""
        _set_rates(self.optimizer, self._unfloored)
        self.schedule.step(*args, **kwargs)
        self._hold()

    def _hold(self) -> None:
        self._unfloored = rates(self.optimizer)
        _set_rates(self.optimizer, [max(rate, self.min_lr) for rate in self._unfloored])

    def get_last_lr(self) -> list[float]:
        return rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "unfloored": self._unfloored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a schedule with or without a floor."""
        load_schedule(self.schedule, state)
        self._hold()


def load_schedule(schedule: Any, state: dict[str, Any]) -> None:
    """Load a schedule's state, which may have been saved with or without a floor (`min_lr`)."""
    if isinstance(schedule, Floor) or set(state) != {"schedule", "unfloored"}:
        schedule.load_state_dict(state)
    else:
        schedule.load_state_dict(state["schedule"])
        _set_rates(schedule.optimizer, state["unfloored"])


def refuse_without_metrics(scheduler: Any) -> None:
    """Raise UsageError for ReduceLROnPlateau, which needs a metric that `engine.step()` did not get."""
    import torch

    inner = scheduler.schedule if isinstance(scheduler, Floor) else scheduler
    if isinstance(inner, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a metric: call engine.step(lr_kwargs={'metrics': loss}) with the same value on every rank."
        )


def _steps(value: Any, name: str, least: int = 0) -> int:
    """Return a number of steps. It may be 0: a run without a warm-up, or without any step."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"scheduler.params.{name}: {value!r} is not an integer of at least {least}. Set one.")
    return value


SCHEDULES: dict[str, type[LRSchedule]] = {
    cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def floored(scheduler: Any, optimizer: torch.optim.Optimizer, min_lr: float) -> Any:
    """Return the scheduler, wrapped in a `Floor` unless `min_lr` is 0."""
    if not min_lr:
        return scheduler
    return Floor(scheduler, optimizer, min_lr)


def schedules_of_torch() -> dict[str, type[Any]]:
    """Return torch's schedules by the names of their classes."""
    import torch

    base = torch.optim.lr_scheduler.LRScheduler
    return {
        name: cls
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if isinstance(cls, type) and issubclass(cls, base) and not name.endswith("LRScheduler")  # the base has no rates
    }
