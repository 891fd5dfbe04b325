"""Owns `zeroshard doctor`, which reports this machine's hardware and software, and measures its speed."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zeroshard.cli.options import nbytes_of
from zeroshard.errors import UsageError, counted
from zeroshard.version import __version__

if TYPE_CHECKING:
    from rich.console import Console


def doctor(
    io: Annotated[Path | None, typer.Option(
        help="A folder on the disk to measure; without it, no disk is measured.")] = None,
    size: Annotated[int, typer.Option(
        parser=nbytes_of, metavar="BYTES", show_default=False,
        help="The bytes of each read, write, copy and message, such as 1GB; default: 512MiB.")] = 512 << 20,
    net: Annotated[bool, typer.Option(
        "--net", help="Measure only the links between ranks. On every host: torchrun ... -m zeroshard doctor --net")] = False,
    profile: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:  # fmt: skip
    """Print this machine's hardware and software, and measure its speed."""
    from rich.console import Console

    console = Console(highlight=False)
    if profile is not None:
        raise UsageError(
            "doctor has no --profile: plans no longer estimate the time of a step. Train a few steps instead."
        )
    if net:
        _print_links(console, size)
        return
    _print_machine(console)
    from rich.table import Table

    from zeroshard.cli.measure import measure

    with console.status("measuring"):
        speeds = measure(io, size)
    table = Table("used by training", "GB/s")
    for key, name, otherwise in (
        ("disk_write", f"write to {io or 'the disk'}", "not measured: pass --io FOLDER"),
        ("disk_read", f"read from {io or 'the disk'}", "not measured: pass --io FOLDER"),
        ("step", "AdamW on the CPU, bytes moved", ""),
        ("to_accelerator", "to the accelerator", "no accelerator"),
        ("from_accelerator", "from the accelerator", "no accelerator"),
    ):
        table.add_row(name, f"{speeds[key] / 1e9:.2f}" if key in speeds else otherwise)
    console.print(table)


def _print_machine(console: Console) -> None:
    import torch
    import torch.distributed as dist
    from torch import __version__ as torch_version

    from zeroshard.collectives.meeting import refusal_here
    from zeroshard.observe.emulation import is_emulated

    console.print(
        f"Python {platform.python_version()}, torch {torch_version}, zeroshard {__version__}; "
        f"{counted(os.cpu_count() or 1, 'CPU')}, torch uses {counted(torch.get_num_threads(), 'thread')}"
    )
    if torch.accelerator.is_available():
        console.print(f"accelerators: {torch.accelerator.device_count()} x {torch.accelerator.current_accelerator()}")
    else:
        console.print("accelerators: none visible to torch; training runs on the CPU")
        for dtype in (torch.bfloat16, torch.float16):
            if is_emulated(dtype, torch.device("cpu")):
                name = str(dtype).removeprefix("torch.")
                console.print(f"{name}: this CPU has no instructions for it, so it takes tens of times as long as fp32")
    known = [
        name for name in ("nccl", "xccl", "gloo", "mpi") if dist.is_available() and dist.is_backend_available(name)
    ]
    console.print(f"torch.distributed: {', '.join(known) or 'no backend: one rank only'}")
    why_not = refusal_here()
    if why_not:
        console.print(f"ranks of this host: communicate over gloo, which is slower: {why_not}")
    else:
        console.print("ranks of this host: share memory if they compute on the CPU")


def _print_links(console: Console, size: int) -> None:
    from rich.table import Table

    from zeroshard.cli.measure import measure_links, own_name, problem_of
    from zeroshard.launch import read_launch

    if read_launch() is None:
        raise UsageError(
            "doctor --net measures the links between ranks, but no launcher started any. Run torchrun --nnodes 2 "
            "--nproc-per-node 8 --rdzv-endpoint HOST:29400 --rdzv-backend c10d -m zeroshard doctor --net, on each host."
        )
    problem = problem_of(*own_name())
    if problem is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        console.print(problem)  # now, since the other ranks may never reach this host
    rank, hosts, links = measure_links(size)
    if rank != 0:
        return
    for host in hosts:
        ranks = ", ".join(str(one) for one in host.ranks)
        console.print(f"{host.name} ({host.address or 'its name has no address'}): ranks {ranks}")
    table = Table("link", "ranks", "latency, us", "GB/s")
    for link in links:
        where = "across hosts" if link.is_across else "inside a host"
        ranks = f"{link.ranks[0]}, {link.ranks[1]}"
        table.add_row(where, ranks, f"{link.latency * 1e6:.0f}", f"{link.bandwidth / 1e9:.3f}")
    console.print(table)
