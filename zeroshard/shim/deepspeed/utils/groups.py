"""The groups of ranks: all are data-parallel."""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist

from deepspeed._missing import missing

_INSTEAD = "All ranks are data-parallel: there are no groups of experts, tensors, sequences or pipeline stages."
__getattr__ = missing(
    __name__,
    _get_sequence_parallel_group=_INSTEAD,
    _get_expert_parallel_group=_INSTEAD,
    _get_expert_data_parallel_group=_INSTEAD,
    get_tensor_model_parallel_group=_INSTEAD,
    initialize=_INSTEAD,
)


def _get_data_parallel_group() -> Any:
    return _dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    return _dist.get_world_size()


def _get_data_parallel_rank() -> int:
    return _dist.get_rank()


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size = _get_sequence_parallel_world_size
get_tensor_model_parallel_world_size = _get_sequence_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank
