"""Owns `zeroshard doctor`: what there is on this machine, what it reaches, and what step time that allows. Called by main."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroshard.cli.options import nbytes_of, parameters_of
from zeroshard.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from zeroshard.cli.speeds import Speeds


def doctor(
    io: Annotated[
        Path | None, typer.Option(help="The folder where states would rest on disk; left out, no disk is measured.")
    ] = None,
    parameters: Annotated[
        float, typer.Option(parser=parameters_of, metavar="NUMBER", help="Of the model: 7B, 500M, 7.5e9.")
    ] = 1e9,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    local_ranks: Annotated[int, typer.Option(min=1, help="Ranks that share this disk and this memory.")] = 1,
    fp32: Annotated[
        bool, typer.Option("--fp32", help="Train in fp32; else in 16 bits with fp32 master weights.")
    ] = False,
    size: Annotated[
        int, typer.Option(parser=nbytes_of, metavar="BYTES", help="What is written and read to measure: 512MiB, 1GB.")
    ] = 512 << 20,
) -> None:
    """Say what there is on this machine, measure it, and reckon what step time offload would allow for a model."""
    from rich.console import Console

    from zeroshard.cli.speeds import measure

    console = Console()
    _print_machine(console)
    with console.status("measuring"):
        speeds = measure(io, size)
    _print_speeds(console, speeds, io)
    _print_steps(console, speeds, parameters, ranks, local_ranks, fp32)


def _print_machine(console: Console) -> None:
    import torch
    import torch.distributed as dist

    from zeroshard.collectives.meeting import refusal_here

    console.print(
        f"Python {platform.python_version()}, torch {torch.__version__}, zeroshard {__version__}; "
        f"{os.cpu_count()} CPUs, torch uses {torch.get_num_threads()} threads",
        highlight=False,
    )
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        console.print(f"accelerators: {torch.accelerator.device_count()} x {kind}", highlight=False)
    else:
        console.print("accelerators: none that this torch sees; the CPU computes")
    known = [
        name for name in ("nccl", "xccl", "gloo", "mpi") if dist.is_available() and dist.is_backend_available(name)
    ]
    console.print(f"torch.distributed: {', '.join(known) or 'not there: one rank only'}", highlight=False)
    why_not = refusal_here()
    console.print(
        f"ranks of this host: talk over gloo, which is slower: {why_not}" if why_not
        else "ranks of this host: share memory, where they compute on the CPU",
        highlight=False,
    )  # fmt: skip


def _print_speeds(console: Console, speeds: Speeds, io: Path | None) -> None:
    from rich.table import Table

    nothing = "not measured: give --io FOLDER"
    table = Table("what a training would use", "GB/s")
    for name, value, otherwise in (
        (f"write to {io or 'the disk'}", speeds.disk_write, nothing),
        (f"read from {io or 'the disk'}", speeds.disk_read, nothing),
        ("AdamW on the CPU, bytes moved", speeds.step, ""),
        ("to the accelerator", speeds.to_accelerator, "no accelerator"),
        ("from the accelerator", speeds.from_accelerator, "no accelerator"),
    ):
        table.add_row(name, f"{value / 1e9:.2f}" if value is not None else otherwise)
    console.print(table)


def _print_steps(
    console: Console, speeds: Speeds, parameters: float, ranks: int, local_ranks: int, fp32: bool
) -> None:  # fmt: skip
    from rich.table import Table

    from zeroshard.cli.speeds import traffic
    from zeroshard.policy import Place

    table = Table(
        "optimizer", "parameters", "disk", "CPU step", "copies", "a step takes at least",
        title=f"seconds of a step: {parameters:.3g} parameters, {'fp32' if fp32 else '16 bits'}, {ranks} ranks, {local_ranks} here",
    )  # fmt: skip
    for optimizer, place in (
        (Place.CPU, Place.ACCELERATOR), (Place.CPU, Place.CPU), (Place.DISK, Place.ACCELERATOR), (Place.DISK, Place.CPU),
        (Place.DISK, Place.DISK),
    ):  # fmt: skip
        if Place.DISK in (optimizer, place) and speeds.disk_write is None:
            continue
        parts = traffic(parameters / ranks, 4 if fp32 else 2, optimizer, place).seconds(speeds, local_ranks)
        cells = [f"{seconds:.2f}" for seconds in parts.values()]
        table.add_row(str(optimizer), str(place), *cells, f"{max(parts.values()):.2f}")
    console.print(table)
    console.print(
        "Disk, CPU and copies go on together, and beside the forward and backward: the longest of them, or the computation if that "
        "is longer, is what a step takes at least."
    )
