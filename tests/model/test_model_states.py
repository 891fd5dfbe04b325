"""Model states by name and by parameter: whole and local values, read and set, equal those of plain training at every stage."""

from __future__ import annotations

import copy
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import MODELS, OPTIMIZERS, Stack, sgd, tokens
from oracles import average_gradients
from test_sharded_init import born_stack
from torch import nn
from twin import build, plain_torch, step

import zeroshard
from zeroshard import UsageError
from zeroshard.core.model_states import Range
from zeroshard.model.born import BornSharded


def _train(rank: int, stage: int, name: str = "tied"):
    """After one step, with the second step's gradients."""
    model, sharded = build(stage, make_model=MODELS[name], make_optimizer=OPTIMIZERS["AdamW"])
    step(model, sharded, rank, 0)
    model(*tokens(rank, 1)).backward()
    return model, sharded


def _plain(world_size: int, name: str = "tied"):
    """One process that sees all ranks' batches: after one step, with the second step's gradients."""
    model, optimizer = plain_torch(OPTIMIZERS["AdamW"], MODELS[name])

    def backward(number: int) -> None:
        average_gradients([*model.parameters()], world_size, lambda rank: model(*tokens(rank, number)).backward())

    backward(0)
    optimizer.step()
    optimizer.zero_grad()
    backward(1)
    return model, optimizer


@pytest.mark.ranks("world_size")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_whole_of_each_state_is_a_plain_trainings(rank: int, stage: int, world_size: int) -> None:
    plain, optimizer = _plain(world_size, "frozen")
    _, sharded = _train(rank, stage, name="frozen")
    states = sharded.states
    for fqn, p in plain.named_parameters():
        assert torch.equal(states.get(fqn), p.detach()), fqn
        gradient = states.get(fqn, "gradients")
        assert (gradient is None) == (p.grad is None), fqn
        if p.grad is not None:
            torch.testing.assert_close(gradient, p.grad, rtol=0, atol=0)
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(states.get(fqn, name), optimizer.state[p][name]), (fqn, name)
            if p.numel():
                assert states.get(fqn, "step") == optimizer.state[p]["step"]
            assert p.numel() == 0 or states.get(fqn, "momentum_buffer") is None


@pytest.mark.ranks(2)
def test_local_ranges_cover_each_parameter_once(rank: int) -> None:
    model, sharded = _train(rank, 3)
    shapes = {fqn: p.numel() for fqn, p in model.named_parameters()}
    mine = torch.tensor([sum(r.tensor.numel() for r in sharded.states.local(fqn)) for fqn in shapes])
    total = mine.clone()
    dist.all_reduce(total)
    assert total.tolist() == list(shapes.values())
    assert abs(2 * mine.sum() - total.sum()) <= 64


@pytest.mark.ranks(2)
def test_errors_name_what_is_wrong(rank: int) -> None:
    _, sharded = _train(rank, 2, name="frozen")
    states = sharded.states
    with pytest.raises(UsageError, match=r"no parameter 'heed\.weight'"):
        states.get("heed.weight")
    with pytest.raises(UsageError, match=r"shape \(31, 12\), not \(3,\)"):
        states.set("head.weight", "parameters", torch.zeros(3))
    with pytest.raises(UsageError, match="holds no range"):
        states.set_local("head.weight", "parameters", [Range(1, torch.zeros(5))])
    assert states.names("head.weight") == ["parameters", "gradients", "step", "exp_avg", "exp_avg_sq"]
    assert states.names("blocks.1.up.weight") == ["parameters"]
    for name in ("blocks.0.empty", "head.weight"):
        assert states.get(name, "no such state") is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_state_is_set_after_other_ranks_have_read_what_was_there(rank: int, is_trained: bool) -> None:
    """Ranks of one host read each other's shards in place."""
    name = "blocks.2.up.weight"

    def made() -> Stack:
        model = Stack()
        model.get_parameter(name).requires_grad_(is_trained)
        return model

    losses = []
    for is_late in (False, True):
        model, sharded = build(3, make_model=made)
        value = sharded.states.get(name)
        with torch.no_grad():
            model(*tokens(rank, 0))  # the next forward knows the order, and offers a shard one block ahead
        if is_late and rank == 1:
            model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.5))
        with torch.no_grad():
            losses.append(model(*tokens(rank, 0)))
        sharded.states.set(name, "parameters", value * 2.0)
        sharded.remove()
    assert torch.equal(*losses)


# ---------------------------------------------------------------------- of a parameter


def filled(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Without parameters of no elements."""
    return [(fqn, parameter) for fqn, parameter in model.named_parameters() if parameter.numel()]


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_states_are_set_and_read_by_name_and_by_parameter(
    rank: int, stage: int, dtype: torch.dtype | None, ranks: int
) -> None:
    model, sharded = build(stage, precision=dtype)
    model(*tokens(rank, 0)).backward()
    for fqn, parameter in filled(model):
        states = zeroshard.parameter_states(parameter)
        assert (states.fqn, states.is_trained, states.is_sharded) == (fqn, True, stage == 3)
        for name in ("parameters", "gradients"):
            assert torch.equal(states.get(name), sharded.states.get(fqn, name))
        new = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        sharded.states.set(fqn, "gradients", new)
        assert torch.equal(states.get("gradients"), new.to(states.get("gradients").dtype))
        assert states.get("exp_avg") is None
        with pytest.raises(UsageError, match="has no state 'exp_avg' to set"):
            states.set(torch.zeros(parameter.shape), "exp_avg")
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    for fqn, parameter in filled(model):
        states = zeroshard.parameter_states(parameter)
        for name in ("parameters", "exp_avg"):
            assert name in states.names() or not states.local()
            new = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            states.set(new, name)
            assert torch.equal(sharded.states.get(fqn, name), new)
            states.set_flat(states.flat(name) * 2, name)
            assert torch.equal(states.get(name), new * 2)
            mine = [Range(part.start, part.tensor * 2) for part in sharded.states.local(fqn, name)]
            sharded.states.set_local(fqn, name, mine)
            assert torch.equal(states.get(name), new * 4)
        with pytest.raises(UsageError, match="holds"):
            states.set_flat(torch.zeros(parameter.numel() + 1))
    with zeroshard.unsharded(model):
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            assert zeroshard.parameter_states(parameter).is_here
            assert torch.equal(parameter, sharded.states.get(fqn).to(parameter.dtype))
    numbers = [zeroshard.parameter_states(parameter).number for parameter in model.parameters()]
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, numbers)
    assert len({*numbers}) == len(numbers) and all(one == numbers for one in everyones)
    step(model, sharded, rank, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_this_ranks_part_of_a_gradient_is_set_before_any_rank_has_read_one(
    rank: int, stage: int, dtype: torch.dtype | None
) -> None:
    """The reductions may still run: they must not overwrite it, and their memory may be missing on this rank."""
    for fqn in ("head.weight", "blocks.0.up.weight"):
        model, sharded = build(stage, precision=dtype)
        parameter = model.get_parameter(fqn)
        states = zeroshard.parameter_states(parameter)
        new = torch.full_like(states.flat(), 7.0)
        with pytest.raises(UsageError, match=r"has no gradient to set: .*last backward"):
            states.set_flat(new, "gradients")
        model(*tokens(rank, 0)).backward()
        states.set_flat(new, "gradients")
        assert torch.equal(states.get("gradients").float(), torch.full(parameter.shape, 7.0))
        sharded.optimizer.step()
        assert torch.equal(states.get("exp_avg"), torch.full(parameter.shape, 7.0) * (1 - 0.9))


def test_of_a_parameter_that_no_model_holds() -> None:
    model, sharded = build(3)
    other = Stack()
    for parameter in (nn.Parameter(torch.ones(3)), other.blocks[0].up.weight, copy.deepcopy(model).blocks[0].up.weight):
        with pytest.raises(UsageError, match="is not in any sharded model"):
            zeroshard.parameter_states(parameter)
    sharded.remove()
    with pytest.raises(UsageError, match="is not in any sharded model"):
        zeroshard.parameter_states(model.blocks[0].up.weight)


@pytest.mark.ranks(2)
def test_of_a_frozen_one_and_of_one_born_sharded(rank: int) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = born_stack()
    for (_, mine), (_, expected) in zip(filled(model), filled(plain), strict=True):
        states = zeroshard.parameter_states(mine)
        assert (states.fqn, states.is_trained, states.is_sharded, states.is_here) == ("", False, True, False)
        assert torch.equal(states.get(), expected.detach())
        assert states.get("exp_avg") is None
        states.set(expected.detach() + 1)
        states.set_local([Range(part.start, part.tensor + 1) for part in states.local()])
        assert torch.equal(states.get(), expected.detach() + 1 + 1)
        assert isinstance(mine, BornSharded)
    model.blocks[0].requires_grad_(False)
    _, sharded = build(3, make_model=lambda: model, make_optimizer=sgd)
    states = zeroshard.parameter_states(model.blocks[0].up.weight)
    assert not states.is_trained and states.get("gradients") is None
    value = plain.blocks[0].up.weight.detach() + 1 + 1
    assert torch.equal(states.get(), value)
    del sharded
    gc.collect()
    assert torch.equal(states.get(), value)  # the model keeps what it needs


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_states_inside_a_block_whose_changes_are_undecided_are_refused(
    rank: int, stage: int, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """They would be of one rank only."""
    model, sharded = build(stage, precision=dtype)
    weight = model.blocks[0].up.weight
    before = sharded.states.get("blocks.0.up.weight")
    sharded.save(tmp_path / "checkpoints", "first")
    with (
        pytest.raises(UsageError, match="without a modifier rank"),
        zeroshard.unsharded(model),
        torch.no_grad(),
    ):
        assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)
        weight.mul_(2)
        if stage == 3:
            assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)
        weight.div_(2)
    with zeroshard.unsharded(model, modifier_rank=0):
        for call in (
            lambda: sharded.states, zeroshard.parameter_states(weight).get,
            lambda: sharded.save(tmp_path / "checkpoints", "one"), lambda: sharded.export(tmp_path / "export"),
            lambda: sharded.load(tmp_path / "checkpoints"),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=r"inside unsharded\(modifier_rank=...\), where changes"):
                call()
    assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)
