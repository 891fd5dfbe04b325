"""The promise: after a backward that raised, no step takes its gradients, and nothing else has changed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import sgd, tokens
from torch import Tensor, nn
from twin import FEW_STAGES, abort, build, build_engine, engine_steps, everything, same, step, steps, whole

from zeroshard import StorageError, UsageError
from zeroshard.core.gradient_bucket import GradientBucket


def broken(model: nn.Module, rank: int, number: int) -> None:
    """A backward that raises in its middle."""
    abort(model(*tokens(rank, number)), model.blocks[1].norm.weight)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@FEW_STAGES
@pytest.mark.parametrize("after", ["step", "norm", "forward and step", "backward"])
def test_after_a_backward_that_aborted_the_step_says_so(rank: int, stage: int, after: str) -> None:
    def run(disturbed: bool) -> dict[str, Tensor]:
        model, sharded = build(stage, make_optimizer=sgd)
        step(model, sharded, rank, 0)
        if disturbed:
            with sharded.accumulate():
                model(*tokens(rank, 20)).backward()
            broken(model, rank, 21)
            with pytest.raises(UsageError, match=r"was aborted.*zero_grad"):
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

    assert same(run(False), run(True))


@pytest.mark.ranks(2)
def test_a_backward_that_fails_at_its_end_aborted(rank: int) -> None:
    """A reduction of an earlier microbatch may fail when the gradients of a later one are taken."""

    def make_model() -> nn.Module:
        model = nn.Linear(8, 1)
        model.unused = nn.Parameter(torch.ones(3))  # so that gradients wait for the end of the backward
        return model

    def run(disturbed: bool) -> dict[str, Tensor]:
        model, sharded = build(2, make_model=make_model, make_optimizer=partial(sgd, lr=1.0))

        def microbatch(number: int) -> None:
            with sharded.accumulate():
                model(torch.full((4, 8), float(number))).sum().backward()

        if disturbed:
            microbatch(1)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(GradientBucket, "finish_reduction", no_room)
                with pytest.raises(StorageError, match="no room"):
                    microbatch(2)
            for call in (lambda: microbatch(3), sharded.optimizer.step):
                with pytest.raises(UsageError, match=r"was aborted.*zero_grad"):
                    call()
            sharded.optimizer.zero_grad()
        for number in (1, 2, 3):
            microbatch(number)
        sharded.optimizer.step()
        return whole(model)

    def no_room(bucket: GradientBucket) -> None:
        raise StorageError("no room")

    assert same(run(False), run(True))


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@FEW_STAGES
def test_an_engine_begins_its_step_anew_after_a_backward_that_aborted(rank: int, stage: int) -> None:
    def run(disturbed: bool) -> dict[str, Tensor]:
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        engine = build_engine(stage, gradient_accumulation_steps=3, optimizer=optimizer)

        engine_steps(engine, rank, range(3))
        if disturbed:
            engine_steps(engine, rank, [10])
            handle = engine.module.blocks[1].norm.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine_steps(engine, rank, [11])
            handle.remove()
            for goes_on in (engine.step, lambda: engine_steps(engine, rank, [12])):
                with pytest.raises(UsageError, match=r"engine\.zero_grad"):
                    goes_on()
            engine.zero_grad()
        engine_steps(engine, rank, range(3, 6))
        assert engine.global_steps == 2 and engine.micro_steps == 6
        return whole(engine.module)

    assert same(run(False), run(True))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_microbatch_whose_second_loss_aborted_is_not_reduced(rank: int, stage: int) -> None:
    """Below stage 2 the engine's step would reduce the gradients of `no_sync`."""
    engine = build_engine(stage)
    with engine.no_sync():
        engine.backward(engine(*tokens(rank, 0)))
        engine.module.blocks[1].norm.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine(*tokens(rank, 1)))
    with pytest.raises(UsageError, match=r"was aborted.*engine\.zero_grad"):
        engine.step()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_backward_that_aborted_changes_no_parameter_and_no_state(rank: int, stage: int) -> None:
    model, sharded = build(stage, precision=torch.bfloat16)
    steps(model, sharded, rank, range(2))
    before = everything(sharded)
    broken(model, rank, 2)
    with pytest.raises(UsageError, match=r"was aborted.*zero_grad"):
        sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    assert same(everything(sharded), before)
