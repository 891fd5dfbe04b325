"""Owns the offload part of `make bench`: the CPU's step, the disk, and training with offload.

All measurements take turns in one run, and each reported value is a median over the rounds. The step moves 28 bytes
per parameter: it reads weights, gradients and two states in fp32, and writes all but the gradients. It is compared
with a triad a = b + s c, which moves 12 bytes per element. This is STREAM's count, which omits that a cache line is
read before it is written. The disk is compared with `dd`, which runs with direct I/O on a file of the same size in
the same folder.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import step as training
import torch
import typer
from rich.console import Console
from rich.table import Table

import zeroshard
from zeroshard.core.storage.storages import Storages
from zeroshard.core.storage.transfers import CPU, aligned_bytes
from zeroshard.testing.gpt import GPT
from zeroshard.testing.ranks import run_ranks

MIB = 2**20
STEP_NBYTES, TRIAD_NBYTES = 28, 12
DISK_NBYTES = 512 * MIB
TEMPORARY = Path(tempfile.gettempdir())
COMPARED = [
    "zeroshard stage 3", "zeroshard stage 3, optimizer in CPU memory", "zeroshard stage 3, optimizer on disk",
    "zeroshard stage 3, all on disk",
]  # fmt: skip


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _zeroshard_step() -> tuple[int, Callable[[], Any]]:
    """Return the number of elements, and the optimizer's step of one rank whose states are in CPU memory."""
    model = GPT(training.CONFIG)
    policy = zeroshard.Policy.stage(3).offloaded(optimizer=zeroshard.Place.CPU)
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), policy)
    tokens = torch.randint(0, 256, (1, 33))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return sum(parameter.numel() for parameter in model.parameters()), sharded.optimizer.step


def _deepspeed_step(numel: int) -> Callable[[], Any]:
    """Return the step of DeepSpeed's compiled CPUAdam, over as many elements in one tensor."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    step: Callable[[], Any] = DeepSpeedCPUAdam([parameter], lr=1e-4).step
    return step


def cpu_step(_rank: int, rounds: int, with_deepspeed: bool) -> dict[str, Any]:
    """Return the number of elements, and the seconds of the triad and of each optimizer step, by round, on one thread."""
    numel, step = _zeroshard_step()
    a, b, c = (torch.randn(numel) for _ in range(3))
    works: dict[str, Callable[[], Any]] = {
        "triad": lambda: torch.add(b, c, alpha=1.5, out=a), "zeroshard, torch's fused AdamW": step,
    }  # fmt: skip
    if with_deepspeed:
        works["DeepSpeedCPUAdam"] = _deepspeed_step(numel)
    for work in works.values():
        work()
    return {"numel": numel, "seconds": _interleaved(works, rounds)}


def _interleaved(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(_seconds(work))
    return taken


def _dd(path: Path, *, write: bool) -> None:
    count = DISK_NBYTES // (4 * MIB)
    ends = ["if=/dev/zero", f"of={path}", "oflag=direct"] if write else [f"if={path}", "of=/dev/null", "iflag=direct"]
    subprocess.run(["dd", "bs=4M", f"count={count}", *ends], check=True, capture_output=True)


def disk(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to write and to read 512 MiB with dd, and with a slot on disk, including checksums."""
    offload = zeroshard.Offload(str(folder))
    policy = zeroshard.Policy.stage(3).offloaded(optimizer=zeroshard.Place.DISK, offload=offload)
    storages = Storages(policy, CPU)
    slot = storages.optimizer(policy).slot("benchmark", DISK_NBYTES, torch.uint8)
    memory = torch.randint(0, 255, (DISK_NBYTES,), dtype=torch.uint8, out=aligned_bytes(DISK_NBYTES, pin=False))
    path = folder / "zeroshard-benchmark-dd"
    works = {
        "write, dd": lambda: _dd(path, write=True), "write, zeroshard": lambda: slot.write(memory).wait(CPU),
        "read, dd": lambda: _dd(path, write=False), "read, zeroshard": lambda: slot.read(memory).wait(CPU),
    }  # fmt: skip
    try:
        for work in works.values():
            work()  # type: ignore[no-untyped-call]
        return _interleaved(works, rounds)
    finally:
        path.unlink(missing_ok=True)
        storages.close()


def main(
    folder: Annotated[Path, typer.Option(help="The folder for states on disk.")] = TEMPORARY,
    rounds: Annotated[int, typer.Option(help="The number of rounds.")] = 9,
    turns: Annotated[int, typer.Option(help="The number of training runs, of 6 steps each.")] = 3,
) -> None:
    """Time the parts of offload, and training with offload."""
    os.environ["FOLDER"] = str(folder)
    console = Console(width=max(110, Console().width))
    with console.status("the CPU's step"):
        has_deepspeed = importlib.util.find_spec("deepspeed") is not None
        measured = run_ranks(cpu_step, 1, rounds, has_deepspeed, timeout=900)[0]
    numel, seconds = measured["numel"], {name: statistics.median(t) for name, t in measured["seconds"].items()}
    table = Table(
        "one thread", "median", "GB/s", "share of the triad", title=f"AdamW over {numel / 1e6:.1f} M fp32 parameters"
    )
    triad = TRIAD_NBYTES * numel / seconds["triad"]
    for name, taken in seconds.items():
        speed = (TRIAD_NBYTES if name == "triad" else STEP_NBYTES) * numel / taken
        table.add_row(name, f"{taken * 1e3:.1f} ms", f"{speed / 1e9:.1f}", f"{speed / triad:.2f}")
    console.print(table)

    with console.status("the disk"):
        taken_by = disk(folder, rounds)
    table = Table("512 MiB, direct I/O", "median GB/s", "share of dd, median over rounds", title="disk")
    for way in ("write", "read"):
        dd, ours = taken_by[f"{way}, dd"], taken_by[f"{way}, zeroshard"]
        shares = [a / b for a, b in zip(dd, ours, strict=True)]
        table.add_row(f"{way}, dd", f"{DISK_NBYTES / statistics.median(dd) / 1e9:.2f}", "")
        table.add_row(
            f"{way}, zeroshard",
            f"{DISK_NBYTES / statistics.median(ours) / 1e9:.2f}",
            f"{statistics.median(shares):.2f}",
        )
    console.print(table)

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in COMPARED}
    with console.status("training") as status:
        for turn in range(turns):
            for name in COMPARED:
                status.update(f"training, turn {turn + 1} of {turns}: {name}")
                job = {"system": name, "ranks": 2, "batch": 1, "checkpointed": False, "warmup": 2, "steps": 6}
                runs[name].append(training.run_system(job))
    table = Table("2 ranks, 1 x 128 tokens each", "median step", "step / stage 3", "last loss", title="training")
    base = [statistics.median(run["times"]) for run in runs[COMPARED[0]]]
    for name in COMPARED:
        medians = [statistics.median(run["times"]) for run in runs[name]]
        ratios = [a / b for a, b in zip(medians, base, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        table.add_row(name, f"{statistics.median(medians) * 1e3:.0f} ms", spread, f"{runs[name][0]['losses'][-1]:.9f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
