"""Plans of experts over their own ranks: the bytes of a real run, and the number of ranks that sends least."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import sharded_of
from mixtures import MIXTURES
from ranks import on_ranks
from test_experts_config import RANKS, built, settings
from test_mixtures import batch
from twin import microbatch

import zeroshard
from zeroshard import UsageError
from zeroshard.tools.planning.experts import TOKENS

WEIGHTS = ("all_gather", "reduce_scatter")
HIDDEN, LAYERS, CHOSEN = 16, 2, 2
"""Of the mixture "Qwen3-MoE"."""


def planned(name: str, stage: int, ep: int, **more: Any) -> zeroshard.Plan:
    return zeroshard.plan(
        MIXTURES[name], settings(stage, ep), world_size=RANKS, batch=batch(1, 0), machine="cpu", presets=False, **more
    )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ep", [2, 4])
def test_a_plan_sends_what_a_run_sends(stage: int, ep: int) -> None:
    def body(rank: int) -> dict[str, int]:
        engine, *_ = zeroshard.initialize(model=built("Qwen3-MoE"), config=settings(stage, ep))
        for step in range(2):
            sharded_of(engine).comm_report()
            microbatch(engine, engine(**batch(1, step)).loss)
        report = sharded_of(engine).comm_report()
        engine.destroy()
        return {kind: report.get(kind, 0) for kind in WEIGHTS}

    real = on_ranks(body, RANKS)
    figures = planned("Qwen3-MoE", stage, ep).rows[0].figures
    assert {kind: figures.sent.get(kind, 0) for kind in WEIGHTS} == real[0]
    tokens = batch(1, 0)["input_ids"].numel()
    assert figures.sent[TOKENS] == 4 * LAYERS * tokens * CHOSEN * HIDDEN * 4 * (ep - 1) // ep
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("DeepSeek-V3", marks=pytest.mark.full)])
def test_the_plan_names_the_number_of_ranks_that_sends_least(name: str) -> None:
    plan = planned(name, 3, 2)
    sent = plan.sent_by_ranks_of_experts
    assert sorted(sent) == [1, 2, 4]
    assert planned(name, 3, 1, expert_parallel=4).sent_by_ranks_of_experts == sent
    least = min(sent, key=lambda n: sent[n])
    assert f"experts over {least} rank" in str(plan).splitlines()[-1]
    live = {row.name: row.figures.peak.nbytes for row in plan.rows}
    assert live["the config (stage 3), experts over 4 ranks"] < live["the config (stage 3), experts over 1 rank"]


def test_a_number_that_does_not_divide_the_experts_has_no_row() -> None:
    plan = zeroshard.plan(MIXTURES["Qwen3-MoE"], settings(3, 2), world_size=8, batch=batch(1, 0), presets=False)
    assert sorted(plan.sent_by_ranks_of_experts) == [1, 2, 4]  # of 4 experts
    with pytest.raises(UsageError, match="choose a divisor"):
        zeroshard.plan(MIXTURES["Qwen3-MoE"], settings(3, 8), world_size=8, batch=batch(1, 0), presets=False)
    with pytest.raises(UsageError, match="has no plan for expert parallelism"):
        zeroshard.plan(
            lambda: torch.nn.Linear(2, 1), settings(3, 2), world_size=8, batch=(torch.zeros(1, 2),), presets=False,
        )  # fmt: skip


def test_any_other_reason_why_a_number_has_no_row_is_told() -> None:
    """Such a number was left out as if it did not divide the experts."""
    built = 0

    def factory() -> torch.nn.Module:
        nonlocal built
        built += 1
        if built > 1:
            raise UsageError("one model is enough. Ask for no more.")
        return MIXTURES["Qwen3-MoE"]()

    plan = zeroshard.plan(factory, settings(3, 2), world_size=2, batch=batch(1, 0), presets=False)
    assert plan.refused == {"the config (stage 3), experts over 1 rank": "one model is enough. Ask for no more."}
    assert "not possible here: the config (stage 3), experts over 1 rank: one model is enough" in str(plan)


@pytest.mark.ranks(2)
def test_a_plan_inside_a_job_is_refused_by_name(rank: int) -> None:
    with pytest.raises(UsageError, match="a plan of experts over their own ranks makes a process group"):
        planned("Qwen3-MoE", 3, 2)
