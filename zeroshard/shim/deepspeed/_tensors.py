"""Tensors on other devices: copied for torch.save, moved, or built there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy tensors to `device`, each into its own storage, in lists, tuples and dicts of any depth; tied ones stay one
    tensor.

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
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return tensors on `device`, in lists, tuples and dicts of any depth; change those that `criterion_func` accepts in place."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        return type(item)([move_to_device(one, device, criterion_func) for one in item])
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    return item.to(device)


class OnDevice:
    """A block (`with OnDevice(dtype, device):`) with a default dtype and device for new tensors."""

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype or torch.get_default_dtype())
            self._stack.enter_context(torch.device(self.device))

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
