"""torch.distributed, and `init_distributed`, which joins the ranks of any launcher, or makes a group of one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as _dist

from deepspeed._missing import missing
from zeroshard.integrations.accelerate import tell_backend as _tell_backend
from zeroshard.launch import init_distributed as _init_distributed
from zeroshard.launch import local_rank as get_local_rank

__all__ = ["configure", "get_local_rank", "get_world_group", "init_distributed", "is_initialized"]
_missing = missing(
    __name__,
    log_summary='The config\'s {"comms_logger": {"enabled": true}} prints what was sent, with each line of a step.',
)


def __getattr__(name: str) -> Any:
    return getattr(_dist, name) if not name.startswith("_") and hasattr(_dist, name) else _missing(name)


def is_initialized() -> bool:
    """Whether this process has joined its ranks."""
    _tell_backend()
    return _dist.is_initialized()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the ranks that a launcher started, where nobody has; a process that none started becomes a group of one."""
    _init_distributed(
        dist_backend,
        timeout=timeout,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        required=dist_init_required,
    )
    _tell_backend()


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing: the config's `comms_logger` says what is logged."""


def get_world_group() -> Any:
    """All ranks."""
    return _dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank among all of a rank of a group."""
    return group_rank if group is None else _dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks among all of a group's."""
    return _dist.get_process_group_ranks(group or _dist.group.WORLD)


def has_all_gather_into_tensor() -> bool:
    """torch has it."""
    return True


has_reduce_scatter_tensor = has_all_gather_into_tensor
