"""Owns the systems that step.py and offload.py compare: each turns a model into a function that runs one step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard

LEARNING_RATE = 1e-4
TrainStep = Callable[[Tensor], Tensor]


def loop(forward: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> TrainStep:
    """Return a function that runs one step."""

    def step(tokens: Tensor) -> Tensor:
        loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all systems except those that shard it themselves."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _checkpoint(model: nn.Module) -> None:
    """Wrap each block in torch's activation checkpointing (not reentrant)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    blocks = set(model.get_submodule("blocks").children())
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)


def ddp(model: nn.Module, *, checkpointed: bool = False) -> TrainStep:
    """Return torch's DistributedDataParallel."""
    if checkpointed:
        _checkpoint(model)
    return loop(nn.parallel.DistributedDataParallel(model), adamw(model))


def ddp_zero_redundancy(model: nn.Module, *, checkpointed: bool = False) -> TrainStep:
    """Return DDP with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if checkpointed:
        _checkpoint(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return loop(nn.parallel.DistributedDataParallel(model), optimizer)


def floor(model: nn.Module, *, checkpointed: bool = False) -> TrainStep:
    """Return a lower bound for all systems: ranks that do not communicate, each with AdamW over its share of the elements.

    It does not train the model, so its losses differ from those of the systems.
    """
    if checkpointed:
        _checkpoint(model)
    parameters = list(model.parameters())
    share = sum(p.numel() for p in parameters) / torch.distributed.get_world_size()
    own, numel = [], 0
    for parameter in parameters:
        if numel < share:
            own.append(parameter)
            numel += parameter.numel()
    optimizer = torch.optim.AdamW(own, lr=LEARNING_RATE, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.zero_grad()
        return loss.detach()

    return step


def fsdp2(reshard: bool, model: nn.Module, *, checkpointed: bool = False) -> TrainStep:
    """Return torch's fully_shard over each block and the root."""
    if checkpointed:
        _checkpoint(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return loop(model, adamw(model))


def zeroshard_stage(
    stage: int,
    reshard: bool,
    model: nn.Module,
    *,
    checkpointed: bool = False,
    optimizer: zeroshard.Place | None = None,
    parameters: zeroshard.Place | None = None,
) -> TrainStep:
    """Return zeroshard with its own checkpointing. Offloaded states are on disk in $FOLDER, through 64 MiB of CPU memory."""
    if checkpointed:
        zeroshard.checkpointing.Checkpointer().checkpoint_units(model)
    policy = zeroshard.Policy.stage(stage, reshard_after_forward=reshard)
    offload = zeroshard.Offload(os.environ.get("FOLDER", tempfile.gettempdir()), buffer_numel=4 << 20)
    policy = policy.offloaded(optimizer=optimizer, parameters=parameters, offload=offload)
    sharded = zeroshard.shard(model, adamw(model), policy)
    return loop(model, sharded.optimizer)


def deepspeed(stage: int, model: nn.Module, *, checkpointed: bool = False) -> TrainStep:
    """Return DeepSpeed with torch's fused AdamW, since its own optimizer is compiled for minutes at first use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as peer

    if checkpointed:
        _checkpoint(model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = peer.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[..., TrainStep]] = {
    "DDP": ddp,
    "DDP + torch ZeroRedundancyOptimizer": ddp_zero_redundancy,
    "floor: no communication": floor,
    "FSDP2, keeps units": partial(fsdp2, False),
    "FSDP2": partial(fsdp2, True),
    "DeepSpeed stage 1": partial(deepspeed, 1),
    "DeepSpeed stage 2": partial(deepspeed, 2),
    "DeepSpeed stage 3": partial(deepspeed, 3),
    "zeroshard stage 0": partial(zeroshard_stage, 0, True),
    "zeroshard stage 1": partial(zeroshard_stage, 1, True),
    "zeroshard stage 2": partial(zeroshard_stage, 2, True),
    "zeroshard stage 3, keeps units": partial(zeroshard_stage, 3, False),
    "zeroshard stage 3": partial(zeroshard_stage, 3, True),
    "zeroshard stage 3, optimizer in CPU memory": partial(zeroshard_stage, 3, True, optimizer=zeroshard.Place.CPU),
    "zeroshard stage 3, optimizer on disk": partial(zeroshard_stage, 3, True, optimizer=zeroshard.Place.DISK),
    "zeroshard stage 3, all on disk": partial(
        zeroshard_stage, 3, True, optimizer=zeroshard.Place.DISK, parameters=zeroshard.Place.DISK
    ),
}
"""The systems by name. Each maps `(model, checkpointed=...)` to a function that runs one step on tokens [batch, length + 1]."""
