"""Half precision: the loss scale follows DeepSpeed's, all ranks agree on an overflow, and all stages give the same bits."""

from __future__ import annotations

import json
import math
from typing import Any

import folders
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Stack, tokens
from ranks import on_ranks
from torch import nn

import zeroshard
from zeroshard import DynamicLossScaler, LossScaleError, Precision, StaticLossScaler, UsageError

RECORDED = np.load(folders.RECORDED / "scalers.npz")
"""By tests/support/recorded/record.py, from DeepSpeed 0.19.8's DynamicLossScaler; -1 is its exception at the smallest scale."""
GRID: list[dict[str, Any]] = json.loads(str(RECORDED["grid"]))
FP16 = Precision(torch.float16)


def walk(scaler: DynamicLossScaler, overflows: list[bool]) -> list[float]:
    path = []
    for overflow in overflows:
        try:
            scaler.update(overflow)
        except LossScaleError:
            return [*path, -1.0]
        path.append(scaler.scale)
    return path


@pytest.mark.parametrize("pattern", range(5))
@pytest.mark.parametrize("number", range(len(GRID)))
def test_the_scale_walks_deepspeeds_path(number: int, pattern: int) -> None:
    options = GRID[number]
    scaler = DynamicLossScaler(
        options["init_scale"], options["scale_window"], options["delayed_shift"], options["consecutive_hysteresis"],
        options["min_scale"],
    )  # fmt: skip
    overflows = RECORDED[f"{number}.{pattern}.overflows"].tolist()
    assert walk(scaler, overflows) == RECORDED[f"{number}.{pattern}.scales"].tolist()


def replay(
    history: list[bool], scale: float, window: int, hysteresis: int, consecutive: bool, lowest: float
) -> list[float]:
    """The rule, told from the history: clean steps since the last overflow, and overflows since the last refill."""
    path, borne, clean = [], 0, 0
    for overflow in history:
        clean = 0 if overflow else clean + 1
        if overflow:
            borne += 1
            if borne >= hysteresis:
                borne = hysteresis - 1  # the last one is used up at each further overflow
                if scale == lowest:
                    return [*path, -1.0]
                scale = max(scale / 2, lowest)
        else:
            doubled = clean > 1 and (clean - 1) % window == 0
            if doubled:
                scale *= 2
            if doubled or consecutive:
                borne = 0
        path.append(scale)
    return path


HISTORIES = given(
    history=st.lists(st.booleans(), max_size=60) | st.lists(st.sampled_from([False] * 9 + [True]), max_size=60),
    power=st.integers(0, 6), window=st.integers(1, 8), hysteresis=st.integers(1, 4), consecutive=st.booleans(),
    lowest=st.sampled_from([0.25, 1.0, 4.0]),
)  # fmt: skip


def follow_the_rule(
    history: list[bool], power: int, window: int, hysteresis: int, consecutive: bool, lowest: float
) -> None:
    start = max(2.0**power, lowest)
    scaler = DynamicLossScaler(start, window, hysteresis, consecutive, lowest)
    assert walk(scaler, history) == replay(history, start, window, hysteresis, consecutive, lowest)


def test_the_scale_follows_the_rule() -> None:
    settings(max_examples=300, deadline=None)(HISTORIES(follow_the_rule))()


@pytest.mark.full
def test_the_scale_follows_the_rule_through_10_000_histories() -> None:
    settings(max_examples=10_000, deadline=None)(HISTORIES(follow_the_rule))()


def test_a_scaler_goes_on_where_its_state_was_taken() -> None:
    first = DynamicLossScaler(2.0**10, 3, 2)
    walk(first, [False, True, False, True, False])
    second = DynamicLossScaler()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [False, False, False, False, True, True]
    assert walk(second, rest) == walk(first, rest)
    assert StaticLossScaler(8.0).state_dict() == {"scale": 8.0}


def config(stage: int, **fp16: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, **fp16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage},
    }


def test_overflows_are_skipped_alike_at_every_stage() -> None:
    """The scale begins far too high, and one rank's loss is infinite later: every rank skips, and says so."""

    def body(rank: int) -> list[dict[str, Any]]:
        outcomes = []
        for stage in range(4):
            torch.manual_seed(0)
            model = Stack()
            engine, *_ = zeroshard.initialize(
                model=model, config=config(stage, initial_scale_power=26, loss_scale_window=3)
            )
            told: list[Any] = []
            for number in range(14):
                before, scale = engine.get_lr(), engine.loss_scaler.scale
                loss = engine(*tokens(rank, number))
                engine.backward(loss * math.inf if number == 10 and rank == 0 else loss)
                report = engine.step()
                assert report.applied is engine.was_step_applied()
                assert report.loss_scale == scale
                if not report.applied:
                    assert report.not_finite
                    assert "not finite" in str(report.reason)
                    assert engine.get_lr() == before
                    assert not math.isfinite(report.grad_norm or 0.0)
                    assert engine.get_global_grad_norm() == math.inf, "NaN or not"
                told.append([report.applied, list(report.not_finite), str(report.grad_norm), engine.loss_scaler.scale])
            assert engine.global_steps == 14
            assert engine.skipped_steps == sum(not applied for applied, *_ in told)
            assert not told[10][0]
            with zeroshard.unsharded(model):
                values = torch.cat([p.detach().flatten() for p in model.parameters()])
            assert torch.isfinite(values).all()
            outcomes.append({"told": told, "values": values})
            engine.destroy()
        return outcomes

    for outcomes in zip(*on_ranks(body, 2), strict=True):
        assert outcomes[0]["told"] == outcomes[1]["told"]
    first, *others = on_ranks(body, 2)[0]
    assert 2 <= sum(not applied for applied, *_ in first["told"]) < 12
    for other in others:
        assert other["told"] == first["told"]
        assert torch.equal(other["values"], first["values"])


def test_gradients_are_unscaled_with_the_scale_that_they_were_made_with() -> None:
    """Steps on which the scale doubles included: a run with a moving scale goes where one with a fixed scale goes."""

    def run(**fp16: Any) -> tuple[torch.Tensor, set[float]]:
        torch.manual_seed(0)
        model = Stack()
        engine, *_ = zeroshard.initialize(model=model, config={**config(2, **fp16), "gradient_clipping": 0})
        scales = set()
        for number in range(12):
            scales.add(engine.loss_scaler.scale)
            engine.backward(engine(*tokens(0, number)))
            assert engine.step().applied
        return torch.cat([p.detach().float().flatten() for p in model.parameters()]), scales

    moving, scales = run(initial_scale_power=9, loss_scale_window=2)
    fixed, _ = run(loss_scale=512)
    assert len(scales) > 3
    torch.testing.assert_close(moving, fixed, rtol=2e-3, atol=2e-4)


def test_gradients_that_carry_the_scale_are_not_clipped_by_torch() -> None:
    model = Stack()
    engine, *_ = zeroshard.initialize(model=model, config=config(2, initial_scale_power=4))
    engine.backward(engine(*tokens(0, 0)))
    with pytest.raises(zeroshard.UsageError, match=r"carries the loss scale.*gradient_clipping"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    engine.step()


def test_an_overflow_at_the_smallest_scale_is_an_error() -> None:
    engine, *_ = zeroshard.initialize(
        model=Stack(), config=config(1, initial_scale_power=1, hysteresis=1, min_loss_scale=2)
    )
    engine.backward(engine(*tokens(0, 0)) * math.inf)
    with pytest.raises(LossScaleError, match="smallest loss scale allowed"):
        engine.step()


@pytest.mark.parametrize("check", [True, False])
def test_bf16_goes_on_only_where_told_to(check: bool) -> None:
    settings = {**config(1), "fp16": {"enabled": False}, "bf16": {"enabled": True, "check_grad_overflow": check}}
    engine, *_ = zeroshard.initialize(model=Stack(), config=settings)
    engine.backward(engine(*tokens(0, 0)) * math.inf)
    report = engine.step()
    assert report.applied is not check
    assert report.not_finite
    assert engine.skipped_steps == check
    assert engine.optimizer.overflow is check, "a step that was taken was not skipped"
    assert not math.isfinite(engine.get_global_grad_norm())


def test_inputs_are_cast_where_asked() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    engine, *_ = zeroshard.initialize(model=model, config=config(2, auto_cast=True))
    assert engine(torch.ones(2, 4)).dtype is torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_keeps_fp32_parameters(dtype: str) -> None:
    settings = {**config(2), "fp16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": dtype}}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    engine, *_ = zeroshard.initialize(model=model, config=settings)
    output = engine(torch.ones(2, 4))
    assert output.dtype is getattr(torch, dtype)
    assert model[0].weight.dtype is torch.float32
    engine.backward(output.float().mean())
    assert engine.step().loss_scale == (1.0 if dtype == "bfloat16" else 2.0**16)


def test_the_removed_underflow_report_names_the_remedy() -> None:
    engine, *_ = zeroshard.initialize(model=torch.nn.Linear(2, 1), config=config(1))
    with pytest.raises(UsageError, match=r"was removed.*raise initial_scale_power, or train in bf16"):
        engine.underflow_report()
