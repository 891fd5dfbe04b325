"""Owns `zeroshard doctor`: what this machine's disk, memory and copies reach, and what step time that allows. Called by cli.

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
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zeroshard.policy import Offload, Place, Policy
from zeroshard.storage.storages import Storages
from zeroshard.storage.transfers import CPU, aligned_bytes

_ROUNDS = 5
_STEP_NUMEL = 1 << 24


@dataclass(frozen=True)
class Speeds:
    """Bytes per second. The accelerator's are None where there is none."""

    disk_write: float
    disk_read: float
    step: float
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
            "disk": sharers * (self.disk_write / speeds.disk_write + self.disk_read / speeds.disk_read),
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


def measure(folder: Path, nbytes: int) -> Speeds:
    """Measure with what the training would use: medians of a few rounds.

    Raises:
        StorageError: the folder is missing, full, or cannot be written to.
    """
    offload = Offload(str(folder))
    policy = Policy.stage(3).offloaded(optimizer=Place.DISK, offload=offload)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    storages = Storages(policy, device or CPU)
    memory = aligned_bytes(nbytes, pin=device is not None).random_(0, 255)
    try:
        slot = storages.optimizer(policy).slot("what doctor measures", nbytes, torch.uint8)
        write = _median(lambda: slot.write(memory).wait(CPU))
        read = _median(lambda: slot.read(memory).wait(CPU))
    finally:
        storages.close()
    parameter = torch.nn.Parameter(torch.randn(_STEP_NUMEL))
    parameter.grad = torch.randn(_STEP_NUMEL)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    step = _median(optimizer.step)
    speeds = Speeds(nbytes / write, nbytes / read, 28 * _STEP_NUMEL / step)
    if device is None:
        return speeds
    there = memory.to(device)
    return replace(
        speeds,
        to_accelerator=nbytes / _median(lambda: _copied(there, memory)),
        from_accelerator=nbytes / _median(lambda: _copied(memory, there)),
    )


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


def doctor(
    io: Annotated[Path, typer.Option(help="The folder where states would rest on disk.")],
    parameters: Annotated[float, typer.Option(help="Of the model, e.g. 7.5e9.")] = 1e9,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    local_ranks: Annotated[int, typer.Option(help="Ranks that share this disk and this memory.")] = 1,
    fp32: Annotated[
        bool, typer.Option("--fp32", help="Train in fp32; else in 16 bits with fp32 master weights.")
    ] = False,
    mib: Annotated[int, typer.Option(help="MiB that are written and read to measure the disk.")] = 512,
) -> None:
    """Measure the disk, the CPU's step and the copies to the accelerator, and say what step time they allow for a model."""
    console = Console()
    with console.status("measuring"):
        speeds = measure(io, mib << 20)
    table = Table("what a training would use", "GB/s")
    for name, value in (
        (f"write to {io}", speeds.disk_write), (f"read from {io}", speeds.disk_read),
        ("AdamW on the CPU, bytes moved", speeds.step),
        ("to the accelerator", speeds.to_accelerator), ("from the accelerator", speeds.from_accelerator),
    ):  # fmt: skip
        table.add_row(name, f"{value / 1e9:.2f}" if value is not None else "no accelerator")
    console.print(table)
    table = Table(
        "optimizer", "parameters", "disk", "CPU step", "copies", "a step takes at least",
        title=f"seconds of a step: {parameters:.3g} parameters, {'fp32' if fp32 else '16 bits'}, {ranks} ranks, {local_ranks} here",
    )  # fmt: skip
    itemsize = 4 if fp32 else 2
    for optimizer, place in (
        (Place.CPU, Place.ACCELERATOR), (Place.CPU, Place.CPU), (Place.DISK, Place.ACCELERATOR), (Place.DISK, Place.CPU),
        (Place.DISK, Place.DISK),
    ):  # fmt: skip
        parts = traffic(parameters / ranks, itemsize, optimizer, place).seconds(speeds, local_ranks)
        cells = [f"{seconds:.2f}" for seconds in parts.values()]
        table.add_row(str(optimizer), str(place), *cells, f"{max(parts.values()):.2f}")
    console.print(table)
    console.print(
        "Disk, CPU and copies go on together, and beside the forward and backward: the longest of them, or the computation if that "
        "is longer, is what a step takes at least."
    )
