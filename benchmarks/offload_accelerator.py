"""One accelerator, one rank: a GPT whose 16 bytes a parameter exceed its memory, trained in bf16 with offload to CPU memory.

    python benchmarks/offload_accelerator.py

The table has the same model at a size that fits, with and without offload, and then at `--times` the memory. Model FLOPs are 6 a
parameter and token, and as much again as a forward (2) for the recompute, since blocks are checkpointed. The hidden
share is the part of the copies' and the CPU step's times, each measured separately, that does not lengthen the step.
`--rehearse` runs everything with a tiny model on the CPU: to see that it runs, not to measure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import zeroshard
from zeroshard import Place, Policy, Precision, Sharded
from zeroshard.testing.gpt import GPT, GPTConfig

GIB = 1 << 30
BYTES_PER_PARAMETER = 16
FLOPS_PER_PARAMETER = 8


@dataclass(frozen=True)
class Run:
    """The times of one training: seconds of a step, of only its forward and backward, and of only the optimizer's step."""

    numel: int
    step: float
    compute: float
    optimizer: float
    peak: int

    def cells(self, tokens: int, base: Run | None) -> list[str]:
        """For the table. `base` is the training without offload."""
        hidden = ""
        if base is not None:
            there = base.optimizer * self.numel / base.numel  # what the step would take on the accelerator
            beside, shown = self.optimizer - there, self.step - self.compute - there
            hidden = f"{min(max(1 - shown / beside, 0.0), 1.0):.0%}" if beside > 0 else ""
        flops = FLOPS_PER_PARAMETER * self.numel * tokens / self.step
        return [
            f"{self.numel / 1e9:.2f} G", f"{self.step:.2f} s", f"{tokens / self.step:.0f}", f"{flops / 1e12:.1f}",
            f"{self.peak / GIB:.1f} GiB", hidden,
        ]  # fmt: skip


def config_for(nbytes: float, width: int, context: int) -> GPTConfig:
    """As many blocks as bring 16 bytes a parameter to `nbytes`."""
    layers = max(int(nbytes / BYTES_PER_PARAMETER / (12 * width**2)), 1)
    return GPTConfig(layers=layers, width=width, heads=max(width // 128, 1), context=context)


def train(config: GPTConfig, policy: Policy, device: torch.device, batch: int, steps: int) -> Run:
    """Train, and measure the parts."""
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        model = GPT(config).to(torch.bfloat16)
    model.to(device)
    zeroshard.checkpointing.Checkpointer().checkpoint_units(model)
    sharded = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), policy,
        precision=Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16),
    )  # fmt: skip
    data = torch.randint(0, 256, (batch, config.context + 1), device=device)

    def forward_and_backward() -> None:
        model(data[:, :-1], data[:, 1:]).backward()

    def step() -> None:
        forward_and_backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()

    step()
    whole = statistics.median(_seconds(step, device) for _ in range(steps))
    compute = statistics.median(_computation(sharded, forward_and_backward, device) for _ in range(steps))
    forward_and_backward()
    alone = statistics.median(_seconds(sharded.optimizer.step, device) for _ in range(steps))
    numel = sum(parameter.numel() for parameter in model.parameters())
    sharded.remove()
    return Run(numel, whole, compute, alone, _peak(device))


def _computation(sharded: Sharded, work: Callable[[], None], device: torch.device) -> float:
    with sharded.accumulate():
        seconds = _seconds(work, device)
    sharded.optimizer.zero_grad()
    return seconds


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _peak(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    peak = int(module.max_memory_allocated())
    module.reset_peak_memory_stats()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=float, default=1.25, help="states of the large model, in accelerator memories")
    parser.add_argument("--fits", type=float, default=0.6, help="the same of the model that fits")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    if arguments.rehearse:
        device, memory = torch.device("cpu"), 1 << 22
        arguments.batch, arguments.context, arguments.width, arguments.steps = 2, 32, 128, 2
    elif torch.accelerator.is_available():
        device = torch.device(str(torch.accelerator.current_accelerator()), 0)
        memory = int(torch.get_device_module(device).mem_get_info()[1])
    else:
        raise SystemExit(
            "there is no accelerator here, and nothing was measured. --rehearse runs a tiny model on the CPU."
        )
    offloaded = Policy.stage(2).offloaded(optimizer=Place.CPU)
    small = config_for(arguments.fits * memory, arguments.width, arguments.context)
    large = config_for(arguments.times * memory, arguments.width, arguments.context)
    table = Table(
        "",
        "parameters",
        "step",
        "tokens/s",
        "TFLOP/s",
        "peak",
        "hidden",
        title=f"{device}, {memory / GIB:.0f} GiB, bf16",
    )
    tokens, base = arguments.batch * arguments.context, None
    for name, config, policy in (
        ("fits, no offload", small, Policy.stage(2)), ("fits, optimizer in CPU memory", small, offloaded),
        ("does not fit, optimizer in CPU memory", large, offloaded),
        ("does not fit, all in CPU memory", large, Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU)),
    ):  # fmt: skip
        run = train(config, policy, device, arguments.batch, arguments.steps)
        table.add_row(name, *run.cells(tokens, base))
        base = base or run
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
