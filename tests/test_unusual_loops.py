"""Loops that a stranger writes: what plain PyTorch allows gives its result at every stage, or raises by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack, tokens
from torch import Tensor, nn

import zeroshard
from zeroshard import Policy, UsageError
from zeroshard.testing import run_ranks

STAGES = pytest.mark.parametrize("stage", range(4))


def build(stage: int, *, dtype: torch.dtype | None = None, lr: float = 0.1) -> tuple[Stack, Any, zeroshard.Sharded]:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return (
        model,
        optimizer,
        zeroshard.shard(model, optimizer, Policy.stage(stage), precision=zeroshard.Precision(dtype)),
    )


def step(model: nn.Module, sharded: zeroshard.Sharded, rank: int, number: int) -> None:
    model(*tokens(rank, number)).backward()
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, Tensor]:
    with zeroshard.unsharded(model):
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def same_on_all_ranks(values: dict[str, Tensor]) -> bool:
    for value in values.values():
        first = value.clone()
        dist.broadcast(first, src=0)
        if not torch.equal(first, value):
            return False
    return True


# ------------------------------------------------------------------ gradients of the user's own


@STAGES
def test_a_gradient_that_the_user_sets_is_this_ranks_gradient(stage: int) -> None:
    """As PCGrad and MAML do: gradients come from torch.autograd.grad, and are put into `grad`."""

    def body(rank: int) -> None:
        def run(by_hand: bool) -> dict[str, Tensor]:
            model, _, sharded = build(stage)
            for number in range(3):
                loss = model(*tokens(rank, number))
                if by_hand:
                    parameters = list(model.parameters())
                    gradients = torch.autograd.grad(loss, parameters)
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient
                else:
                    loss.backward()
                sharded.clip_grad_norm_(1.0)
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
            return whole(model)

        expected, found = run(False), run(True)
        for fqn, value in expected.items():
            assert torch.equal(found[fqn], value), fqn

    run_ranks(body, 2)


@STAGES
def test_a_gradient_set_after_a_backward_is_refused_by_name(stage: int) -> None:
    def body(rank: int) -> None:
        model, _, sharded = build(stage)
        model(*tokens(rank, 0)).backward()
        model.head.weight.grad = torch.zeros_like(torch.empty(model.head.weight.shape))
        with pytest.raises(UsageError, match=r"embedding\.weight\.grad was set after a backward"):
            sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        step(model, sharded, rank, 1)

    run_ranks(body, 2)


@STAGES
def test_torchs_own_clipping_is_refused_by_name(stage: int) -> None:
    def body(rank: int) -> None:
        model, _, sharded = build(stage)
        for number in range(2):
            assert all(p.grad is None for p in model.parameters())
            model(*tokens(rank, number)).backward()
            clips: list[Callable[[], Any]] = [
                lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
                lambda: [p.grad.norm() for p in model.parameters() if p.grad is not None],
            ]
            for clip in clips:
                with pytest.raises(UsageError, match=r"sharded\.clip_grad_norm_"):
                    clip()
            gradient = model.head.weight.grad
            assert gradient is not None and gradient.shape == model.head.weight.shape
            sharded.clip_grad_norm_(1.0)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        assert all(type(p) is nn.Parameter or stage > 0 for p in model.parameters())

    run_ranks(body, 2)


@STAGES
def test_the_taken_optimizers_own_step_is_refused(stage: int) -> None:
    def body(rank: int) -> None:
        model, optimizer, sharded = build(stage)
        model(*tokens(rank, 0)).backward()
        with pytest.raises(UsageError, match=r"sharded\.optimizer"):
            optimizer.step()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        sharded.remove()
        model(*tokens(rank, 1)).backward()

    run_ranks(body, 2)


# ------------------------------------------------------------------ a backward that breaks off


class Boom(Exception):
    pass


def broken(model: nn.Module, rank: int, number: int) -> None:
    """A backward that raises in its middle."""
    loss = model(*tokens(rank, number))

    def fail(_: Tensor) -> None:
        raise Boom

    handle = model.blocks[1].norm.weight.register_hook(fail)
    with pytest.raises(Boom):
        loss.backward()
    handle.remove()


@STAGES
@pytest.mark.parametrize("after", ["step", "norm", "forward and step", "backward"])
def test_after_a_backward_that_broke_off_the_step_says_so(stage: int, after: str) -> None:
    def body(rank: int) -> None:
        def run(disturbed: bool) -> dict[str, Tensor]:
            model, _, sharded = build(stage)
            step(model, sharded, rank, 0)
            if disturbed:
                with sharded.accumulate():
                    model(*tokens(rank, 20)).backward()
                broken(model, rank, 21)
                with pytest.raises(UsageError, match=r"broke off.*zero_grad"):
                    if after == "norm":
                        sharded.clip_grad_norm_(1.0)
                    elif after == "backward":
                        model(*tokens(rank, 22)).backward()
                    else:
                        if after == "forward and step":
                            model(*tokens(rank, 22))
                        sharded.optimizer.step()
                sharded.optimizer.zero_grad()
            step(model, sharded, rank, 1)
            step(model, sharded, rank, 2)
            return whole(model)

        expected, found = run(False), run(True)
        assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())

    run_ranks(body, 2)


@STAGES
def test_an_engine_begins_its_step_anew_after_a_backward_that_broke_off(stage: int) -> None:
    def body(rank: int) -> None:
        def run(disturbed: bool) -> dict[str, Tensor]:
            torch.manual_seed(0)
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 3,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": stage},
            }
            engine, *_ = zeroshard.initialize(model=Stack(), config=config)

            def microbatch(number: int) -> None:
                engine.backward(engine(*tokens(rank, number)))
                engine.step()

            for number in range(3):
                microbatch(number)
            if disturbed:
                microbatch(10)
                handle = engine.module.blocks[1].norm.weight.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    microbatch(11)
                handle.remove()
                with pytest.raises(UsageError, match=r"engine\.zero_grad"):
                    microbatch(12)
                engine.zero_grad()
            for number in range(3, 6):
                microbatch(number)
            assert engine.global_steps == 2 and engine.micro_steps == 6
            return whole(engine.module)

        expected, found = run(False), run(True)
        assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())

    run_ranks(body, 2)


# ------------------------------------------------------------------ who owns a written value


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


@STAGES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_takes_effect_or_is_refused_by_name(stage: int, write: str, dtype: str) -> None:
    """Parameters, master weights and all ranks: what was written is what the next step begins with."""

    def body(rank: int) -> None:
        model, _, sharded = build(stage, dtype=torch.bfloat16 if dtype == "bf16" else None, lr=1e-6)
        step(model, sharded, rank, 0)
        before = whole(model)
        if stage == 3 and write == "on_one_rank":
            return  # one rank's error, and the others train on: see the errors of ranks that differ
        try:
            with torch.no_grad():
                WRITES[write](model, rank)
        except UsageError as error:
            assert stage == 3 and "unsharded" in str(error) and write != "load"
            assert all(torch.equal(value, before[fqn]) for fqn, value in whole(model).items())
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

    run_ranks(body, 2)


@STAGES
def test_a_conversion_after_sharding_is_refused_by_name(stage: int) -> None:
    def body(rank: int) -> None:
        model, _, sharded = build(stage)
        with pytest.raises(UsageError, match=r"weight|scale|unsharded"):
            model.bfloat16()
            sharded.optimizer.step()

    run_ranks(body, 2)


@STAGES
def test_a_replaced_parameter_is_refused_by_name(stage: int) -> None:
    def body(rank: int) -> None:
        model, _, sharded = build(stage)
        step(model, sharded, rank, 0)
        model.blocks[1].up.weight = nn.Parameter(torch.zeros(33, 12))
        with pytest.raises(UsageError, match=r"blocks\.1\.up\.weight is no longer the tensor"):
            step(model, sharded, rank, 1)

    run_ranks(body, 1)


@STAGES
def test_an_unfrozen_parameter_is_noticed_at_the_next_forward(stage: int) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Stack()
        model.blocks[1].requires_grad_(False)
        sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(stage))
        step(model, sharded, rank, 0)
        model.blocks[1].requires_grad_(True)
        with pytest.raises(UsageError, match=r"blocks\.1\..* was unfrozen.*update_trainable"):
            model(*tokens(rank, 1))
        sharded.update_trainable()
        before = whole(model)
        step(model, sharded, rank, 1)
        assert not torch.equal(whole(model)["blocks.1.up.weight"], before["blocks.1.up.weight"])

    run_ranks(body, 2)


# ------------------------------------------------------------------ copies


def averaged(model: nn.Module, rank: int, folder: Path) -> dict[str, Tensor]:
    return dict(torch.optim.swa_utils.AveragedModel(model).module.named_parameters())


COPIES: dict[str, Callable[[nn.Module, int, Path], dict[str, Tensor]]] = {
    "deepcopy": lambda model, rank, folder: dict(copy.deepcopy(model).named_parameters()),
    "AveragedModel": averaged,
    "state_dict": lambda model, rank, folder: {fqn: value.clone() for fqn, value in model.state_dict().items()},
    "a part's state_dict": lambda model, rank, folder: {
        f"blocks.0.up.{name}": value.clone() for name, value in model.blocks[0].up.state_dict().items()
    },
}


@STAGES
@pytest.mark.parametrize("way", COPIES)
def test_copies_hold_true_values(stage: int, way: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, _, sharded = build(stage)
        step(model, sharded, rank, 0)
        copied = COPIES[way](model, rank, tmp_path)
        expected = whole(model)
        step(model, sharded, rank, 1)
        assert copied
        for fqn, value in copied.items():
            known = expected.get(fqn, expected["embedding.weight"])  # the tied head goes by one name
            assert type(value) in (Tensor, nn.Parameter) and torch.equal(value, known), fqn

    run_ranks(body, 2)


def test_a_copied_model_trains_on_its_own() -> None:
    def body(rank: int) -> None:
        model, _, sharded = build(3)
        step(model, sharded, rank, 0)
        other = copy.deepcopy(model)
        other(*tokens(rank, 1)).backward()
        assert all(p.grad is not None for p in other.parameters())
        step(model, sharded, rank, 1)

    run_ranks(body, 2)


@pytest.mark.parametrize("what", ["model", "parameter"])
def test_pickling_what_is_sharded_names_the_remedy(what: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        model, _, _ = build(3)
        with pytest.raises(UsageError, match=r"unsharded.*export"):
            torch.save(model if what == "model" else model.head.weight, tmp_path / str(rank))

    run_ranks(body, 2)


def test_arrays_made_inside_unsharded_are_allowed() -> None:
    """torch cannot free memory that an array was made of: the unit stays whole then, and trains on."""

    def body(rank: int) -> None:
        def run(look: bool) -> dict[str, Tensor]:
            model, _, sharded = build(3)
            step(model, sharded, rank, 0)
            if look:
                with pytest.warns(UserWarning, match=r"numpy array .* blocks\.0"), zeroshard.unsharded(model):
                    array = model.blocks[0].up.weight.detach().numpy()
                    assert array.shape == (7, 12)
                    del array  # as long as there is one, the memory stays without a word
            for number in range(1, 3):
                step(model, sharded, rank, number)
            return whole(model)

        expected, found = run(False), run(True)
        assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())

    run_ranks(body, 2)
