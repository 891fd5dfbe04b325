"""Owns the cost of a host that is far ahead of its device: memory that the allocator reserves, and waits between streams."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from simgpu import device as simgpu
from zeroshard import Place, Policy, Precision
from zeroshard.engine.recompute.checkpointer import Checkpointer, Checkpointing

BLOCKS = 24
WIDTH = 256
UNIT_NBYTES = WIDTH * WIDTH * 4
HOUR_MS = 3_600_000


class Blocks(nn.Module):
    """Equal blocks, each of which is a unit, and much larger than its activations."""

    def __init__(self, blocks: int = BLOCKS, layers: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))) for _ in range(blocks)
        )
        self.checkpoint: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return x


def _made(policy: Policy, model: Blocks, **options: Any) -> zeroshard.Sharded:
    simgpu.native().set_patience(HOUR_MS)  # the host stays ahead of the device even on a busy machine
    torch.manual_seed(0)
    model.to(simgpu.device())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return zeroshard.shard(model, adamw, policy, **options)


def _in_lockstep(model: Blocks) -> None:
    """Make the host wait for the device before and after each block."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: torch.accelerator.synchronize())
        block.register_forward_hook(lambda *_: torch.accelerator.synchronize())
        block.register_full_backward_hook(lambda *_: torch.accelerator.synchronize())


def _reserved() -> int:
    return torch.accelerator.memory_reserved()


def reserved_with_parameters_in_cpu_memory(rank: int, lockstep: bool) -> dict[str, float]:
    """Return the memory that a forward and a backward reserve, as a multiple of a unit's bytes."""
    model = Blocks()
    sharded = _made(Policy.stage(3).offloaded(parameters=Place.CPU), model)
    if lockstep:
        _in_lockstep(model)
    data = torch.ones(1, WIDTH, device=simgpu.device())
    torch.accelerator.synchronize()
    before = _reserved()
    loss = model(data).sum()
    forward = _reserved()
    loss.backward()
    backward = _reserved()
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    torch.accelerator.synchronize()
    return {"forward": (forward - before) / UNIT_NBYTES, "backward": (backward - before) / UNIT_NBYTES}


def reserved_with_inputs_in_cpu_memory(rank: int, lockstep: bool) -> dict[str, float]:
    """Return the memory that a forward and a backward reserve, as a multiple of the bytes of a block's input."""
    simgpu.native().set_patience(HOUR_MS)
    model = Blocks().to(simgpu.device())
    checkpointer = Checkpointer(Checkpointing(cpu_checkpointing=True))
    model.checkpoint = checkpointer.checkpoint
    if lockstep:
        _in_lockstep(model)
    rows = 1024
    data = torch.ones(rows, WIDTH, device=simgpu.device(), requires_grad=True)
    torch.accelerator.synchronize()
    before = _reserved()
    loss = model(data).sum()
    forward = _reserved()
    loss.backward()
    torch.accelerator.synchronize()
    size = rows * WIDTH * 4
    return {"forward": (forward - before) / size, "backward": (_reserved() - before) / size}


def stalls_in_backward(rank: int, stage: int, bits: int, declared: bool) -> dict[str, Any]:
    """Return how often the computing stream waits for a copy in each microbatch's backward, in the second step.

    Args:
        declared: whether the last microbatch of a step is declared.
    """
    model = Blocks(blocks=6, layers=6)
    policy = Policy.stage(stage).offloaded(optimizer=Place.CPU)
    precision = Precision(torch.bfloat16) if bits == 16 else None
    # Each parameter is a separate bucket, as large parameters are.
    sharded = _made(policy, model, precision=precision, bucket_numel=WIDTH * WIDTH)
    found: list[int] = []
    norms = []
    for step in range(2):
        for microbatch in range(3):
            with sharded.accumulate(declared and microbatch < 2):
                data = torch.full((4, WIDTH), 1.0 + microbatch, device=simgpu.device())
                loss = model(data.bfloat16() if bits == 16 else data).float().square().mean()
                simgpu.reset_counts()
                loss.backward()
                stalls = simgpu.native().stalls()
            if step == 1:
                # Without other ranks, only copies run on other streams.
                found.append(sum(count for (waits, other), count in stalls.items() if waits == 0 and other != 0))
        norms.append(float(sharded.clip_grad_norm_(1.0)))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    sharded.remove()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().float().cpu()
    return {"stalls": found, "norms": norms, "parameters": flat}


def stalls_without_room(rank: int, **options: Any) -> dict[str, Any]:
    """Return `stalls_in_backward` on a device whose memory is full."""
    accelerator: Any = importlib.import_module("zeroshard.core.storage.base")
    accelerator.FREE_SHARE = 2.0  # only in this rank's process
    return stalls_in_backward(rank, **options)
