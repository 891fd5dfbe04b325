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

LAYERS = 32
WARMUP = 3
Step = Callable[[Tensor], Tensor]


def _model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, width=32, heads=2, context=8)).to(simgpu.device())


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank)).to(simgpu.device())


def _zeroshard(model: nn.Module, stage: int, dtype: torch.dtype | None, clips: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sharded = zeroshard.shard(model, optimizer, Policy.stage(stage), precision=Precision(dtype) if dtype else None)

    def step(data: Tensor) -> Tensor:
        loss: Tensor = model(data[:, :-1], data[:, 1:])
        loss.backward()
        if clips:
            sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        return loss.detach()

    return step


def _fsdp2(model: nn.Module, stage: int, dtype: torch.dtype | None, clips: bool) -> Step:
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

    def step(data: Tensor) -> Tensor:
        loss: Tensor = model(data[:, :-1], data[:, 1:])
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


SYSTEMS = {"zeroshard": _zeroshard, "FSDP2": _fsdp2}


def one_step(rank: int, system: str, stage: int, clips: bool, layers: int = LAYERS, bits: int = 16) -> dict[str, Any]:
    """Return the counts of one step after the warm-up, by name, and the losses of all steps."""
    model = _model(layers)
    step = SYSTEMS[system](model, stage, torch.bfloat16 if bits == 16 else None, clips)
    losses = [step(_tokens(rank, number)) for number in range(WARMUP)]
    data = _tokens(rank, WARMUP)
    simgpu.reset_counts()
    losses.append(step(data))
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
    model = _model(2)
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), Policy.stage(3))
    batches = [_tokens(rank, number) for number in range(WARMUP + 5)]
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


def unchecked_step(rank: int, door: str) -> dict[str, Any]:
    """Return the host synchronisations of one clipped step in bf16 without overflow checks, and its norm."""
    model = _model(2)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [_tokens(rank, number) for number in range(WARMUP + 1)]
    take: Callable[[Tensor], float | Tensor | None]
    if door == "engine":
        config = {
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True, "check_grad_overflow": False},
            "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,
        }  # fmt: skip
        engine, *_ = zeroshard.initialize(model=model, optimizer=adamw, config=config)

        def take(data: Tensor) -> float | Tensor | None:
            engine.backward(engine(data[:, :-1], data[:, 1:]))
            return engine.step().norm

    else:
        importlib.import_module("accelerate").Accelerator(cpu=True)  # accelerate's optimizers need its state
        transformers = importlib.import_module("zeroshard.integrations.transformers")
        sharded = zeroshard.shard(model, adamw, Policy.stage(2), precision=Precision(torch.bfloat16))
        optimizer = transformers.OuterOptimizer(sharded, transformers.StaticLossScaler(), skips=False)

        def take(data: Tensor) -> float | Tensor | None:
            model(data[:, :-1], data[:, 1:]).backward()
            norm: float | Tensor = optimizer.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            return norm

    for data in batches[:-1]:
        take(data)
    simgpu.reset_counts()
    norm = take(batches[-1])
    counts = dict(simgpu.counts().synchronisations)
    assert norm is not None
    return {"synchronisations": counts, "norm": float(norm)}
