"""The blocks `offload_param` and `offload_optimizer`, and what they name."""

from __future__ import annotations

import enum

from deepspeed._missing import missing
from zeroshard.config.zero_block import OffloadOptimizerBlock as DeepSpeedZeroOffloadOptimizerConfig
from zeroshard.config.zero_block import OffloadParamBlock as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig", "OffloadDeviceEnum", "OffloadStateTypeEnum",
]  # fmt: skip
__getattr__ = missing(__name__)


class OffloadDeviceEnum(str, enum.Enum):  # noqa: UP042 (of str also where Python has StrEnum)
    """Where model states rest."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):  # noqa: UP042
    """What `engine.offload_states(include=...)` names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
