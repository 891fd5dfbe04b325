"""The block `zero_optimization`."""

from __future__ import annotations

import enum

from deepspeed._missing import missing
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)
from zeroshard.config.zero_block import ZeroBlock as DeepSpeedZeroConfig

__all__ = [
    "DeepSpeedZeroConfig", "DeepSpeedZeroLeafModuleConfig", "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum", "ZeroStageEnum",
]  # fmt: skip
__getattr__ = missing(__name__)


class ZeroStageEnum(int, enum.Enum):
    """The stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
