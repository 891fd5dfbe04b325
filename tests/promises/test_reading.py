"""Readers of a parameter get the current value, or an error."""

from __future__ import annotations

import contextlib
import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack, sgd, tokens
from ranks import on_ranks
from torch import nn
from twin import abort, build, plain_torch, same, same_on_all_ranks, step, whole

import zeroshard

READERS = {
    "attribute": lambda model, held: model.head.weight.detach().clone(),
    "held reference": lambda model, held: held.detach().clone(),
    "state_dict": lambda model, held: model.state_dict()["head.weight"].clone(),
    "norm": lambda model, held: torch.linalg.vector_norm(held.detach()),
    "data": lambda model, held: held.data.clone(),
    "numpy": lambda model, held: torch.from_numpy(held.detach().numpy().copy()),
    "deepcopy": lambda model, held: copy.deepcopy(model).head.weight.detach(),
    "vector": lambda model, held: nn.utils.parameters_to_vector(model.parameters()).detach(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_reader_right_after_the_step_sees_the_new_value(rank: int, stage: int, reader: str) -> None:
    model, sharded = build(stage)
    held = model.head.weight
    for number in range(3):
        step(model, sharded, rank, number)
        seen = READERS[reader](model, held)
        with zeroshard.unsharded(model):
            assert type(held) is nn.Parameter
            assert torch.equal(seen, READERS[reader](model, held))
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_an_alias_shows_what_arrived_last(rank: int, stage: int, transport: str) -> None:
    """Below stage 3 the update, which over gloo a read of a parameter has to wait for; at stage 3 the last gather."""
    model, sharded = build(stage)
    step(model, sharded, rank, 0)
    with zeroshard.unsharded(model):
        alias, before = model.embedding.weight.detach(), whole(model)["embedding.weight"]
    step(model, sharded, rank, 1)
    if stage in (1, 2) and transport == "gloo":
        model.head.weight.sum()
    after = whole(model)["embedding.weight"]
    assert not torch.equal(before, after)
    assert torch.equal(alias, after)


WANTING_VALUES = {
    "norm": lambda weight: weight.norm(),
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "a copy": lambda weight: weight.clone(),
    "numpy": lambda weight: weight.detach().numpy(),
    "arithmetic": lambda weight: 2 * weight,
    "a list": lambda weight: torch.cat([weight, weight]),
    "a write": lambda weight: weight.add_(1),
    "a write to data": lambda weight: weight.data.fill_(1),
    "init": nn.init.normal_,
    "another dtype": lambda weight: weight.to(torch.bfloat16),
    "pickle": lambda weight: torch.save(weight, io.BytesIO()),
}


WANTING_NONE = {
    "new_zeros": lambda weight: weight.new_zeros(2, 3),
    "new_tensor": lambda weight: weight.new_tensor([0.0]),
    "zeros_like": torch.zeros_like,
    "ones_like": lambda weight: torch.ones_like(weight) - 1,
    "type_as": lambda weight: torch.zeros(2, dtype=torch.float64).type_as(weight),
    "type": lambda weight: torch.zeros(2).type(weight.type()),
    "to": lambda weight: torch.zeros(2, dtype=torch.float64).to(weight),
}


def test_operations_that_need_no_values_of_a_sharded_parameter() -> None:
    model, _ = build(3)
    weight = model.blocks[1].up.weight
    for name, make in WANTING_NONE.items():
        made = make(weight)
        assert type(made) is torch.Tensor and made.dtype == weight.dtype, name
        assert made.is_contiguous() and not made.any() and not made.requires_grad, name
    assert torch.zeros_like(weight).shape == weight.shape


@pytest.mark.ranks(2)
def test_whoever_wants_the_values_of_a_sharded_parameter_is_refused_by_name(rank: int) -> None:
    shapes = {fqn: p.shape for fqn, p in Stack().named_parameters()}
    model, sharded = build(3)
    for number in range(2):
        step(model, sharded, rank, number)
        assert {fqn: p.shape for fqn, p in model.named_parameters()} == shapes
        weight = model.blocks[1].up.weight
        assert weight.dtype == torch.float32 and weight.to("cpu") is weight and "not here" in repr(weight)
        with pytest.raises(zeroshard.UsageError, match="before shard"):
            model.half()
        for name, want in WANTING_VALUES.items():
            with torch.no_grad(), pytest.raises(zeroshard.UsageError, match=r"blocks\.1\.up\.weight.*unsharded"):
                want(weight)
                raise AssertionError(name)
        with zeroshard.unsharded(model.blocks[0]):
            assert torch.isfinite(model.blocks[0].up.weight).all()
            with pytest.raises(zeroshard.UsageError, match=r"blocks\.1\.up\.weight"):
                model.blocks[1].up.weight.isnan()
        with pytest.raises(zeroshard.UsageError, match=r"blocks\.0\.up\.weight"):
            model.blocks[0].up.weight.isnan()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_evaluation_between_steps_and_after_an_exception(rank: int, stage: int) -> None:
    """Inference, a forward that breaks off, and a backward that breaks off leave the next step as it would have been."""

    def run(disturbed: bool) -> dict[str, torch.Tensor]:
        model, sharded = build(stage)
        for number in range(3):
            if disturbed:
                with torch.no_grad():
                    model(*tokens(rank, 50))
                handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(*tokens(rank, 51))
                handle.remove()
                abort(model(*tokens(rank, 52)), model.blocks[0].norm.weight)
                for parameter in model.parameters():
                    parameter.grad = None
                sharded.optimizer.zero_grad()
            step(model, sharded, rank, number)
        return whole(model)

    assert same(run(False), run(True))


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_backward_for_inputs_or_for_looking_leaves_no_trace(stage: int) -> None:
    """torch.autograd.grad for inputs and for parameters, a second backward over one graph, and a loss of two forwards."""

    class Floats(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.run(x)).square().mean()

    def body(rank: int) -> None:
        def run(stage: int | None, look: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
            make_optimizer = partial(sgd, momentum=0.0)
            optimizer: Any
            accumulate: Any
            if stage is None:
                (model, optimizer), accumulate = plain_torch(make_optimizer, Floats), contextlib.nullcontext
            else:
                model, sharded = build(stage, make_model=Floats, make_optimizer=make_optimizer)
                optimizer, accumulate = sharded.optimizer, sharded.accumulate
            seen: list[torch.Tensor] = []
            for number in range(3):
                x = torch.randn(
                    2, 5, 12, generator=torch.Generator().manual_seed(10 * number + rank), requires_grad=True
                )
                if look:
                    seen += torch.autograd.grad(model(x), x)
                    seen += torch.autograd.grad(model(x), [model.blocks[1].up.weight])
                (model(x) + model(2 * x)).backward()
                seen.append(x.grad)
                loss = model(x)
                with accumulate():
                    loss.backward(retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with zeroshard.unsharded(model):
                return seen, nn.utils.parameters_to_vector(model.parameters()).detach().clone()

        plain_seen, plain = run(None, True) if dist.get_world_size() == 1 else run(stage, False)
        seen, values = run(stage, True)
        if dist.get_world_size() == 1:
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(seen, plain_seen, strict=True))
        torch.testing.assert_close(values, plain)

    on_ranks(body, 1)
    on_ranks(body, 2)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("modifier", [0, 1])
@pytest.mark.parametrize("stage", range(4))
def test_a_modifier_ranks_changes_are_taken_back(rank: int, stage: int, modifier: int, bf16: bool) -> None:
    """They are every rank's, they last over steps, and what was not changed keeps the digits of its master weights."""

    def run(change: bool) -> dict[str, torch.Tensor]:
        precision = torch.bfloat16 if bf16 else None
        model, sharded = build(stage, precision=precision, make_optimizer=partial(sgd, lr=1e-3, momentum=0.0))
        for number in range(6):
            step(model, sharded, rank, number)
            if change and number == 2:
                with zeroshard.unsharded(model.blocks[1], modifier_rank=modifier), torch.no_grad():
                    model.blocks[1].up.weight.fill_(0.5 if rank == modifier else 7.0)
                    model.blocks[1].up.bias.data[2:].fill_(0.25 if rank == modifier else 7.0)
                with zeroshard.unsharded(model):
                    assert bool((model.blocks[1].up.weight == 0.5).all())
                    assert bool((model.blocks[1].up.bias[2:] == 0.25).all())
        return whole(model)

    plain, changed = run(False), run(True)
    near = changed["blocks.1.up.weight"].float()
    assert bool(((near - 0.5).abs() < 0.05).all())
    assert float((changed["blocks.1.up.bias"][2:].float() - 0.25).abs().max()) < 0.05
    torch.testing.assert_close(changed["blocks.1.down.bias"], plain["blocks.1.down.bias"], atol=2e-2, rtol=2e-2)
    assert same_on_all_ranks(changed)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_change_without_a_modifier_rank_is_an_error(rank: int, stage: int) -> None:
    model, sharded = build(stage)
    step(model, sharded, rank, 0)

    def change() -> None:
        with zeroshard.unsharded(model), torch.no_grad():
            model.blocks[0].up.weight.fill_(3.0)

    with pytest.raises(zeroshard.UsageError, match=r"blocks\.0\.up\.weight.*modifier_rank"):
        change()
    step(model, sharded, rank, 1)
