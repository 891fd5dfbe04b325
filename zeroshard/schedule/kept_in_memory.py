"""Owns a state dict that is filled while units come and go: values in CPU memory, or, where nobody wants them, nothing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor


class KeptInMemory(OrderedDict[str, Any]):
    """For `module.state_dict(destination=...)`, see module_hooks.

    Args:
        keeps: copy what is set into CPU memory. Else a tensor leaves its shape and dtype alone, on the meta device.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._device = torch.device("cpu" if keeps else "meta")

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().to(self._device, copy=True)
        super().__setitem__(key, value)
