"""Half precision: the loss scale follows DeepSpeed's, all ranks agree on an overflow, and all stages give the same bits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import folders
import numpy as np
import pytest
import torch
from models import Stack, tokens
from ranks import on_ranks
from torch import Tensor, nn
from twin import build_engine, close, engine_steps, same, whole

import zeroshard
from zeroshard import DynamicLossScaler, LossScaleError, StaticLossScaler, UsageError

RECORDED = np.load(folders.RECORDED / "scalers.npz")
"""By tests/support/recorded/record.py, from DeepSpeed 0.19.8's DynamicLossScaler; -1 is its exception at the smallest scale."""
GRID: list[dict[str, Any]] = json.loads(str(RECORDED["grid"]))


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


def test_a_scaler_goes_on_where_its_state_was_taken() -> None:
    first = DynamicLossScaler(2.0**10, 3, 2)
    walk(first, [False, True, False, True, False])
    second = DynamicLossScaler()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [False, False, False, False, True, True]
    assert walk(second, rest) == walk(first, rest)
    assert StaticLossScaler(8.0).state_dict() == {"scale": 8.0}


def made(stage: int, make_model: Callable[[], nn.Module] = Stack, clips: float = 0.5, **keys: Any) -> zeroshard.Engine:
    """Return an engine in fp16 with these keys of the block."""
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    fp16 = {"enabled": True, **keys}
    return build_engine(stage, make_model=make_model, gradient_clipping=clips, scheduler=warmup, fp16=fp16)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_overflows_are_skipped_alike_at_every_stage() -> None:
    """The scale begins far too high, and one rank's loss is infinite later: every rank skips, and says so."""

    def trained(rank: int, stage: int) -> tuple[list[Any], dict[str, Tensor]]:
        engine = made(stage, initial_scale_power=26, loss_scale_window=3)
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
        values = whole(engine.module)
        engine.destroy()
        return told, values

    mine, theirs = on_ranks(lambda rank: [trained(rank, stage) for stage in range(4)], 2)
    told, values = mine[0]
    assert 2 <= sum(not applied for applied, *_ in told) < 12
    assert all(torch.isfinite(value).all() for value in values.values())
    for other, found in mine + theirs:
        assert other == told
        assert same(found, values)


def test_gradients_are_unscaled_with_the_scale_that_they_were_made_with() -> None:
    """Steps on which the scale doubles included: a run with a moving scale goes where one with a fixed scale goes."""

    def run(**fp16: Any) -> tuple[dict[str, Tensor], set[float]]:
        engine = made(2, clips=0.0, **fp16)
        scales = set()
        for number in range(12):
            scales.add(engine.loss_scaler.scale)
            engine_steps(engine, 0, [number])
            assert engine.was_step_applied()
        return whole(engine.module), scales

    moving, scales = run(initial_scale_power=9, loss_scale_window=2)
    fixed, _ = run(loss_scale=512)
    assert len(scales) > 3
    close(moving, fixed, rtol=2e-3, atol=2e-4)


def test_what_is_refused_in_fp16_names_the_remedy() -> None:
    engine = made(1, initial_scale_power=1, hysteresis=1, min_loss_scale=2)
    engine.backward(engine(*tokens(0, 0)))
    with pytest.raises(UsageError, match=r"carries the loss scale.*gradient_clipping"):
        nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    engine.step()
    engine.backward(engine(*tokens(0, 0)) * math.inf)
    with pytest.raises(LossScaleError, match="smallest loss scale allowed"):
        engine.step()
    with pytest.raises(UsageError, match=r"was removed.*raise initial_scale_power, or train in bf16"):
        engine.underflow_report()


@pytest.mark.parametrize("check", [True, False])
def test_bf16_goes_on_only_where_told_to(check: bool) -> None:
    engine = build_engine(1, bf16={"enabled": True, "check_grad_overflow": check})
    engine.backward(engine(*tokens(0, 0)) * math.inf)
    report = engine.step()
    assert report.applied is not check
    assert report.not_finite
    assert engine.skipped_steps == check
    assert engine.optimizer.overflow is check, "a step that was taken was not skipped"
    assert not math.isfinite(engine.get_global_grad_norm())


def test_inputs_are_cast_where_asked() -> None:
    assert made(2, small, auto_cast=True)(torch.ones(2, 4)).dtype is torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_keeps_fp32_parameters(dtype: str) -> None:
    engine = build_engine(2, make_model=small, torch_autocast={"enabled": True, "dtype": dtype})
    output = engine(torch.ones(2, 4))
    assert output.dtype is getattr(torch, dtype)
    assert engine.module[0].weight.dtype is torch.float32
    engine.backward(output.float().mean())
    assert engine.step().loss_scale == (1.0 if dtype == "bfloat16" else 2.0**16)
