"""Owns the creation of the learning-rate schedule that a config names. It needs no torch before a schedule of torch's is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.engine.config.fields import check_arguments, nearest
from zeroshard.engine.config.schema import SchedulerBlock
from zeroshard.errors import ConfigError
from zeroshard.optim.lr_schedules import SCHEDULES, floored, schedules_of_torch

if TYPE_CHECKING:
    import torch


def create_scheduler(block: SchedulerBlock, optimizer: torch.optim.Optimizer, min_lr: float = 0.0) -> Any:
    """Create the scheduler that a config block names, with rates of at least `min_lr`.

    Raises:
        ConfigError: the scheduler does not exist, or it does not accept these arguments.
    """
    known: dict[str, type[Any]] = dict(SCHEDULES)
    if block.type not in known:
        known = schedules_of_torch() | known
    cls = known.get(block.type)
    if cls is None:
        raise ConfigError(
            f"scheduler.type: unknown {block.type!r}{nearest(block.type, known)} Choose {', '.join(SCHEDULES)}, or any "
            "class of torch.optim.lr_scheduler."
        )
    check_arguments(cls, block.params, "scheduler", cls.__name__)
    try:
        return floored(cls(optimizer, **block.params), optimizer, min_lr)
    except ConfigError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"scheduler.params: {block.type} does not accept them: {error}") from error
