"""What scripts take from DeepSpeed's utilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as _dist
from torch.nn.utils import clip_grad_norm_

from deepspeed._missing import missing
from deepspeed.accelerator import get_accelerator

__all__ = ["clip_grad_norm_", "empty_cache", "move_to_device", "see_memory_usage"]
__getattr__ = missing(__name__)
_GB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print what the accelerator's memory holds, on rank 0; nothing without `force`."""
    if not force or (_dist.is_initialized() and _dist.get_rank() != 0):
        return
    accelerator = get_accelerator()
    used = accelerator.total_memory() - accelerator.available_memory()
    print(
        f"{message}: allocated {accelerator.memory_allocated() / _GB:.2f} GB "
        f"(peak {accelerator.max_memory_allocated() / _GB:.2f}), "
        f"reserved {accelerator.memory_reserved() / _GB:.2f} GB, in use on {accelerator.device_name()} {used / _GB:.2f} GB"
    )
    accelerator.reset_peak_memory_stats()


def empty_cache() -> None:
    """Give cached memory of the accelerator back."""
    get_accelerator().empty_cache()


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Tensors on `device`, in lists, tuples and dicts of any depth; those that `criterion_func` names are changed in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        return type(item)([move_to_device(one, device, criterion_func) for one in item])
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item.to(device)
