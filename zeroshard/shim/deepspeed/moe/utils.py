"""What there is to say of experts: no parameter is one rank's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepspeed._missing import missing

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]
__getattr__ = missing(__name__)


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """(whether a module holds layers of DeepSpeed's MoE, how many experts): none, since none can be made."""
    return False, 0


def is_moe_param(parameter: Tensor) -> bool:
    """Whether a parameter is an expert's that other ranks do not have."""
    return False


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    """The groups as they are."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
