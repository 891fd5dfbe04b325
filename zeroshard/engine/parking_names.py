"""Owns what DeepSpeed calls states and devices in `offload_states`, in our words. Called by engine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.policy import Offload, Place, Policy
from zeroshard.step.parking import STATES

_STATES = {
    "lp_params": "parameters", "lp_grads": "gradients", "contiguous_grad_buffer": "gradients", "hp_params": "optimizer",
    "optim_states": "optimizer",
}  # fmt: skip


def states_of(include: Iterable[Any] | None) -> list[str]:
    """Our names of model states, each once; all of them where nothing is named. DeepSpeed's may be enums."""
    names = [str(getattr(name, "value", name)) for name in include] if include is not None else list(STATES)
    return list(dict.fromkeys(_STATES.get(name, name) for name in names))


def destination(
    device: Any, path: str | os.PathLike[str] | None, policy: Policy, pin_memory: bool
) -> tuple[Place, Offload]:
    """Where states go that are parked on `device`, "cpu" or "nvme"; the policy's folder where none is named."""
    device = str(getattr(device, "value", device))
    if device not in ("cpu", "nvme"):
        raise UsageError(f'offload_states goes to device "cpu" or "nvme", not {device!r}.')
    known = path or policy.offload_optimizer.path or policy.offload_parameters.path
    if device == "nvme" and known is None:
        raise UsageError("offload_states to nvme needs nvme_path: the config names no folder.")
    return Place.DISK if device == "nvme" else Place.CPU, Offload(None if known is None else str(known), pin_memory)
