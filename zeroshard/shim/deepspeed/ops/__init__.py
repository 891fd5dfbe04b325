"""Optimizers."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.ops import adagrad, adam, lamb, lion, op_builder

__all__ = ["adagrad", "adam", "lamb", "lion", "op_builder"]
_NOTHING = "zeroshard has no compiled kernels."
__getattr__ = missing(
    __name__, transformer=_NOTHING, aio="Offload to disk needs no handle: offload_optimizer.device = nvme."
)
__compatible_ops__ = {"fused_adam": True, "cpu_adam": True, "cpu_adagrad": True, "cpu_lion": True, "fused_lion": True}
