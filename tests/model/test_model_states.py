"""Model states by name: whole and local values, read and set, equal those of plain training at every stage."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from models import MODELS, OPTIMIZERS, Stack, tokens
from oracles import average_gradients
from twin import build, step

import zeroshard
from zeroshard import Precision, UsageError
from zeroshard.core.model_states import Range


def _train(rank: int, stage: int, precision: Precision | None = None, name: str = "tied"):
    """After one step, with the second step's gradients."""
    model, sharded = build(stage, precision=precision, make_model=MODELS[name], make_optimizer=OPTIMIZERS["AdamW"])
    step(model, sharded, rank, 0)
    model(*tokens(rank, 1)).backward()
    return model, sharded


def _plain(world_size: int, name: str = "tied"):
    """One process that sees all ranks' batches: after one step, with the second step's gradients."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

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
@pytest.mark.parametrize("precision", [Precision(), Precision(param_dtype=torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_set_is_what_everybody_has(rank: int, stage: int, precision: Precision) -> None:
    model, sharded = _train(rank, stage, precision=precision)
    states = sharded.states
    value = torch.randn(model.head.weight.shape, generator=torch.Generator().manual_seed(3))
    for state in ("parameters", "exp_avg", "gradients"):
        states.set("head.weight", state, value)
        got = states.get("head.weight", state)
        expected = value if state != "gradients" or precision.param_dtype is None else value.to(got.dtype)
        assert torch.equal(got, expected), state
    with zeroshard.unsharded(model):
        shown = precision.param_dtype or torch.float32
        assert torch.equal(model.embedding.weight.detach(), value.to(shown))  # tied: the same parameter
    # A range of this rank's own, by what local() said.
    ranges = sharded.states.local("blocks.1.up.weight", "exp_avg_sq")
    states.set_local("blocks.1.up.weight", "exp_avg_sq", [Range(r.start, r.tensor * 0 + 7) for r in ranges])
    assert torch.equal(states.get("blocks.1.up.weight", "exp_avg_sq"), torch.full((33, 12), 7.0))
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    model(*tokens(rank, 9)).backward()


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
