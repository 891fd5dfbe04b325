"""Times ZeroRedundancyOptimizer beside torch's, on the parameters of the 50 M GPT, in one run: part of `make bench`.

Both step on the same gradients in the same processes, in turns; a step's time is the slowest rank's, and figures are medians.
Bytes are what a rank's own sockets sent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from step import CONFIG
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from zeroshard import ZeroRedundancyOptimizer
from zeroshard.testing.gpt import GPT
from zeroshard.testing.ranks import run_ranks
from zeroshard.testing.wire import sent_bytes

MIB = 2**20
Make = Callable[[Any], Any]
SYSTEMS: dict[str, Make] = {
    "torch": lambda p: TorchZero(p, torch.optim.Adam, lr=1e-4),
    "zeroshard": lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=1e-4),
    "zeroshard, bucket view": lambda p: ZeroRedundancyOptimizer(
        p, torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4
    ),
    "torch, fused": lambda p: TorchZero(p, torch.optim.Adam, lr=1e-4, fused=True),
    "torch, fused, bucket view": lambda p: TorchZero(
        p, torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4, fused=True
    ),
    "zeroshard, fused": lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=1e-4, fused=True),
    "zeroshard, fused, bucket view": lambda p: ZeroRedundancyOptimizer(
        p, torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4, fused=True
    ),
}


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def measure(_rank: int, steps: int) -> dict[str, dict[str, Any]]:
    """One rank's part."""
    torch.manual_seed(0)
    models = {name: GPT(CONFIG) for name in SYSTEMS}
    optimizers: dict[str, Any] = {}
    for name, model in models.items():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizers[name] = SYSTEMS[name](model.parameters())
    results: dict[str, dict[str, Any]] = {name: {"step": []} for name in SYSTEMS}
    for step in range(steps + 1):
        for name, optimizer in optimizers.items():
            before = sent_bytes()
            seconds = timed(optimizer.step)
            if step:  # the first one makes the states
                results[name]["step"].append(seconds)
                results[name]["sent"] = sent_bytes() - before
    for name, optimizer in optimizers.items():
        local = optimizer.optim.state
        results[name]["state"] = sum(value.nbytes for entry in local.values() for value in entry.values())
        if "fused" not in name:
            results[name]["consolidate"] = timed(optimizer.consolidate_state_dict)
        optimizers[name] = None
    return results


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Numbers of ranks.")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each.")] = 7,
) -> None:
    """Print one table for each number of ranks."""
    numel = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())
    for count in ranks or [2, 4]:
        by_rank = run_ranks(measure, count, steps, timeout=1200, collective_timeout=600)
        table = Table(
            title=f"{numel / 1e6:.1f} M parameters, Adam, {count} ranks; medians of {steps} steps", title_justify="left"
        )
        for column in ("", "step, ms", "/ torch", "sent, MiB", "consolidate, s", "state MiB, most", "least"):
            table.add_column(column, justify="right")
        for name in SYSTEMS:
            mine = [result[name] for result in by_rank]
            slowest = statistics.median(map(max, zip(*(m["step"] for m in mine), strict=True)))
            rival = "torch, fused" if "fused" in name else "torch"
            theirs = statistics.median(map(max, zip(*(r[rival]["step"] for r in by_rank), strict=True)))
            states = [m["state"] / MIB for m in mine]
            table.add_row(
                name,
                f"{1e3 * slowest:.0f}",
                f"{slowest / theirs:.2f}",
                f"{statistics.mean(m['sent'] for m in mine) / MIB:.0f}",
                f"{mine[0]['consolidate']:.2f}" if "consolidate" in mine[0] else "",
                f"{max(states):.1f}",
                f"{min(states):.1f}",
            )
        Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
