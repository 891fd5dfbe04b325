"""States of a plain run load after `shard`, for every optimizer, stage, place and dtype: the next steps are the plain run's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing_comparison import difference
from torch import Tensor, nn
from twin import Setting, as_set, update

import zeroshard
from zeroshard import Lion, Offload, Policy, Precision
from zeroshard.engine.config.schema import OptimizerBlock
from zeroshard.engine.from_config import create_optimizer
from zeroshard.optim.states import KNOWN

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


def of_torch(name: str, lr: Any = 0.01, **options: Any) -> Make:
    return partial(Lion if name == "Lion" else getattr(torch.optim, name), lr=lr, **options)


def of_config(name: str, **params: Any) -> Make:
    block = OptimizerBlock(type=name, params={"lr": 0.01, **params})
    return lambda parameters: create_optimizer(block, list(parameters), None)


def in_two_groups(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    every = list(parameters)
    vectors = {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([vectors, {"params": [p for p in every if p.ndim > 1]}], lr=0.01, fused=True)


OPTIMIZERS: dict[str, Make] = {name: of_torch(name) for name in KNOWN}
OPTIMIZERS |= {
    "ASGD, averaging": of_torch("ASGD", t0=2, lambd=0.1),
    "Adagrad, from 1": of_torch("Adagrad", initial_accumulator_value=1.0, lr_decay=0.1),
    "Adam, amsgrad": of_torch("Adam", amsgrad=True, weight_decay=0.1),
    "AdamW, fused, in two groups": in_two_groups,
    "AdamW, foreach": of_torch("AdamW", foreach=True),
    "AdamW, a tensor as rate": of_torch("AdamW", lr=torch.tensor(0.01)),
    "Adamax, decaying": of_torch("Adamax", weight_decay=0.1),
    "NAdam, decoupled": of_torch("NAdam", weight_decay=0.1, decoupled_weight_decay=True),
    "RMSprop, centred": of_torch("RMSprop", momentum=0.9, centered=True),
    "Rprop, large steps": of_torch("Rprop", lr=0.1, etas=(0.3, 1.7)),
    "SGD, momentum": of_torch("SGD", momentum=0.9, dampening=0.1),
    "SGD, Nesterov": of_torch("SGD", momentum=0.9, nesterov=True, maximize=True),
}
OPTIMIZERS |= {
    f"a config's {name}": of_config(name)
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "Lion", "RMSprop", "Rprop", "ASGD", "Muon")
}


def net(kind: str) -> nn.Sequential:
    """Return layers without a size that is a multiple of the number of ranks.

    Args:
        kind: "matrices", "vectors", or both in one, with a parameter without dimensions, as CLIP's logit_scale. Vectors on one
            rank have the shapes of their shards, and torch could take over the caller's tensors.
    """
    torch.manual_seed(0)
    if kind == "vectors":
        return nn.Sequential(nn.LayerNorm(5), nn.Tanh(), nn.LayerNorm(5), nn.Tanh())
    model = nn.Sequential(
        nn.Linear(5, 7, bias=kind == "both"), nn.Tanh(), nn.Linear(7, 3, bias=kind == "both"), nn.Tanh()
    )
    if kind == "both":
        model.scale = nn.Parameter(torch.tensor(0.5))
        model.register_forward_hook(lambda module, _, output: output * module.scale.exp())
    return model


def loss_of(model: nn.Module, number: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number)).to(dtype)
    return model(x).float().sub(0.3).square().mean()


class Plain:
    """A loop of plain PyTorch over fp32 master weights, with a model in another dtype."""

    def __init__(self, make: Make, dtype: torch.dtype, kind: str) -> None:
        self.model, self.dtype, self.number = net(kind), dtype, 0
        self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in self.model.parameters()]
        self.model.to(dtype)
        self.optimizer = make(self.masters)

    def step(self) -> None:
        loss_of(self.model, self.number, self.dtype).backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.to(master.dtype)
            parameter.grad = None
        self.optimizer.step()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.data.copy_(master.data)
        self.number += 1


def settings(folder: Path) -> Iterator[Setting]:
    how = Offload(str(folder), buffer_numel=4096, block_nbytes=4096, sub_group_numel=16)
    for stage in range(4):
        yield Setting(Policy.stage(stage))
        for place in ("cpu", "disk") if stage else ():
            yield Setting(Policy.stage(stage).offloaded(optimizer=place, offload=how), apart=place == "cpu")


@pytest.mark.ranks("ranks")
@pytest.mark.quick(4)
@pytest.mark.parametrize(("kind", "ranks"), [("matrices", 2), ("both", 2), ("vectors", 1)])
@pytest.mark.parametrize("before", [0, 1, 3], ids="after {} steps".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_ten_steps(
    rank: int, name: str, dtype: torch.dtype, before: int, kind: str, ranks: int, tmp_path: Path
) -> None:
    if "Muon" in name:  # for the others, a config's Muon has a second optimizer, with a state dict of its own
        kind = "matrices"
    make = OPTIMIZERS[name]
    for setting in settings(tmp_path):
        plain = Plain(make, dtype, kind)
        for _ in range(before):
            plain.step()
        state = plain.optimizer.state_dict()
        saved = copy.deepcopy(state)
        model = net(kind)
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), plain.masters, strict=True):
                parameter.copy_(master)
        optimizer = make(model.parameters())
        with as_set(setting):
            sharded = zeroshard.shard(model, optimizer, setting.policy, precision=Precision(dtype))
            groups = [[*map(id, group["params"])] for group in optimizer.param_groups]
            for _ in range(2):  # a rollback loads it again
                optimizer.load_state_dict(state)
            assert difference(state, saved) is None  # a load does not change the caller's
            assert [[*map(id, group["params"])] for group in optimizer.param_groups] == groups
            for number in range(before, before + 10):
                plain.step()
                update(loss_of(model, number, dtype), optimizer)
            for (fqn, _), master in zip(model.named_parameters(), plain.masters, strict=True):
                value = sharded.states.get(fqn)
                assert value is not None and torch.equal(value, master), f"{setting}: {fqn}"
            sharded.remove()
