"""Owns the cost of a step on the simulated accelerator, compared with FSDP2: kernels, collectives, and host synchronisations."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from simgpu import device as simgpu
from zeroshard import Policy, Precision
from zeroshard.testing.gpt import GPT, GPTConfig

WARMUP = 3
"""Steps before the one that counts."""
Clip = Callable[[float], Any]


def model_of(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, width=32, heads=2, context=8)).to(simgpu.device())


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank)).to(simgpu.device())


def _zeroshard(model: nn.Module, stage: int, dtype: torch.dtype | None) -> tuple[Any, Clip]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sharded = zeroshard.shard(model, optimizer, Policy.stage(stage), precision=Precision(dtype) if dtype else None)
    return sharded.optimizer, sharded.clip_grad_norm_


def _fsdp2(model: nn.Module, stage: int, dtype: torch.dtype | None) -> tuple[Any, Clip]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.group.WORLD
    assert world is not None
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(world, "simgpu"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        "reshard_after_forward": stage == 3,
    }
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return optimizer, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)


SYSTEMS = {"zeroshard": _zeroshard, "FSDP2": _fsdp2}


def one_step(rank: int, system: str, stage: int, clips: bool, layers: int, bits: int = 16) -> dict[str, Any]:
    """Return the counts of one step after the warm-up, by name, and the losses of all steps."""
    model = model_of(layers)
    optimizer, clip = SYSTEMS[system](model, stage, torch.bfloat16 if bits == 16 else None)
    losses = []
    for data in [tokens(rank, number) for number in range(WARMUP + 1)]:
        simgpu.reset_counts()
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        if clips:
            clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    counts = simgpu.counts()
    kinds = ("launches", "synchronisations", "pageable_copies", "collectives")
    found: dict[str, Any] = {kind: dict(getattr(counts, kind)) for kind in kinds}
    return found | {"losses": torch.stack(losses).float().cpu()}


def total(counts: dict[str, Any], kind: str) -> int:
    """Return the count of one kind, over all names."""
    return sum(Counter(counts[kind]).values())


def watched_steps(rank: int, folder: str) -> dict[str, Any]:
    """Return the counts of five clipped and logged steps, and the losses of all steps."""
    module = importlib.import_module("zeroshard.engine.training_progress")
    module.READ_SECONDS = 0.0  # type: ignore[attr-defined]  # only in this rank's process
    model = model_of(2)
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), Policy.stage(3))
    batches = [tokens(rank, number) for number in range(WARMUP + 5)]
    losses = []
    with zeroshard.progress(sharded, samples=4, log=folder) as progress:
        for number, data in enumerate(batches):
            if number == WARMUP:
                simgpu.reset_counts()
            loss = model(data[:, :-1], data[:, 1:])
            loss.backward()
            norm = sharded.clip_grad_norm_(1.0)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            progress.step(loss, norm)
            losses.append(loss.detach())
        counts = simgpu.counts()
    found: dict[str, Any] = {kind: dict(getattr(counts, kind)) for kind in ("synchronisations", "pageable_copies")}
    return found | {"losses": torch.stack(losses).float().cpu()}
