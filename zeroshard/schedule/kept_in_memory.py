"""Owns a state dict that is filled while units come and go: values in CPU memory, or nothing, where they are not needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.torch_private import is_distributed


class KeptInMemory(OrderedDict[str, Any]):
    """A destination for `module.state_dict(destination=...)`, see module_hooks.

    Args:
        keeps: copy what is set into CPU memory. Otherwise keep only a tensor's shape and dtype, on the meta device.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._device = torch.device("cpu" if keeps else "meta")

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if is_distributed(value):
                value = value.detach().full_tensor()  # type: ignore[attr-defined]
            value = value.detach().to(self._device, copy=True)
        super().__setitem__(key, value)


def state_dict_in_memory(module: nn.Module, *, keeps: bool) -> dict[str, Any]:
    """Return a module's state dict in CPU memory if this rank `keeps` it, unit by unit. Every rank must call it.

    Tied parameters are one tensor.
    """
    state = KeptInMemory(keeps)
    module.state_dict(destination=state)
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and first.setdefault(id(parameter), name) in state:
            dict.__setitem__(state, name, state[first[id(parameter)]])
    return dict(state)
