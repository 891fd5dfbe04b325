"""Copies of tensors, for torch.save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed._missing import missing

__all__ = ["clone_tensors_for_torch_save", "get_model_ckpt_name_for_rank"]
__getattr__ = missing(__name__)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Tensors on `device` with storages of their own, in lists, tuples and dicts of any depth.

    A view of a flat buffer would be saved with the whole buffer.
    """
    if isinstance(item, torch.Tensor):
        device = torch.device(device)
        return item.detach().clone() if device == item.device else item.detach().to(device)
    if isinstance(item, list | tuple):
        return type(item)([clone_tensors_for_torch_save(one, device) for one in item])
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(one, device) for key, one in item.items()})
    return item


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Where DeepSpeed keeps a model-parallel rank's weights."""
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))
