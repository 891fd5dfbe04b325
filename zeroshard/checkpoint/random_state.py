"""Owns the random state of one rank: torch's on CPU and accelerator, numpy's, Python's. Called by checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of every generator that a training uses without saying so."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = _device_module().get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go on where `random_state` was asked."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if torch.accelerator.is_available() and "accelerator" in state:
        _device_module().set_rng_state(state["accelerator"])


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())
