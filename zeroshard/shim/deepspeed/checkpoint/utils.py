"""Copies of tensors, for torch.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed._missing import missing

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]
__getattr__ = missing(__name__)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Tensors on `device` with storages of their own, in lists, tuples and dicts of any depth; tied ones stay one tensor.

    A view of a flat buffer would be saved with the whole buffer.
    """
    return _clone(item, torch.device(device), {})


def _clone(item: Any, device: torch.device, copies: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        same = (item.data_ptr(), item.shape, item.stride(), item.dtype) if item.numel() else id(item)
        if same not in copies:
            copies[same] = item.detach().to(device, copy=True)
        return copies[same]
    if isinstance(item, list | tuple):
        return type(item)([_clone(one, device, copies) for one in item])
    if isinstance(item, dict):
        return type(item)({key: _clone(one, device, copies) for key, one in item.items()})
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where DeepSpeed keeps a model-parallel rank's weights."""
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))
