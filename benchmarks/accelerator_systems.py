"""Owns the systems that `make accelerator` compares: each turns a GPT into a function that takes one step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerator_setting import Setting
from torch import Tensor, nn

import zeroshard
from zeroshard import Policy, Precision, Sharded
from zeroshard.testing.gpt import GPT, GPTConfig

LEARNING_RATE = 1e-4
Step = Callable[[Tensor], Tensor]


def model_of(setting: Setting, config: GPTConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same in every system."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = GPT(config)
    return model.to(setting.device, dtype)


def batch_of(setting: Setting, config: GPTConfig, number: int = 0, batch: int | None = None) -> Tensor:
    """Tokens [batch, context + 1] on the device."""
    shape = (batch or setting.batch, config.context + 1)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(number)).to(setting.device)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Fused."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def loop(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """One step of one microbatch."""

    def step(data: Tensor) -> Tensor:
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(setting: Setting, config: GPTConfig, dtype: torch.dtype) -> Step:
    """torch alone; in 16 bits without master weights, so it updates a third of the bytes."""
    model = model_of(setting, config, dtype)
    return loop(model, adamw(model.parameters()))


def torch_zero(setting: Setting, config: GPTConfig, dtype: torch.dtype) -> Step:
    """torch's ZeroRedundancyOptimizer, over the same."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    setting.alone()
    model = model_of(setting, config, dtype)
    return loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True))


def fsdp2(setting: Setting, config: GPTConfig, dtype: torch.dtype) -> Step:
    """torch's fully_shard, over each block and the root; fp32 master weights."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    setting.alone()
    world = dist.group.WORLD
    assert world is not None
    model = model_of(setting, config)
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(world, setting.device.type),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
    }
    for block in model.get_submodule("blocks").children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return loop(model, adamw(model.parameters()))


def sharded(
    setting: Setting, config: GPTConfig, policy: Policy, dtype: torch.dtype, **options: Any
) -> tuple[nn.Module, Sharded]:
    """zeroshard, with fp32 master weights."""
    model = model_of(setting, config)
    precision = None if dtype is torch.float32 else Precision(dtype)
    return model, zeroshard.shard(model, adamw(model.parameters()), policy, precision=precision, **options)


def stage(number: int, *, forced: bool = False) -> Callable[[Setting, GPTConfig, torch.dtype], Step]:
    """zeroshard's, at one rank; `forced` with the collectives of the accelerator's backend, which one rank needs not."""

    def make(setting: Setting, config: GPTConfig, dtype: torch.dtype) -> Step:
        if not forced:
            model, one = sharded(setting, config, Policy.stage(number), dtype)
            return loop(model, one.optimizer)
        with native_at_one_rank(setting):
            model, one = sharded(setting, config, Policy.stage(number), dtype)
        return loop(model, one.optimizer)

    return make


@contextmanager
def native_at_one_rank(setting: Setting) -> Iterator[None]:
    """Inside, a model that is sharded at one rank sends to itself."""
    from zeroshard.collectives.members import Members
    from zeroshard.collectives.native import Native
    from zeroshard.collectives.watch import Watch

    setting.alone()
    world = dist.group.WORLD
    assert world is not None
    module: Any = sys.modules["zeroshard.shard"] if "zeroshard.shard" in sys.modules else _imported()
    before = module.create_collectives

    def create(_group: Any, device: torch.device, predivide_factor: float = 1.0, *_: Any, **__: Any) -> Native:
        members = Members.of(world, device)
        return Native(members, device, predivide_factor, Watch(members.root, members.ranks, members.own, 30.0))

    module.create_collectives = create
    try:
        yield
    finally:
        module.create_collectives = before


def _imported() -> Any:
    import importlib

    return importlib.import_module("zeroshard.shard")


SYSTEMS: dict[str, Callable[[Setting, GPTConfig, torch.dtype], Step]] = {
    "plain torch": plain,
    "FSDP2": fsdp2,
    "torch's ZeroRedundancyOptimizer": torch_zero,
    **{f"zeroshard, stage {number}": stage(number) for number in range(4)},
    **{f"zeroshard, stage {number}, its collectives forced": stage(number, forced=True) for number in (2, 3)},
}
