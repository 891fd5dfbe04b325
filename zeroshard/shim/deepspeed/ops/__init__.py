"""Optimizers."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.ops import adagrad, adam, aio, lamb, lion, op_builder

__all__ = ["adagrad", "adam", "aio", "lamb", "lion", "op_builder"]
_NOTHING = "zeroshard has no compiled kernels."
__getattr__ = missing(__name__, transformer=_NOTHING)
__compatible_ops__ = dict.fromkeys(
    ("fused_adam", "cpu_adam", "cpu_adagrad", "cpu_lion", "fused_lion", "async_io"), True
)
