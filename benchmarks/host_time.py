"""Measures the host's time of a training step whose collectives cost nothing: torch's fake process group of 8 ranks.

    python benchmarks/host_time.py [--rounds 5] [--systems plain,fsdp2,zs2,zs3] [--json]
    python benchmarks/host_time.py --files zs3

The model has 32 Llama-like blocks of 9 small parameters. A step is a forward, a backward, torch's own clipping, AdamW
(foreach) and `zero_grad`. Where an accelerator is quicker than its host, this time is the step's time. zeroshard runs its
transport for accelerators (`Native`) over the fake group, in which every rank gives this rank's answers.

Each system runs in a process of its own, in turn, `--rounds` times. "x plain" is the median over rounds of the ratio to
plain PyTorch of the same round; `plain-again` shows the noise. The other columns are milliseconds: medians over steps, then
over rounds.

`--files` prints the microseconds that a step spends in each file of zeroshard: its share of a profile, times a step's time
without the profiler. A profile weighs short functions more than they take.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
import weakref
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.native import Native
from zeroshard.core.transport.rounds import Merge
from zeroshard.core.transport.watch import Watch
from zeroshard.model.shard import Backend, shard_on

PACKAGE = Path(zeroshard.__file__).parent
RANKS, WIDTH, LAYERS = 8, 16, 32
STEPS, WARM_UP = 25, 8
PHASES = ("forward", "backward", "clip", "update")
SYSTEMS = ("plain", "fsdp2", "zs0", "zs1", "zs2", "zs3", "plain-again")


class Block(nn.Module):
    """A block of nine small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, tokens, WIDTH] to the same shape."""
        h = self.norm(x)
        x = x + self.out(self.query(h) + self.key(h) + self.value(h))
        h = self.second_norm(x)
        out: Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    """A model of the shape of a Llama, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, tokens] to a loss of shape []."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(self.norm(x)).square().mean()
        return loss


# ---------------------------------------------------------------------- a transport whose messages cost nothing


class Silent(Watch):
    """A watchdog that watches nothing."""

    def begin(self, store: Any) -> None:
        """Do not connect to a store: there is none."""


class Free(Native):
    """The transport for accelerators. The other ranks give the same answers as this one, at once."""

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        """Return this rank's message for every rank."""
        return [data] * self.world_size

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        """Return this rank's message, as if the others' added nothing to it."""
        return own


def free_collectives(_group: dist.ProcessGroup | None, device: torch.device, **_: Any) -> Collectives:
    """Return collectives over torch's fake process group."""
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    members = Members(
        tuple(range(RANKS)), 0, RANKS, timedelta(seconds=100), "fake", weakref.ref(world), store, store
    )  # fmt: skip
    return Free(members, device, Silent(store, members.ranks, 0, 30.0, device), lasting=False)


# ---------------------------------------------------------------------- one system


def prepared(system: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """Return a model, as the system trains it, with its optimizer and a batch."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model, tokens = Llama(), torch.randint(0, 64, (1, 8))
    if system == "fsdp2":
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if system.startswith("zs"):
        backend = Backend(free_collectives, join_ranks=lambda _: None)
        shard_on(backend, model, optimizer, int(system[2:]), None, 500_000_000, overlap=True)
    return model, optimizer, tokens


def run(system: str) -> list[float]:
    """Return the median milliseconds of a step and of its phases."""
    return medians(*prepared(system))


def medians(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> list[float]:
    """Train, and return the median milliseconds of a step and of its phases."""
    rows = []
    for _ in range(STEPS):
        at = [time.perf_counter()]
        loss = model(tokens)
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        at.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        at.append(time.perf_counter())
        rows.append([at[-1] - at[0], *(stop - start for start, stop in pairwise(at))])
    return [1e3 * statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)]


def by_file(system: str) -> dict[str, float]:
    """Return the microseconds of a step in each file of zeroshard."""
    training = prepared(system)
    step = medians(*training)[0]
    profiler = cProfile.Profile()
    profiler.runcall(medians, *training)
    found = Counter[str]()
    stats = pstats.Stats(profiler)
    for (file, _, _), (_, _, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        found[file] += own
    total = sum(found.values())
    ours = [file for file, _ in found.most_common() if Path(file).is_relative_to(PACKAGE)]
    return {str(Path(file).relative_to(PACKAGE)): 1e3 * step * found[file] / total for file in ours}


def main() -> None:
    """Run the systems in turn and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--files", metavar="SYSTEM")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.files:
        for file, microseconds in by_file(chosen.files).items():
            print(f"{microseconds:9.0f}  {file}")
        sys.stdout.flush()
        os._exit(0)
    if chosen.one:
        print(json.dumps(run(chosen.one)), flush=True)
        os._exit(0)  # a fake group's threads need no end
    systems = chosen.systems.split(",")
    unknown = [name for name in systems if name not in SYSTEMS]
    if unknown:
        parser.error(f"no system is named {unknown[0]}: choose of {', '.join(SYSTEMS)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    found: dict[str, list[list[float]]] = {name: [] for name in dict.fromkeys(["plain", *systems])}
    for _ in range(chosen.rounds):
        for name, rows in found.items():
            command = [sys.executable, str(Path(__file__)), "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
            if done.returncode or not done.stdout.strip():
                raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = {
        name: [
            statistics.median(row[0] / plain[0] for row, plain in zip(rows, found["plain"], strict=True)),
            *(statistics.median(column) for column in zip(*rows, strict=True)),
        ]
        for name, rows in found.items()
    }
    if chosen.json:
        names = ("x plain", "step", *PHASES)
        print(json.dumps({system: dict(zip(names, row, strict=True)) for system, row in table.items()}, indent=1))
        return
    print(
        f"{'':12}{'x plain':>9}{'step':>9}"
        + "".join(f"{phase:>9}" for phase in PHASES)
        + f"   ms, {chosen.rounds} rounds"
    )
    for name, (ratio, *milliseconds) in table.items():
        print(f"{name:12}{ratio:9.2f}" + "".join(f"{each:9.1f}" for each in milliseconds))


if __name__ == "__main__":
    main()
