"""What trainers look for in `deepspeed.runtime`."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    config_utils,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    utils,
    zero,
)
from deepspeed.runtime import pipe as pipe
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer

__all__ = [
    "DeepSpeedOptimizer", "ZeROOptimizer", "activation_checkpointing", "base_optimizer", "config", "config_utils", "dataloader",
    "engine", "fp16", "lr_schedules", "pipe", "utils", "zero",
]  # fmt: skip
__getattr__ = missing(
    __name__,
    sequence_parallel="There is no sequence parallelism: set sp_size=1.",
    hybrid_engine="Train with initialize().",
)
