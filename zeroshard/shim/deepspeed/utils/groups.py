"""The groups of ranks. All ranks are data-parallel, and neighbours may hold sequences together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zeroshard import UsageError


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


sequence_groups: list[Any] = []
"""The groups that `UlyssesSPAttentionHF.register_with_transformers` made, if any: accelerate reads them here."""


def _get_sequence_parallel_group() -> Any:
    if not sequence_groups:
        raise UsageError(
            'no rank holds a part of a sequence: set ParallelismConfig(sp_size=...), sp_backend="deepspeed".'
        )
    return sequence_groups[0].get_sequence_parallel_group()


def _get_sequence_parallel_world_size() -> int:
    return sequence_groups[0].get_sequence_parallel_world_size() if sequence_groups else 1


def _get_sequence_parallel_rank() -> int:
    return sequence_groups[0].get_sequence_parallel_rank() if sequence_groups else 0


def _get_model_parallel_world_size() -> int:
    return 1


def _get_model_parallel_rank() -> int:
    return 0


get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_model_parallel_rank
