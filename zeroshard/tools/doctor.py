"""Owns `zeroshard doctor`, which reports versions, devices and memory of this machine, and the links between ranks."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Annotated

import typer

from zeroshard.errors import UsageError, counted
from zeroshard.tools.options import nbytes_of
from zeroshard.version import __version__

if TYPE_CHECKING:
    from rich.console import Console


def doctor(
    net: Annotated[bool, typer.Option(
        "--net", help="Measure the links between ranks. On every host: torchrun ... -m zeroshard doctor --net")] = False,
    size: Annotated[int, typer.Option(
        parser=nbytes_of, metavar="BYTES", show_default=False,
        help="With --net: the bytes of a message, such as 1GB; default: 512MiB.")] = 512 << 20,
    io: Annotated[str | None, typer.Option(hidden=True)] = None,
    profile: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:  # fmt: skip
    """Print versions, devices and memory of this machine; with --net, the links between ranks instead."""
    from rich.console import Console

    if io is not None or profile is not None:
        raise UsageError(
            "doctor no longer measures disks and processors (--io, --profile). Measure a disk with fio or dd, and the "
            "time of a step by training a few."
        )
    console = Console(highlight=False)
    if net:
        _print_links(console, size)
    else:
        _print_machine(console)


def _print_machine(console: Console) -> None:
    import torch
    import torch.distributed as dist
    from torch import __version__ as torch_version

    from zeroshard.core.transport.shared_memory import refusal_here
    from zeroshard.engine.progress import device_name
    from zeroshard.model.emulation import is_emulated

    console.print(
        f"Python {platform.python_version()}, torch {torch_version}, zeroshard {__version__}; "
        f"{counted(os.cpu_count() or 1, 'CPU')}, torch uses {counted(torch.get_num_threads(), 'thread')}"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    console.print(f"CPU memory: {memory / 2**30:.1f} GiB")
    if torch.accelerator.is_available():
        for number in range(torch.accelerator.device_count()):
            device = torch.device(str(torch.accelerator.current_accelerator()), number)
            free, whole = torch.accelerator.get_memory_info(number)
            console.print(
                f"{device}: {device_name(device)}, {whole / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free"
            )
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

    from zeroshard.launch import read_launch
    from zeroshard.tools.links import measure_links, own_name, problem_of

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
