"""DeepSpeed's Python classes of configs, and the constants of their blocks."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeroshard import ConfigError
from zeroshard.config.load import load_config
from zeroshard.layout.bucketing import MIXTURES

DEFAULT_LEAF_MODULE_CLASSES = list(MIXTURES)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class ZeroStageEnum(int, enum.Enum):
    """The stages of ZeRO."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, enum.Enum):  # noqa: UP042 (of str also where Python has StrEnum)
    """The places of model states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):  # noqa: UP042
    """The states that `engine.offload_states(include=...)` takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedConfig:
    """A config that was read and checked. Any other attribute is the config's key of that name.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: resolved.
        zero_config: the block `zero_optimization`.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise ConfigError("mesh_device: zeroshard has no sequence parallelism. Leave it out.")
        group = None if mpu is None else mpu.get_data_parallel_group()
        joined = dist.is_initialized()
        self.world_size = dist.get_world_size(group) if joined else 1
        self.global_rank = dist.get_rank() if joined else 0
        self._resolved = load_config(config, self.world_size)
        schema = self._resolved.schema
        self.train_batch_size = self._resolved.batch.train
        self.train_micro_batch_size_per_gpu = self._resolved.batch.micro
        self.gradient_accumulation_steps = self._resolved.batch.accumulation
        self.zero_config = schema.zero_optimization
        self.zero_optimization_stage = self._resolved.stage
        self.zero_enabled = self._resolved.stage > 0
        self.float16_config = schema.fp16
        self.bfloat16_config = schema.bf16
        self.optimizer_name = schema.optimizer.type.lower() if schema.optimizer else None
        self.optimizer_params = schema.optimizer.params if schema.optimizer else None
        self.scheduler_name = schema.scheduler.type if schema.scheduler else None
        self.scheduler_params = schema.scheduler.params if schema.scheduler else None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._resolved.schema, name):
            return getattr(self._resolved.schema, name)
        raise AttributeError(f"the config has no key {name!r}")
