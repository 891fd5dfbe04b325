"""Measures the cost of a step's bookkeeping: a model of many small blocks, with almost no computation, on 2 ranks.

    python benchmarks/many_units.py [--blocks 2000] [--steps 5] [--one-unit]

The table has the CPU seconds of a rank's process, including its threads, under zeroshard, DDP and FSDP2. They are
medians over steps, for a step, for its backward, and for a step with a tenth of the blocks. With --one-unit, one unit
has all parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zeroshard
from zeroshard import Policy
from zeroshard.testing import run_ranks

WIDTH = 16


class Block(nn.Module):
    """A block of five small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, WIDTH] to [batch, WIDTH]."""
        out: Tensor = x + self.scale * self.linear(self.norm(x)) * 0.01
        return out


class Deep(nn.Module):
    """A model of any number of blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, WIDTH] to a loss of shape []."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _ddp(model: Deep) -> tuple[nn.Module, torch.optim.Optimizer]:
    return nn.parallel.DistributedDataParallel(model), _adamw(model)


def _fsdp2(model: Deep) -> tuple[nn.Module, torch.optim.Optimizer]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, _adamw(model)


def _zeroshard(stage: int) -> Callable[[Deep], tuple[nn.Module, Any]]:
    return lambda model: (model, zeroshard.shard(model, _adamw(model), Policy.stage(stage)).optimizer)


class Wide(nn.Module):
    """The same blocks, but not in a list of modules."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.names = [f"block{number}" for number in range(blocks)]
        for name in self.names:
            self.add_module(name, Block())

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, WIDTH] to a loss of shape []."""
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x.square().mean()


SYSTEMS: dict[str, Callable[[Any], tuple[nn.Module, Any]]] = {
    "DDP": _ddp,
    "DDP again": _ddp,
    "FSDP2": _fsdp2,
    "zeroshard stage 2": _zeroshard(2),
    "zeroshard stage 3": _zeroshard(3),
}


def cpu_seconds(_: int, system: str, blocks: int, steps: int, one_unit: bool) -> tuple[float, float]:
    """Return the CPU seconds of this process, for one step and for its backward."""
    torch.manual_seed(0)
    model, optimizer = SYSTEMS[system](Wide(blocks) if one_unit else Deep(blocks))
    x = torch.randn(2, WIDTH)
    whole: list[float] = []
    backward: list[float] = []
    for _ in range(2 + steps):
        start = time.process_time()
        loss = model(x)
        before = time.process_time()
        loss.backward()
        backward.append(time.process_time() - before)
        optimizer.step()
        optimizer.zero_grad()
        whole.append(time.process_time() - start)
    return statistics.median(whole[2:]), statistics.median(backward[2:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--one-unit", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(SYSTEMS))
    options = parser.parse_args()
    systems = [system for system in options.only if not (options.one_unit and system == "FSDP2")]
    first: tuple[float, float] | None = None
    print(f"{'':20}{'CPU s/step':>12}{'x DDP':>8}{'backward':>10}{'x DDP':>8}{'a tenth':>10}{'growth':>8}")
    for system in systems:
        (large, backward), (small, _) = (
            max(
                run_ranks(
                    cpu_seconds, 2, system, count, options.steps, options.one_unit, timeout=1200, collective_timeout=600
                )
            )
            for count in (options.blocks, options.blocks // 10)
        )
        first = first or (large, backward)
        figures = f"{large:12.3f}{large / first[0]:8.2f}{backward:10.3f}{backward / first[1]:8.2f}{small:10.3f}"
        print(f"{system:20}{figures}{large / small:8.1f}", flush=True)


if __name__ == "__main__":
    main()
