"""Loss scalers."""

from __future__ import annotations

from deepspeed._missing import missing
from zeroshard import DynamicLossScaler
from zeroshard import StaticLossScaler as LossScaler

LossScalerBase = (DynamicLossScaler, LossScaler)
"""For isinstance."""
INITIAL_LOSS_SCALE, SCALE_WINDOW, DELAYED_SHIFT = "init_scale", "scale_window", "delayed_shift"
CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "consecutive_hysteresis", "min_scale"
__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase"]
__getattr__ = missing(__name__, CreateLossScaler="The config's fp16 block makes one; engine.loss_scaler is it.")
