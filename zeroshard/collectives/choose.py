"""Owns the choice of the class for a process group and a device. Called by shard, checkpoints and whoever sends."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.collectives.alone import Alone
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.native import Native
from zeroshard.collectives.point_to_point import PointToPoint


def create_collectives(
    group: dist.ProcessGroup | None, device: torch.device, predivide_factor: float = 1.0
) -> Collectives:
    """The collectives for `group` (None: all ranks, or this one alone when torch.distributed is not initialised)."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone(predivide_factor)
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    if dist.get_world_size(parent) == 1:
        return Alone(predivide_factor)
    config = dist.distributed_c10d.get_backend_config(parent)
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    # Tensors on the CPU travel over gloo, also where the group's backend serves accelerators alone.
    backend = backends.get(device.type, "gloo" if device.type == "cpu" else config)
    return (PointToPoint if backend == "gloo" else Native)(parent, device, predivide_factor)


def create_control(group: dist.ProcessGroup | None) -> Collectives:
    """Connections of their own for small messages, over gloo whatever the group's backend: for a thread beside the training."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    return Alone() if dist.get_world_size(parent) == 1 else PointToPoint(parent, torch.device("cpu"), 1.0)
