"""Owns `zeroshard doctor`: what there is on this machine, what it reaches, and what step time that allows. Called by main."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroshard.cli.options import nbytes_of, output_file, parameters_of
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
    net: Annotated[
        bool,
        typer.Option(
            "--net",
            help="Measure the links between ranks instead, on every host: torchrun ... -m zeroshard doctor --net",
        ),
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="Measure this machine for `zeroshard plan --machine`, and write it to this file."),
    ] = None,
) -> None:
    """Say what there is on this machine, measure it, and reckon what step time offload would allow for a model."""
    from rich.console import Console

    from zeroshard.cli.speeds import measure

    console = Console()
    if net:
        _print_links(console, parameters, 4 if fp32 else 2, size)
        return
    _print_machine(console)
    if profile is not None:
        from zeroshard.cli.profile import measured_machine

        output_file(profile, "--profile")
        with console.status("measuring"):
            machine = measured_machine(profile.stem, io, size)
        profile.write_text(json.dumps(machine, indent=2) + "\n", encoding="utf-8")
        console.print(f"this machine is written to {profile}: zeroshard plan --machine {profile}", highlight=False)
        return
    with console.status("measuring"):
        speeds = measure(io, size)
    _print_speeds(console, speeds, io)
    _print_steps(console, speeds, parameters, ranks, local_ranks, fp32)


def _print_machine(console: Console) -> None:
    import torch
    import torch.distributed as dist

    from zeroshard.collectives.meeting import refusal_here
    from zeroshard.emulation import is_emulated

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
        for dtype in (torch.bfloat16, torch.float16):
            if is_emulated(dtype, torch.device("cpu")):
                name = str(dtype).removeprefix("torch.")
                console.print(f"{name}: this CPU has no instructions for it: tens of times the time of fp32")
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


def _print_links(console: Console, parameters: float, itemsize: int, size: int) -> None:
    from rich.table import Table

    from zeroshard.cli.links import has_launcher, measure_links, own_name, problem_of, seconds_across
    from zeroshard.errors import UsageError

    if not has_launcher():
        raise UsageError(
            "doctor --net measures the links between ranks, and no launcher started any: torchrun --nnodes 2 --nproc-per-node 8 "
            "--rdzv-endpoint HOST:29400 --rdzv-backend c10d -m zeroshard doctor --net, on each host."
        )
    name, address = own_name()
    problem = problem_of(name, address)
    if (
        problem is not None and int(os.environ.get("LOCAL_RANK", "0")) == 0
    ):  # now: the others may wait for this host in vain
        console.print(problem, highlight=False)
    rank, hosts, links = measure_links(size)
    if rank != 0:
        return
    for host in hosts:
        ranks = ", ".join(str(one) for one in host.ranks)
        console.print(f"{host.name} ({host.address or 'its name has no address'}): ranks {ranks}", highlight=False)
    table = Table("link", "ranks", "latency, us", "GB/s")
    for link in links:
        where = "across hosts" if link.is_across else "inside a host"
        table.add_row(
            where, f"{link.ranks[0]}, {link.ranks[1]}", f"{link.latency * 1e6:.0f}", f"{link.bandwidth / 1e9:.3f}"
        )
    console.print(table)
    across = [link.bandwidth for link in links if link.is_across]
    if not across:
        return
    steps = Table(
        "policy", "a host's link takes", title=f"seconds of a step: {parameters:.3g} parameters of {itemsize} bytes"
    )
    most = max(len(host.ranks) for host in hosts)
    for policy, seconds in seconds_across(parameters, itemsize, len(hosts), most, min(across)).items():
        steps.add_row(policy, f"{seconds:.2f}")
    console.print(steps)


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
