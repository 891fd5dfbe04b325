"""Owns what this machine's disk, memory and copies reach, and what step time that allows. Called by cli.doctor.

The bytes of a step, for each element that a rank updates, are those that `step/sub_groups.py` moves:

    to and from the disk   states 2 x 4 each way; master weights, where they are tensors of their own (16 bits), 4 each way;
                           gradients each way; parameters at rest, where they are on disk: one write, two reads
    the CPU's step         master weights, gradient and two states read, all but the gradient written
    the accelerator        gradients out, parameters in

"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.policy import Offload, Place, Policy
from zeroshard.storage.storages import Storages
from zeroshard.storage.transfers import CPU, aligned_bytes

_ROUNDS = 5
_STEP_NUMEL = 1 << 24


@dataclass(frozen=True)
class Speeds:
    """Bytes per second. None is what there is none of, or what nobody asked for."""

    step: float
    disk_write: float | None = None
    disk_read: float | None = None
    to_accelerator: float | None = None
    from_accelerator: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in a step."""

    disk_write: float = 0.0
    disk_read: float = 0.0
    step: float = 0.0
    to_accelerator: float = 0.0
    from_accelerator: float = 0.0

    def seconds(self, speeds: Speeds, sharers: int) -> dict[str, float]:
        """By what takes the time, if nothing hid anything else. `sharers` ranks use one disk and one memory."""
        return {
            "disk": sharers
            * (
                self.disk_write / (speeds.disk_write or float("inf"))
                + self.disk_read / (speeds.disk_read or float("inf"))
            ),
            "CPU step": sharers * self.step / speeds.step,
            "copies": self.to_accelerator / (speeds.to_accelerator or float("inf"))
            + self.from_accelerator / (speeds.from_accelerator or float("inf")),
        }


def traffic(numel: float, itemsize: int, optimizer: Place, parameters: Place) -> Traffic:
    """Of `numel` elements whose parameters and gradients have `itemsize` bytes, with Adam."""
    own_masters = 4 if itemsize < 4 else 0
    write = read = 0.0
    if optimizer is Place.DISK:
        write += 8 + own_masters + itemsize
        read += 8 + own_masters + itemsize
    if parameters is Place.DISK:
        write += itemsize
        read += 2 * itemsize + (0 if own_masters else itemsize)  # in fp32 the step reads them too
    step = 0.0 if optimizer is Place.ACCELERATOR else 4 * 4 + 3 * 4
    moved = 0.0 if optimizer is Place.ACCELERATOR else itemsize
    reloaded = 2 * itemsize if parameters is not Place.ACCELERATOR else 0
    return Traffic(numel * write, numel * read, numel * step, numel * (moved + reloaded), numel * moved)


def measure(folder: Path | None, nbytes: int) -> Speeds:
    """Measure with what the training would use: medians of a few rounds.

    Args:
        folder: on the disk; None: the disk is left alone.

    Raises:
        StorageError: the folder is missing, full, or cannot be written to.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    write, read = (None, None) if folder is None else _disk(folder, nbytes, device)
    parameter = torch.nn.Parameter(torch.randn(_STEP_NUMEL))
    parameter.grad = torch.randn(_STEP_NUMEL)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    speeds = Speeds(28 * _STEP_NUMEL / _median(optimizer.step), write, read)
    if device is None:
        return speeds
    memory = aligned_bytes(nbytes, pin=True)
    there = memory.to(device)
    return replace(
        speeds,
        to_accelerator=nbytes / _median(lambda: _copied(there, memory)),
        from_accelerator=nbytes / _median(lambda: _copied(memory, there)),
    )


def _disk(folder: Path, nbytes: int, device: torch.device | None) -> tuple[float, float]:
    """Bytes written and read per second."""
    policy = Policy.stage(3).offloaded(optimizer=Place.DISK, offload=Offload(str(folder)))
    storages = Storages(policy, device or CPU)
    memory = aligned_bytes(nbytes, pin=device is not None).random_(0, 255)
    try:
        slot = storages.optimizer(policy).slot("what doctor measures", nbytes, torch.uint8)
        write = _median(lambda: slot.write(memory).wait(CPU))
        read = _median(lambda: slot.read(memory).wait(CPU))
    finally:
        storages.close()
    return nbytes / write, nbytes / read


def _copied(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()


def _median(work: Callable[[], Any]) -> float:
    work()
    taken = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
