"""Activation checkpointing, under its short name."""

from __future__ import annotations

from deepspeed.runtime.activation_checkpointing.checkpointing import (
    __getattr__,
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    reset,
)

__all__ = ["__getattr__", "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
