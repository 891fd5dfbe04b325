"""torch.distributed under DeepSpeed's names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeroshard.integrations.accelerate import tell_backend
from zeroshard.launch import init_distributed as _init_distributed


def is_initialized() -> bool:
    tell_backend()
    return dist.is_initialized()


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500, verbose: bool = True,
    timeout: timedelta | None = None, init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None,
    rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Join the ranks of a launcher, unless they are already joined. Without a launcher, the group has one rank."""
    _init_distributed(
        dist_backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size, required=dist_init_required
    )  # fmt: skip
    tell_backend()


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)
