"""Learning rates equal DeepSpeed's at every step. torch's and users' schedules work too, and no rate falls below a floor."""

from __future__ import annotations

import json
from typing import Any

import folders
import numpy as np
import pytest
import torch
from quiet import no_warnings
from torch import nn

from zeroshard import ConfigError
from zeroshard.engine.config.schema import SchedulerBlock
from zeroshard.engine.schedulers import create_scheduler
from zeroshard.optim.lr_schedules import SCHEDULES, Floor, OneCycle

RECORDED = np.load(folders.RECORDED / "schedules.npz")
"""By tests/support/recorded/record.py, from DeepSpeed 0.19.8: for each step the lr and betas of two param groups."""
GRID: list[tuple[str, dict[str, Any]]] = json.loads(str(RECORDED["grid"]))


def two_groups() -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.Adam([{"params": [parameters[0]], "lr": 0.01}, {"params": [parameters[1]], "lr": 0.02}])


def figures(optimizer: torch.optim.Optimizer) -> list[float]:
    return [value for group in optimizer.param_groups for value in (group["lr"], *group["betas"])]


def made(name: str, optimizer: torch.optim.Optimizer | None = None, **params: Any) -> Any:
    return create_scheduler(SchedulerBlock(type=name, params=params), optimizer or two_groups())


@pytest.mark.filterwarnings("ignore:the warm-up")
@pytest.mark.parametrize("number", range(len(GRID)))
def test_rates_and_momenta_are_deepspeeds_and_go_on_where_a_state_was_taken(number: int) -> None:
    name, params = GRID[number]
    optimizer, other = two_groups(), two_groups()
    schedule = made(name, optimizer, **params)
    rows = [figures(optimizer)]
    for step in range(2000):
        schedule.step()
        rows.append(figures(optimizer))
        if step == 129:
            resumed = made(name, other, **params)
            resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
            assert figures(other) == rows[-1]
            started = made(name, **{**params, "last_batch_iteration": 129})
            assert started.get_last_lr() == schedule.get_last_lr() == resumed.get_last_lr()
    np.testing.assert_allclose(np.array(rows), RECORDED[str(number)], rtol=0, atol=1e-12)


def test_the_grid_covers_every_schedule() -> None:
    assert {name for name, _ in GRID} == set(SCHEDULES)


def test_schedules_tell_what_they_were_made_with() -> None:
    """Under DeepSpeed's names: callbacks read them."""
    decay = made("WarmupDecayLR", total_num_steps=20, warmup_max_lr=[0.3, 0.2], warmup_num_steps=1)
    assert (decay.min_lrs, decay.max_lrs) == ([0.0, 0.0], [0.3, 0.2])
    assert (decay.warmup_num_steps, decay.warmup_type, decay.total_num_steps) == (2, "log", 20)
    with pytest.warns(UserWarning, match="unknown warmup_type"):
        own = made("WarmupLR", warmup_type="cubic")
    assert (own.max_lrs, own.warmup_type) == ([0.01, 0.02], "log")
    cosine = made("WarmupCosineLR", total_num_steps=9000)
    assert (cosine.org_lrs, cosine.warmup_min_ratio, cosine.cos_min_ratio) == ([0.01, 0.02], 0.0, 0.0001)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_no_warm_up_is_the_shortest(name: str) -> None:
    """Examples of accelerate set 0, and DeepSpeed takes it: its formulas have a warm-up of at least two steps."""
    total = {} if name == "WarmupLR" else {"total_num_steps": 9}
    ones, others = two_groups(), two_groups()
    schedules = [made(name, one, **total, warmup_num_steps=steps) for steps, one in ((0, ones), (2, others))]
    for _ in range(12):
        assert figures(ones) == figures(others)
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("name", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_run_without_steps(name: str) -> None:
    with no_warnings():
        assert made(name, total_num_steps=0, warmup_num_steps=4).get_last_lr() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", [*SCHEDULES, "StepLR"])
def test_a_rate_that_is_a_tensor_stays_the_one_that_it_is(name: str, shape: tuple[int, ...]) -> None:
    """A captured or compiled step reads it there."""
    params: dict[str, Any] = {
        "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 4},
        "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 4},
        "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4},
        "StepLR": {"step_size": 2},
    }.get(name, {})

    rate = torch.full(shape, 0.1, dtype=torch.float64)
    ones, others = (torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=lr) for lr in (rate, 0.1))  # type: ignore[arg-type]
    schedule, plain = (Floor(made(name, one, **params), one, 0.02) for one in (ones, others))
    for _ in range(6):
        assert ones.param_groups[0]["lr"] is rate and rate.shape == shape
        assert schedule.get_last_lr() == plain.get_last_lr() == [rate.item()]
        schedule.step()
        plain.step()


def test_one_cycle_tells_its_momenta() -> None:
    rates = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}
    momenta = {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    moves, rests = (OneCycle(two_groups(), **rates, **momenta, cycle_momentum=moved) for moved in (True, False))  # type: ignore[arg-type]
    assert moves.get_mom() == [(0.9, 0.99)] * 2, "of the cycle"
    assert [group["betas"] for group in moves.optimizer.param_groups] == [(0.8, 0.99)] * 2, "the first step's"
    assert rests.get_mom() is None


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "ExponentialLR"])
def test_a_floor_holds_under_torchs_own_schedules(name: str) -> None:
    """Some of torch's compute the next rate from the last: they must find the rate that they left."""
    params = {"T_max": 40} if name == "CosineAnnealingLR" else {"gamma": 0.9}
    free, held = two_groups(), two_groups()
    plain = made(name, free, **params)
    floored = Floor(made(name, held, **params), held, 5e-3)
    for step in range(80):
        assert floored.get_last_lr() == [max(group["lr"], 5e-3) for group in free.param_groups]
        if step == 30:
            again = two_groups()
            resumed = Floor(made(name, again, **params), again, 5e-3)
            resumed.load_state_dict(floored.state_dict())
            held, floored = again, resumed
        for optimizer, schedule in ((free, plain), (held, floored)):
            optimizer.step()
            schedule.step()


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLr", {}, "scheduler.type: unknown 'WarmupLr'"),
        ("LRScheduler", {}, "scheduler.type"),
        ("LambdaLr", {}, "unknown"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps"),
        ("WarmupLR", {"warmup_max_lr": [1, 2, 3]}, "3 values for 2 param groups"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupCosineLR", {"total_num_steps": 1.5}, "total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("StepLR", {"gamma": 0.1}, "step_size"),
    ],
)
def test_schedules_that_cannot_be_made(name: str, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        made(name, **params)
