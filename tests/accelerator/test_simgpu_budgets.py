"""The cost of a step in the simulated accelerator's counters, compared with FSDP2 on the same device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from simgpu import device as simgpu
from simgpu import server
from simgpu.budgets import WARMUP, model_of, one_step, tokens, total
from simgpu.server import simulated
from torch import Tensor

import zeroshard
from zeroshard import Policy, Precision

pytestmark = pytest.mark.full

STAGES = pytest.mark.parametrize("stage", [2, 3])
LAYERS = pytest.mark.parametrize("layers", [6, pytest.param(32, marks=pytest.mark.full)])
"""The counters of 32 are the table of docs/accelerators.md: `pytest --rest -s` prints them."""


@cache
def measured(system: str, stage: int, clips: bool, layers: int) -> dict[str, Any]:
    """Count what a step costs on rank 0."""
    options = {"system": system, "stage": stage, "clips": clips, "layers": layers}
    counts: dict[str, Any] = server.call(one_step, **options)[0]
    print(f"{system}, stage {stage}, clipping {clips}, {layers} blocks:")
    for kind in ("collectives", "launches", "synchronisations", "pageable_copies"):
        print(f"    {kind} {total(counts, kind)}: {counts[kind]}")
    return counts


@LAYERS
@STAGES
def test_a_step_has_no_more_collectives_than_fsdp2s(stage: int, layers: int) -> None:
    ours, theirs = (total(measured(system, stage, False, layers), "collectives") for system in ("zeroshard", "FSDP2"))
    assert ours <= theirs


@pytest.mark.full
@LAYERS
def test_a_step_of_stage_2_launches_fewer_kernels_than_fsdp2s(layers: int) -> None:
    ours, theirs = (total(measured(system, 2, False, layers), "launches") for system in ("zeroshard", "FSDP2"))
    assert ours < theirs


@pytest.mark.every
@LAYERS
@STAGES
@pytest.mark.parametrize("clips", [False, True])
def test_the_host_never_waits_and_nothing_goes_through_pageable_memory(clips: bool, stage: int, layers: int) -> None:
    counts = measured("zeroshard", stage, clips, layers)
    assert total(counts, "synchronisations") == total(counts, "pageable_copies") == 0


@pytest.mark.parametrize("door", ["engine", "Trainer"])
@simulated(mode="all late")
def test_bf16_without_overflow_checks_makes_the_host_wait_for_nothing(rank: int, door: str) -> None:
    model = model_of(2)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    take: Callable[[Tensor], Any]
    if door == "engine":
        config = {
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True, "check_grad_overflow": False},
            "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0,
        }  # fmt: skip
        engine, *_ = zeroshard.initialize(model=model, optimizer=adamw, config=config)

        def take(data: Tensor) -> Any:
            engine.backward(engine(data[:, :-1], data[:, 1:]))
            return engine.step().norm

    else:
        importlib.import_module("accelerate").Accelerator(cpu=True)  # accelerate's optimizers need its state
        transformers = importlib.import_module("zeroshard.integrations.transformers")
        sharded = zeroshard.shard(model, adamw, Policy.stage(2), precision=Precision(torch.bfloat16))
        optimizer = transformers.OuterOptimizer(sharded, transformers.StaticLossScaler(), skips=False)

        def take(data: Tensor) -> Any:
            model(data[:, :-1], data[:, 1:]).backward()
            norm = optimizer.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            return norm

    for data in [tokens(rank, number) for number in range(WARMUP + 1)]:
        simgpu.reset_counts()
        norm = take(data)
    assert not simgpu.counts().synchronisations
    assert float(norm) > 0
