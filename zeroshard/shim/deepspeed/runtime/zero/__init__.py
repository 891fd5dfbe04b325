"""Parameters that are sharded: how they are born, and how they are read and written."""

from __future__ import annotations

from deepspeed._missing import missing, refused
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters", "Init", "TiledLinear", "TiledLinearReturnBias", "ZeroParamStatus", "ZeroParamType",
    "register_external_parameter", "unregister_external_parameter", "unwrap_model_for_generation",
]  # fmt: skip
_TILED = "Cut a large Linear into several: each is a module of its own."
TiledLinear, TiledLinearReturnBias = refused("TiledLinear", _TILED), refused("TiledLinearReturnBias", _TILED)
__getattr__ = missing(__name__)
