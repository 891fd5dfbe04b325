"""torch.distributed under DeepSpeed's name."""

from __future__ import annotations

from deepspeed.comm import comm
from deepspeed.comm.comm import (
    __getattr__,
    configure,
    get_all_ranks_from_group,
    get_global_rank,
    get_local_rank,
    get_world_group,
    has_all_gather_into_tensor,
    has_reduce_scatter_tensor,
    init_distributed,
    is_initialized,
)

__all__ = [
    "__getattr__", "comm", "configure", "get_all_ranks_from_group", "get_global_rank", "get_local_rank", "get_world_group",
    "has_all_gather_into_tensor", "has_reduce_scatter_tensor", "init_distributed", "is_initialized",
]  # fmt: skip
