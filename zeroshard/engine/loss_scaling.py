"""Owns what a config says of fp16's loss scale and inputs. Called by engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from zeroshard.config.load import Config
from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler


def create_loss_scaler(config: Config) -> LossScaler:
    """The scaler that the `fp16` block describes; a scale of 1 where the loss is not scaled."""
    block = config.schema.fp16
    if not config.scales_loss:
        return StaticLossScaler()
    if block.loss_scale:
        return StaticLossScaler(block.loss_scale)
    return DynamicLossScaler(
        2.0**block.initial_scale_power,
        block.loss_scale_window,
        block.hysteresis,
        block.consecutive_hysteresis,
        block.min_loss_scale,
    )


def cast_inputs(config: Config, inputs: Any) -> Any:
    """Under `fp16.auto_cast`, floating-point tensors of the inputs become fp16."""
    block = config.schema.fp16
    return tree_map(_to_half, inputs) if block.enabled and block.auto_cast else inputs


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value
