"""Modules that are built on a device, in a dtype."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from deepspeed._missing import missing

__all__ = ["OnDevice"]
__getattr__ = missing(__name__)


class OnDevice:
    """`with OnDevice(dtype, device):` tensors without a dtype and a device of their own get these. Nothing of torch is replaced."""

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype or torch.get_default_dtype())
            self._stack.enter_context(torch.device(self.device))

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
