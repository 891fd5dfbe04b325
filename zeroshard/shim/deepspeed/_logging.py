"""The logger whose level trainers set."""

from __future__ import annotations

import logging
import sys
from functools import cache

import torch.distributed as dist

from zeroshard.integrations.accelerate import refuse_divided_by_transformers


class _OfTrainings(logging.Logger):
    """A logger that refuses a training without an engine.

    transformers sets its level when a training begins (`deepspeed_init`). For a model that it divided itself, it calls
    nothing else of this package.
    """

    def setLevel(self, level: int | str) -> None:
        refuse_divided_by_transformers()
        super().setLevel(level)


def _create() -> logging.Logger:
    created = logging.getLogger("DeepSpeed")
    created.setLevel(logging.WARNING)
    created.propagate = False
    if not created.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        created.addHandler(handler)
    created.__class__ = _OfTrainings
    return created


logger = _create()


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the ranks that are named; [-1] is all of them."""
    line = _line(message, ranks)
    if line is not None:
        logger.log(level, line)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Print on the ranks that are named; [-1] is all of them."""
    line = _line(message, ranks)
    if line is not None:
        print(line)


def log_dist_once(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    _log_once(message, None if ranks is None else tuple(ranks), level)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, None if ranks is None else list(ranks), level)


def _line(message: str, ranks: list[int] | None) -> str | None:
    if not dist.is_initialized():
        return f"[Rank -1] {message}"
    rank = dist.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by its name: "debug", "info", "warning", "error", "critical"."""
    (custom_logger or logger).setLevel(log_level_str.upper())
