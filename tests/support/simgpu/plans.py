"""Owns training runs on the simulated accelerator whose memory is compared with a plan, and the inputs of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from simgpu import device as simgpu

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
    """Return a batch in CPU memory."""
    return (torch.ones(count, WIDTH, dtype=torch.bfloat16),)


def default(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with its default kernels."""
    return torch.optim.AdamW(parameters)


def fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with fused kernels."""
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
    """Train, and return the last step's peak bytes: allocated, reserved, and pinned in addition."""
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
        del loss, data  # in a plan, too, they live until the step ends
    torch.accelerator.synchronize()
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "reserved": torch.accelerator.max_memory_reserved(),
        "pinned": simgpu.native().pinned()[1] - before,
    }
