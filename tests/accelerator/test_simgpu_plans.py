"""Plans compared with the simulated accelerator: allocated, reserved and pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from simgpu import device as simgpu
from simgpu import server
from torch import Tensor, nn

import zeroshard
from zeroshard.tools.planning.segments import Segments

pytestmark = pytest.mark.full

MIB = 1 << 20
WIDTH = 640
"""A width for which most blocks of memory are neither small nor separate segments."""
SAMPLES = 96
STEPS = 3


class Layers(nn.Module):
    """A model of equal blocks, whose operators are the same on each device. Maps samples [n, WIDTH] to a loss []."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def many_inputs() -> Layers:
    """Return a model with enough blocks that checkpointed inputs are in flight, at rest, and in reload at once."""
    return Layers(blocks=8)


def samples(count: int) -> tuple[Tensor]:
    return (torch.ones(count, WIDTH, dtype=torch.bfloat16),)


def default(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def trained(
    rank: int, config: dict[str, Any], model: Callable[[], nn.Module], optimizer: Callable[..., Any]
) -> dict[str, int]:
    """Train, and return the last step's peak bytes: allocated, reserved, and pinned in addition."""
    simgpu.native().pack_blocks()
    torch.manual_seed(0)
    engine, *_ = zeroshard.initialize(model=model(), config=config, optimizer=optimizer)
    torch.accelerator.synchronize()
    for step in range(STEPS):
        if step == STEPS - 1:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            simgpu.native().reset_pinned()
            before, _ = simgpu.native().pinned()
        data = samples(SAMPLES)[0].to(simgpu.device())
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        del loss, data  # in a plan, too, they live until the step ends
    torch.accelerator.synchronize()
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "reserved": torch.accelerator.max_memory_reserved(),
        "pinned": simgpu.native().pinned()[1] - before,
    }


def planned_and_real(
    stage: int, ranks: int, optimizer: Any, model: Any = Layers, **more: Any
) -> tuple[Any, list[dict[str, int]]]:
    """Return the plan of a training in bf16 with fp32 master weights, and what each rank took."""
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, **more,
    }  # fmt: skip
    plan = zeroshard.plan(
        model, config, world_size=ranks, batch=samples, optimizer=optimizer, machine="h100", presets=False
    )
    real = server.call(trained, ranks=ranks, config=config, model=model, optimizer=optimizer)
    for one in real:
        assert plan.rows[0].figures.peak.nbytes == pytest.approx(one["allocated"], rel=0.001)
    return plan.rows[0], real


@pytest.mark.parametrize(("stage", "ranks", "optimizer"), [(0, 1, default), (2, 1, fused), (3, 2, default)])
def test_a_plan_is_what_the_accelerators_allocator_gives(stage: int, ranks: int, optimizer: Any) -> None:
    """An optimizer without a choice of kernels takes temporaries of all tensors at once there, and not on a CPU."""
    plan, real = planned_and_real(stage, ranks, optimizer)
    assert {one["reserved"] for one in real} == {plan.reserved_nbytes}


def test_offloaded_inputs_of_checkpoints_take_the_planned_cpu_memory() -> None:
    how = {"checkpoint_units": "auto", "cpu_checkpointing": True}
    plan, (real,) = planned_and_real(2, 1, fused, many_inputs, activation_checkpointing=how)
    assert plan.figures.host_peak.parts["activations"] == real["pinned"] > 0


def test_blocks_and_segments_are_those_of_the_caching_allocator() -> None:
    """By hand, from its rules."""
    segments = Segments()
    little = segments.take(1)
    assert (little.nbytes, segments.reserved) == (512, 2 * MIB)
    small = segments.take(MIB)
    assert (small.nbytes, segments.reserved) == (MIB, 2 * MIB)
    middle = segments.take(MIB + 1)  # a rest of a buffer of 20 MiB stays for others
    assert (middle.nbytes, segments.reserved) == (MIB + 512, 22 * MIB)
    nearly = segments.take(18 * MIB)  # what is left is too little for another
    assert (nearly.nbytes, segments.reserved) == (19 * MIB - 512, 22 * MIB)
    large = segments.take(10 * MIB + 1)
    assert (large.nbytes, segments.reserved) == (10 * MIB + 512, 34 * MIB)
    for block in (middle, nearly):
        segments.give_back(block)
    assert segments.take(19 * MIB + 1).start == middle.start  # neighbours that are free are one
    assert segments.reserved == 34 * MIB
