"""torch's optimizers of named parameters: their names stay, and groups can be added, merged and loaded as without names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Stack
from torch import Tensor, nn
from twin import engine_steps, same, whole

import zeroshard
from zeroshard import Policy

Listed = Callable[[nn.Module], Iterable[Any]]
LISTS: dict[str, Listed] = {
    "named": lambda module: module.named_parameters(),
    "otherwise named": lambda module: [(f"model.{name}", one) for name, one in module.named_parameters()],
    "unnamed": lambda module: module.parameters(),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Train, in a loop that drops gradients before a backward and not after the step."""
    for number in range(2):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + number)).square().sum().backward()
        optimizer.step()
    return whole(model)


def names_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group.get("param_names") for group in optimizer.param_groups]


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["named", "unnamed"])
def test_a_group_is_added(kind: str, stage: int) -> None:
    def run(shards: bool) -> dict[str, Tensor]:
        model = make()
        optimizer = torch.optim.AdamW(LISTS[kind](model[0]), 0.1)
        model[1].requires_grad_(False)
        if shards:
            zeroshard.shard(model, optimizer, Policy.stage(stage))
        steps(model, optimizer)
        model[1].requires_grad_(True)
        optimizer.add_param_group({"params": LISTS[kind](model[1]), "lr": 0.05})
        if kind == "named":
            assert names_of(optimizer) == [["weight", "bias"], ["weight", "bias"]]
        return steps(model, optimizer)

    assert same(run(True), run(False))


@pytest.mark.parametrize("there", LISTS)
@pytest.mark.parametrize("here", LISTS)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("by", ["optimizer", "shards", "checkpoint", "dcp"])
def test_states_load_whatever_the_names(by: str, stage: int, here: str, there: str, tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(LISTS[there](model), 0.1)
    saved: Any = None
    if by != "optimizer":
        saved = zeroshard.shard(model, optimizer, Policy.stage(stage))
    steps(model, optimizer)
    optimizer.zero_grad()
    values = whole(model)
    state = copy.deepcopy(optimizer.state_dict()) if by in ("optimizer", "shards") else {}
    if by == "checkpoint":
        saved.save(tmp_path, "one")
    elif by == "dcp":
        dcp.save({"all": zeroshard.DistributedState(saved)}, checkpoint_id=tmp_path, no_dist=True)
    expected = steps(model, optimizer)

    model = make()
    model.load_state_dict(values)
    optimizer = torch.optim.AdamW(LISTS[here](model), 0.1)
    names = names_of(optimizer)
    sharded = zeroshard.shard(model, optimizer, Policy.stage(stage))
    if by in ("optimizer", "shards"):
        optimizer.load_state_dict(state)
    elif by == "checkpoint":
        sharded.load(tmp_path, "one")
    else:
        dcp.load({"all": zeroshard.DistributedState(sharded)}, checkpoint_id=tmp_path, no_dist=True)
    assert names_of(optimizer) == names, "those of this optimizer"
    assert same(steps(model, optimizer), expected)


def test_groups_of_equal_options_are_merged(tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module, groups: int) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        return torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:]}] if groups == 2 else named, 0.1)

    for there, here in ((2, 1), (1, 2)):
        model = make()
        first = optimizer_of(model, there)
        zeroshard.shard(model, first, 2).save(tmp_path / str(there), "one")
        model = make()
        second = optimizer_of(model, here)
        names = names_of(second)
        zeroshard.shard(model, second, 2).load(tmp_path / str(there), "one")
        assert names_of(second) == names
        plain = make()
        assert same(steps(model, second), steps(plain, torch.optim.AdamW(plain.parameters(), 0.1)))


def test_only_some_of_several_optimizers_have_names() -> None:
    found = []
    for kind in ("named", "unnamed"):
        model = make()
        one, other = torch.optim.AdamW(LISTS[kind](model[0]), 0.1), torch.optim.SGD(model[1].parameters(), 0.1)
        found.append(steps(model, zeroshard.shard(model, [one, other], 2).optimizer))
        assert (names_of(one), names_of(other)) == ([["weight", "bias"] if kind == "named" else None], [None])
    assert same(*found)


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon"])
def test_a_configs_optimizer_of_named_parameters(name: str) -> None:
    def run(kind: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Stack()
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": {"lr": 0.1}}}
        engine, *_ = zeroshard.initialize(model=model, model_parameters=LISTS[kind](model), config=config)
        engine_steps(engine, 0, range(2))
        return whole(model)

    assert same(run("named"), run("unnamed"))
