"""The promise: a write to parameters takes effect, on master weights and on all ranks, or is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from insides import counted_looks, units
from models import Stack, sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twin import FEW_STAGES, Setting, as_set, build, same, same_on_all_ranks, step, whole

import zeroshard
from zeroshard import Place, Policy, UsageError


def in_bf16() -> Stack:
    return Stack().bfloat16()


def clamp(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.05, 0.05)


def load(model: nn.Module, rank: int) -> None:
    model.load_state_dict({name: torch.full(value.shape, 0.03) for name, value in model.state_dict().items()})


def new_data(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter.data, 0.03)


def through_data(model: nn.Module, rank: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def on_one_rank(model: nn.Module, rank: int) -> None:
    if rank == 1:
        model.head.weight.fill_(0.03)


WRITES = {f.__name__: f for f in (clamp, load, new_data, through_data, on_one_rank)}


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect_or_is_refused_by_name(rank: int, stage: int, write: str, dtype: str) -> None:
    """Parameters, master weights and all ranks: what was written is what the next step begins with."""
    model, sharded = build(
        stage, precision=torch.bfloat16 if dtype == "bf16" else None, make_optimizer=partial(sgd, lr=1e-6)
    )
    step(model, sharded, rank, 0)
    before = whole(model)
    if stage == 3 and write == "on_one_rank":
        return  # one rank's error, and the others train on: see the errors of ranks that differ
    try:
        with torch.no_grad():
            WRITES[write](model, rank)
    except UsageError as error:
        assert stage == 3 and "unsharded" in str(error) and write != "load"
        assert same(whole(model), before)
        return
    assert stage < 3 or write in ("load", "on_one_rank")
    written = whole(model) if write != "on_one_rank" else None
    step(model, sharded, rank, 1)
    after = whole(model)
    assert same_on_all_ranks(after)
    for fqn, value in after.items() if written is not None else ():
        assert not torch.equal(value, before[fqn]) or value.numel() <= 1 or bool((before[fqn] == value).all())
        torch.testing.assert_close(value, written[fqn], rtol=1e-2, atol=1e-4)
        master = sharded.states.get(fqn)
        assert master is not None
        torch.testing.assert_close(master, written[fqn].float(), rtol=1e-2, atol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", range(3))
def test_a_write_through_data_that_was_read_long_ago_takes_effect(rank: int, stage: int, offloaded: bool) -> None:
    """Whoever keeps `.data` may write to it in any later step; the bits are those of a write that the version counter shows."""
    results = []
    for keeps in (False, True):
        policy = Policy.stage(stage)
        if offloaded and stage:
            policy = policy.offloaded(optimizer=Place.CPU)
        model, sharded = build(policy, precision=torch.bfloat16)
        kept = [parameter.data for parameter in model.parameters()] if keeps else []
        for number in range(4):
            step(model, sharded, rank, number)
            if number > 1:
                with torch.no_grad():
                    for value in kept or model.parameters():
                        value.mul_(0.5)
        results.append(whole(model))
        sharded.remove()
    assert same(results[0], results[1])


class Comparisons(TorchDispatchMode):
    """Counts comparisons of whole tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.equal.default
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2)
def test_a_step_compares_values_only_where_data_was_read(rank: int) -> None:
    model, sharded = build(2, precision=torch.bfloat16)
    with Comparisons() as comparisons:
        step(model, sharded, rank, 0)
        step(model, sharded, rank, 1)
    assert comparisons.count == 0
    assert model.head.weight.data.numel()
    with comparisons:
        step(model, sharded, rank, 2)
    assert comparisons.count > 0


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_write_of_one_rank_to_16_bits_leaves_ranks_equal(rank: int, stage: int) -> None:
    """The owner's value counts, in master weights too: their digits decide about the steps that follow."""
    for by_data in (False, True):
        model, sharded = build(stage, make_model=in_bf16, make_optimizer=partial(torch.optim.AdamW, lr=0.001))
        weight = model.head.weight
        for number in range(20):
            if number == 3 and stage < 3 and rank == 0:
                if by_data:
                    weight.data.fill_(0.5)
                else:
                    with torch.no_grad():
                        weight.fill_(0.5)
            step(model, sharded, rank, number)
        assert same_on_all_ranks(whole(model))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("stage", "shards", "times"), [(0, 2, 2), (1, 1, 1), (2, 1, 1)])
def test_hidden_writes_are_looked_for_once_a_step(rank: int, stage: int, shards: int, times: int) -> None:
    """By comparing a bucket's shards with master weights, from the first read of `.data` on. Stage 0 has all shards."""
    model, sharded = build(stage, make_model=in_bf16, make_optimizer=partial(torch.optim.AdamW, lr=0.001))
    counts = []
    with counted_looks() as looks:
        for number in range(3):
            step(model, sharded, rank, number, clip=lambda: sharded.clip_grad_norm_(1.0))
            counts.append(len(looks))
            looks.clear()
            model.head.weight.data  # noqa: B018
    buckets = sum(len(unit.buckets) for unit in units(sharded))
    assert counts == [0, times * shards * buckets, times * shards * buckets]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
@FEW_STAGES
def test_of_different_writes_each_element_has_its_owners(rank: int, stage: int, precision: torch.dtype | None) -> None:
    """The first half of a bucket is rank 0's, and the second half rank 1's."""
    model, sharded = build(
        stage,
        precision=precision,
        make_model=lambda: nn.Linear(64, 8, bias=False),
        make_optimizer=partial(sgd, lr=0.0),
    )
    if stage == 3:
        with zeroshard.unsharded(model, modifier_rank=1), torch.no_grad():
            model.weight.fill_(rank)
        assert whole(model)["weight"].eq(1).all()
        return
    with torch.no_grad():
        model.weight.fill_(rank)
    model(torch.ones(1, 64, dtype=precision)).sum().backward()
    sharded.optimizer.step()
    owners = torch.tensor([0.0] * 128 + [1.0] * 128).repeat(2)  # of two buckets of 256 elements
    for value in (whole(model)["weight"].float(), sharded.states.get("weight")):
        assert value is not None and torch.equal(value.flatten(), owners)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_write_of_one_rank_to_values_in_cpu_memory_reaches_all(rank: int, stage: int) -> None:
    """They are there again, and not in the accelerator's memory, when the step gives all ranks the owners' values."""
    policy = Policy.stage(stage).offloaded(parameters=Place.CPU)
    with as_set(Setting(policy, apart=True)):
        model, sharded = build(policy, make_optimizer=partial(sgd, lr=0.0))
        weight = model.blocks[1].up.weight
        if rank == 0:
            with torch.no_grad():
                weight.fill_(3.0)
        step(model, sharded, rank, 0)
        assert same_on_all_ranks(whole(model)) and weight.eq(3.0).any()


@pytest.mark.ranks(2)
def test_data_of_one_rank_stays_there_in_fp32_at_stage_0(rank: int) -> None:
    """As under DDP: the version counter shows no write, and no master weights show another value."""
    model, sharded = build(0, make_optimizer=partial(sgd, lr=0.0))
    if rank == 1:
        model.head.weight.data.fill_(0.5)
    step(model, sharded, rank, 0)
    assert model.head.weight.eq(0.5).all() == (rank == 1)


class Doubling(nn.Linear):
    """A layer that writes to its weight through `.data`."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(2)
        return super().forward(x)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_write_through_data_inside_a_forward_is_lost_at_stage_3_alone(rank: int, stage: int) -> None:
    model, _ = build(
        stage,
        precision=torch.bfloat16,
        make_model=lambda: nn.Sequential(Doubling(8, 8), nn.Linear(8, 8)),
    )
    before = whole(model)["0.weight"]
    with torch.no_grad():
        model(torch.ones(1, 8, dtype=torch.bfloat16))
    assert torch.equal(whole(model)["0.weight"], before if stage == 3 else 2 * before)
