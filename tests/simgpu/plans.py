"""Owns trainings on the simulated accelerator whose memory a plan is held against, and the same for the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from simgpu import device as simgpu

WIDTH = 640
"""So that most blocks of memory are neither small nor segments of their own."""
SAMPLES = 96
STEPS = 3


class Layers(nn.Module):
    """Return the mean square of what equal blocks make of samples [n, WIDTH]: operators that are the same on each device."""

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
    """Enough blocks that inputs of checkpoints are in flight, at rest, and on their way back at once."""
    return Layers(blocks=8)


def samples(count: int) -> tuple[Tensor]:
    """Return a batch in CPU memory."""
    return (torch.ones(count, WIDTH, dtype=torch.bfloat16),)


def default(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW without a choice of kernels."""
    return torch.optim.AdamW(parameters)


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with one kernel."""
    return torch.optim.AdamW(parameters, fused=True)


def config(stage: int, **more: Any) -> dict[str, Any]:
    """Return a config for bf16 with fp32 master weights."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, **more,
    }  # fmt: skip


def trained(
    rank: int, made: dict[str, Any], model: Callable[[], nn.Module], optimizer: Callable[..., Any]
) -> dict[str, int]:
    """Train, and return bytes: the most that was allocated in a step, and pinned for it; and what was reserved in the end."""
    simgpu.native().pack_blocks()
    torch.manual_seed(0)
    engine, *_ = zeroshard.initialize(model=model(), config=made, optimizer=optimizer)
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
        del loss, data  # in a plan they live until the step is over, too
    torch.accelerator.synchronize()
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "reserved": torch.accelerator.max_memory_reserved(),
        "pinned": simgpu.native().pinned()[1] - before,
    }
