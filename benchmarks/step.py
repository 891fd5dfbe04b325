"""Owns `make bench`: a training step of a 50 M parameter GPT, zeroshard beside its rivals in one run.

Each system trains the same model on the same tokens in fresh processes, one after another, several rounds over; a step's time is
the median of all its steps, as a ratio to DDP's. Bytes are what rank 0's own sockets sent. Peak memory comes from a run of its own,
in which every freed block goes back to the system (MALLOC_MMAP_THRESHOLD_), so that it counts what lives and not what
malloc keeps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from systems import BASELINE, SYSTEMS

from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import run_ranks
from zeroshard.testing.wire import sent_bytes

CONFIG = GPTConfig(layers=16, width=512, heads=8, context=128)
MIB = 2**20


def _status(key: str) -> int:
    """A figure of this process in bytes: VmRSS, or VmHWM, the peak of it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def train(rank: int, system: str, batch: int, warmup: int, steps: int) -> dict[str, Any]:
    """One rank's part of one run."""
    torch.manual_seed(0)
    start_bytes = _status("VmRSS")
    model = GPT(CONFIG)
    step = SYSTEMS[system](model)
    tokens = torch.Generator().manual_seed(rank)
    times, losses, before = [], [], 0
    for i in range(warmup + steps):
        data = torch.randint(0, CONFIG.vocabulary, (batch, CONFIG.context + 1), generator=tokens)
        dist.barrier()
        if i == warmup:
            before = sent_bytes()
            dist.barrier()
        start = time.perf_counter()
        losses.append(float(step(data)))
        dist.barrier()
        if i >= warmup:
            times.append(time.perf_counter() - start)
    sent = (sent_bytes() - before) / steps
    return {"times": times, "losses": losses, "sent": sent, "peak": _status("VmHWM") - start_bytes}


def _run(system: str, ranks: int, batch: int, warmup: int, steps: int) -> dict[str, Any]:
    """The run of one system: in a child of its own when memory is measured, since malloc reads its settings at start."""
    results = run_ranks(train, ranks, system, batch, warmup, steps, timeout=600, collective_timeout=300)
    return {
        "times": [max(times) for times in zip(*(result["times"] for result in results), strict=True)],
        "loss": sum(result["losses"][-1] for result in results) / ranks,
        "sent": results[0]["sent"],
        "peak": max(result["peak"] for result in results),
    }


def _peak(system: str, ranks: int, batch: int) -> int:
    command = [sys.executable, __file__, "--only", system, "--ranks", str(ranks), "--batch", str(batch), "--json"]
    environment = dict(os.environ, MALLOC_MMAP_THRESHOLD_="262144")
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return int(json.loads(output.splitlines()[-1])["peak"])


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens per rank.")] = 1,
    rounds: Annotated[int, typer.Option(help="How often each system has its turn.")] = 3,
    steps: Annotated[int, typer.Option(help="Timed steps per turn.")] = 6,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in runs of their own.")] = True,
    match: Annotated[str, typer.Option(help="Only systems whose name contains this, and the baseline.")] = "",
    only: Annotated[str, typer.Option(hidden=True)] = "",
    as_json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
) -> None:
    """Time a training step under zeroshard and its rivals."""
    if as_json:
        print(json.dumps(_run(only, ranks, batch, 1, 3)))
        return
    console = Console(width=max(120, Console().width))
    systems = [name for name in SYSTEMS if match in name or name == BASELINE]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    with console.status("") as status:
        for turn in range(rounds):
            for name in systems:
                status.update(f"round {turn + 1} of {rounds}: {name}")
                runs[name].append(_run(name, ranks, batch, 2, steps))
        peaks = {}
        for name in systems if memory else []:
            status.update(f"peak memory: {name}")
            peaks[name] = _peak(name, ranks, batch)
    numel = sum(p.numel() for p in GPT(CONFIG).parameters())
    table = Table(
        title=f"GPT of {numel / 1e6:.1f} M parameters, fp32, {ranks} ranks, {batch} x {CONFIG.context} tokens each"
    )
    for column in ("system", "step / DDP", "median step", "sent per rank", "peak over start", "last loss"):
        table.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    medians = {name: statistics.median(t for run in runs[name] for t in run["times"]) for name in systems}
    for name in systems:
        per_round = [
            statistics.median(a["times"]) / statistics.median(b["times"])
            for a, b in zip(runs[name], runs[BASELINE], strict=True)
        ]
        table.add_row(
            name,
            f"{statistics.median(per_round):.2f} ({min(per_round):.2f} to {max(per_round):.2f})",
            f"{medians[name] * 1e3:.0f} ms",
            f"{runs[name][0]['sent'] / MIB:.0f} MiB",
            f"{peaks[name] / MIB:.0f} MiB" if name in peaks else "",
            f"{runs[name][0]['loss']:.9f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
