"""Runs one rank of a job over two hosts, for test_hosts.py: `job.py parity|checkpoint|train|twice FOLDER [SECONDS]`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zeroshard
from zeroshard import CollectiveError, Policy, Residency
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, width=32, heads=2, context=16)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return drawn[:, :-1], drawn[:, 1:]


def parity(folder: Path) -> None:
    """Check that all policies with hosts give the same bits, and all policies without hosts do too."""
    rank, work = dist.get_rank(), Workload(lambda: GPT(CONFIG), batch, steps=3, max_norm=1.0)
    flat = replace(Policy.stage(3, within="host"), parameters=Residency(sharded=True))
    policies = [*(Policy.stage(stage, within="host") for stage in range(4)), flat]
    runs = [train(rank, work, policy) for policy in policies]
    plain = [train(rank, work, Policy.stage(stage)) for stage in range(4)]
    for kind in (runs, plain):
        for run in kind:
            assert run.equals(kind[0])
    torch.save({"losses": runs[3].losses, "sent": runs[3].sent, "flat": plain[3].sent}, folder / f"parity.{rank}")


def build(policy: Policy) -> tuple[GPT, zeroshard.Sharded]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    return model, zeroshard.shard(model, torch.optim.AdamW(model.parameters(), fused=True), policy)


def step(model: GPT, sharded: zeroshard.Sharded, number: int) -> None:
    model(*batch(dist.get_rank(), number)).backward()
    sharded.clip_grad_norm_(1.0)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()


def checkpoint(folder: Path) -> None:
    """Save on two hosts, and load with and without `within`."""
    model, sharded = build(Policy.stage(3, within="host"))
    for number in range(2):
        step(model, sharded, number)
    sharded.save(folder, "there")
    with zeroshard.unsharded(model):
        expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    sharded.remove()
    for policy in (Policy.stage(3, within="host"), Policy.stage(3), Policy.stage(1)):
        model, sharded = build(policy)
        sharded.load(folder, "there")
        with zeroshard.unsharded(model):
            assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
        sharded.remove()


def train_on(folder: Path) -> None:
    """Train until a collective fails. Then report the error, and the seconds since the step began."""
    model, sharded = build(Policy.stage(3, within="host" if os.environ["WITHIN"] else None))
    number = 0
    began = time.time()
    try:
        while True:
            began = time.time()
            step(model, sharded, number)
            number += 1
            if number == 3:
                print("training", flush=True)
            time.sleep(0.05)
    except CollectiveError as error:
        print(f"FAILED rank {dist.get_rank()} after {time.time() - began:.1f} s: {error}", flush=True)
        (folder / f"failed.{dist.get_rank()}").write_text(f"{time.time() - began}\n{error}")
        os._exit(3)


def twice(_: Path) -> None:
    """Train slowly, so that a test may disturb the link. Then train again, and expect the same bits."""
    ends: list[list[torch.Tensor]] = []
    for seconds in (0.05, 0.0):
        model, sharded = build(Policy.stage(3, within="host" if os.environ["WITHIN"] else None))
        for number in range(40):
            step(model, sharded, number)
            if seconds and number == 3:
                print("training", flush=True)
            time.sleep(seconds)
        with zeroshard.unsharded(model):
            ends.append([value.detach().clone() for value in model.parameters()])
        sharded.remove()
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    {"parity": parity, "checkpoint": checkpoint, "train": train_on, "twice": twice}[what](folder)
    dist.barrier()
    dist.destroy_process_group()
