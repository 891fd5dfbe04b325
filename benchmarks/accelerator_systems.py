"""Owns the systems that `make accelerator` compares: each turns a model into a function that runs one step."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerator_models import Llama, Shape
from accelerator_setting import Setting
from torch import Tensor, nn

from zeroshard import Policy, Precision, Sharded
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.native import Native
from zeroshard.core.transport.watch import Watch
from zeroshard.engine.recompute.checkpointer import Checkpointer
from zeroshard.model.shard import BACKEND, Backend, shard_on
from zeroshard.testing.gpt import GPT, GPTConfig

LEARNING_RATE = 1e-4
BUCKET_NUMEL = 1 << 24
BF16 = torch.bfloat16
Step = Callable[[Tensor], Tensor]


def small_model(setting: Setting) -> nn.Module:
    """Return the GPT for the checks of results, with the same values in every system."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = GPT(setting.small)
    return model.to(setting.device)


def small_batch(setting: Setting, number: int = 0) -> Tensor:
    """Return tokens [8, context + 1] on the device."""
    config: GPTConfig = setting.small
    shape = (8, config.context + 1)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(number)).to(setting.device)


def llama(setting: Setting, shape: Shape, dtype: torch.dtype = torch.float32) -> Llama:
    """Return a checkpointed Llama, made on the device."""
    torch.manual_seed(0)
    with setting.device:
        model = Llama(shape).to(dtype)
    Checkpointer().checkpoint_units(model)
    return model


def batch_of(setting: Setting, shape: Shape, batch: int, length: int) -> Tensor:
    """Return tokens [batch, length + 1] on the device."""
    made = torch.randint(0, shape.vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return made.to(setting.device)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW with fused kernels."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def loop(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """Return a function that runs one step of one microbatch."""

    def step(data: Tensor) -> Tensor:
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(setting: Setting, shape: Shape) -> Step:
    """Return plain PyTorch with bf16 parameters and separate fp32 master weights."""
    model = llama(setting, shape, BF16)
    parameters = list(model.parameters())
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer = adamw(masters)

    def step(data: Tensor) -> Tensor:
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
                parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(list[Tensor](parameters), masters)
        detached: Tensor = loss.detach()
        return detached

    return step


def fsdp2(reduce_dtype: torch.dtype) -> Callable[[Setting, Shape], Step]:
    """Return torch's fully_shard over each block and the root, with fp32 master weights."""

    def make(setting: Setting, shape: Shape) -> Step:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        setting.alone()
        world = dist.group.WORLD
        assert world is not None
        model = llama(setting, shape)
        options: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(world, setting.device.type),
            "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype),
        }
        for block in model.blocks.children():
            fully_shard(block, **options)
        fully_shard(model, **options)
        return loop(model, adamw(model.parameters()))

    return make


def deepspeed(setting: Setting, shape: Shape) -> Step:
    """Return DeepSpeed's engine at stage 2, with torch's optimizer."""
    setting.alone()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():  # which its launcher sets
        os.environ.setdefault(name, value)
    module: Any = importlib.import_module("deepspeed")
    model = llama(setting, shape)
    config = {
        "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = module.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(data: Tensor) -> Tensor:
        loss: Tensor = engine(data[:, :-1], data[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def sharded(
    model: nn.Module,
    policy: Policy,
    dtype: torch.dtype,
    *,
    bucket_numel: int = BUCKET_NUMEL,
    forced: Setting | None = None,
) -> Sharded:
    """Shard a model with zeroshard, with fp32 master weights.

    Args:
        forced: the setting, to use the backend's collectives, which one rank does not need; None: do not use them.
    """
    precision = None
    if dtype is not torch.float32:
        precision = Precision(dtype)
    backend = BACKEND
    if forced is not None:
        forced.alone()
        backend = Backend(collectives=_native_at_one_rank)
    return shard_on(backend, model, adamw(model.parameters()), policy, precision, bucket_numel, overlap=True)


def _native_at_one_rank(_group: Any, device: torch.device, **_: Any) -> Native:
    """Return collectives of one rank that sends to itself."""
    world = dist.group.WORLD
    assert world is not None
    members = Members.of(world, device)
    watch = Watch(members.root, members.ranks, members.own, 30.0, device)
    return Native(members, device, watch)


def stage(number: int, *, forced: bool = False) -> Callable[[Setting, Shape], Step]:
    """Return zeroshard at a stage on one rank. `forced` uses the backend's collectives (see `sharded`)."""

    def make(setting: Setting, shape: Shape) -> Step:
        model = llama(setting, shape)
        return loop(model, sharded(model, Policy.stage(number), BF16, forced=setting if forced else None).optimizer)

    return make


KEEP_MEMORY = ("DeepSpeed, stage 2",)
"""The systems whose model states stay on the device after their last use: their rows run last."""


def systems() -> dict[str, Callable[[Setting, Shape], Step]]:
    """Return the systems of this machine by name. The others are compared with the first."""
    found: dict[str, Callable[[Setting, Shape], Step]] = {
        "PyTorch with masters": plain,
        "FSDP2, reduces fp32": fsdp2(torch.float32),
        "FSDP2, reduces bf16": fsdp2(BF16),
    }
    if importlib.util.find_spec("deepspeed") is not None and importlib.util.find_spec("deepspeed.runtime.engine"):
        found["DeepSpeed, stage 2"] = deepspeed
    found |= {f"zeroshard, stage {number}": stage(number) for number in (0, 2, 3)}
    found["zeroshard, stage 3, collectives forced"] = stage(3, forced=True)
    return found
