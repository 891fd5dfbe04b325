"""Questions about parameters and optimizers."""

from __future__ import annotations

from typing import Any

from deepspeed._missing import missing
from deepspeed.runtime.zero.partition_parameters import is_zero_param

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]
__getattr__ = missing(__name__)


class ZeRORuntimeException(Exception):
    """Never raised: zeroshard's errors are of `zeroshard.errors`."""


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Any torch optimizer is."""
    return hasattr(optimizer, "param_groups")
