"""The config, read as DeepSpeed's users read it in Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as _dist

from deepspeed._missing import missing
from zeroshard import ConfigError as DeepSpeedConfigError
from zeroshard.config.load import load_config as _load_config

ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER = "adam", "adamw", "lion", "muon"
ADAGRAD_OPTIMIZER = "adagrad"
__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
__getattr__ = missing(__name__)


class DeepSpeedConfig:
    """A config that is read and checked. What is no attribute here is the key of that name.

    Attributes:
        train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps: resolved.
        zero_config: the block `zero_optimization`.
    """

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise DeepSpeedConfigError("mesh_device: zeroshard has no sequence parallelism. Leave it out.")
        group = None if mpu is None else mpu.get_data_parallel_group()
        joined = _dist.is_initialized()
        self.world_size = _dist.get_world_size(group) if joined else 1
        self.global_rank = _dist.get_rank() if joined else 0
        self._resolved = _load_config(config, self.world_size)
        batch, schema = self._resolved.batch, self._resolved.schema
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.train, batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_config = schema.zero_optimization
        self.zero_optimization_stage = self._resolved.stage
        self.zero_enabled = self._resolved.stage > 0
        self.float16_config, self.bfloat16_config = schema.fp16, schema.bf16
        self.optimizer_name = schema.optimizer.type.lower() if schema.optimizer else None
        self.optimizer_params = schema.optimizer.params if schema.optimizer else None
        self.scheduler_name = schema.scheduler.type if schema.scheduler else None
        self.scheduler_params = schema.scheduler.params if schema.scheduler else None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._resolved.schema, name):
            return getattr(self._resolved.schema, name)
        raise AttributeError(f"the config has no key {name!r}")
