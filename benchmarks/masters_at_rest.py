"""Measures stage 3 with master weights only: `python benchmarks/masters_at_rest.py > benchmarks/results/masters_at_rest.txt`.

Three models train at stage 3 in bf16, on 2 ranks with one thread each: one with a 16-bit copy, one with master
weights only, and one with the copy again. They take turns of one step. A ratio divides a model's time in a
turn by the mean time of the two models with a copy, whose own ratios show the noise. The time of a step is the
slowest rank's; CPU time is the sum over both ranks.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import zeroshard
from zeroshard import Policy, Precision
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import run_ranks

CONFIG = GPTConfig(layers=8, width=256, heads=4, context=128)
WARMUP = 2
ROWS = ("with a copy", "masters alone", "with a copy, again")


def training(rests_as_masters: bool) -> Callable[[torch.Tensor], None]:
    """Return the step of a new run."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    policy = dataclasses.replace(Policy.stage(3), rests_as_masters=rests_as_masters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sharded = zeroshard.shard(model, optimizer, policy, precision=Precision(torch.bfloat16))

    def step(tokens: torch.Tensor) -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, turns: int) -> list[list[tuple[float, float]]]:
    """Return, for each turn, the seconds and CPU seconds of each row's step."""
    steps = [training(rests_as_masters=row == ROWS[1]) for row in ROWS]
    generator = torch.Generator().manual_seed(rank)
    found = []
    for turn in range(WARMUP + turns):
        tokens = torch.randint(0, CONFIG.vocabulary, (1, CONFIG.context + 1), generator=generator)
        times = []
        for step in steps:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            step(tokens)
            used = time.process_time() - cpu
            dist.barrier()
            times.append((time.perf_counter() - began, used))
        if turn >= WARMUP:
            found.append(times)
    return found


def told(name: str, turns: list[list[float]]) -> None:
    """Print the medians over turns, with the middle half of the values."""
    print(f"{name}: {statistics.median(turn[0] for turn in turns) * 1e3:.0f} ms with a copy")
    for index, row in enumerate(ROWS):
        ratios = [turn[index] / statistics.mean((turn[0], turn[2])) for turn in turns]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {row:20} {middle:.3f} ({low:.3f} to {high:.3f})")


def main(turns: Annotated[int, typer.Option(help="The number of steps.")] = 60) -> None:
    """Measure over shared memory and over gloo."""
    for transport, flag in (("shared memory", "1"), ("gloo", "0")):
        os.environ["ZEROSHARD_SHARED_MEMORY"] = flag
        both = run_ranks(measure, 2, turns, timeout=3600)
        pairs = list(zip(*both, strict=True))
        print(f"{transport}, {turns} turns")
        told("  step", [[max(one[0], other[0]) for one, other in zip(*pair, strict=True)] for pair in pairs])
        told("  CPU time", [[one[1] + other[1] for one, other in zip(*pair, strict=True)] for pair in pairs])


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
