"""Unmodified trl trainers with peft's adapters, under `zeroshard run`: the losses equal DDP's, and adapters are saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import largest_difference, run

pytestmark = pytest.mark.full

SCRIPT = "preference.py"
TRAINERS = ("sft", "dpo", "dpo-full", "dpo-before")
OFFLINE = {"TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def case(trainer: str, stage: int | None, *, checkpointing: bool = False) -> dict[str, Any]:
    """Return one training; its name is a folder.

    "dpo-full" trains every weight, with a second model as the reference. "dpo-before" computes the reference's figures with the
    model itself, before it trains it.
    """
    return {
        "name": f"{trainer}-{stage}-{checkpointing}",
        "trainer": trainer,
        "stage": stage,
        "checkpointing": checkpointing,
    }


@pytest.fixture(scope="session")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What DDP comes to, by trainer."""
    cases = [case(trainer, None) for trainer in TRAINERS]
    found = run(2, SCRIPT, cases, tmp_path_factory.mktemp("ddp"), **OFFLINE)
    return dict(zip(TRAINERS, found, strict=True))


def check(cases: list[dict[str, Any]], ddp: dict[str, dict[str, Any]], folder: Path) -> None:
    for one, found in zip(cases, run(2, SCRIPT, cases, folder, **OFFLINE), strict=True):
        wanted = ddp[one["trainer"]]
        for what in ("losses", "norms"):
            assert largest_difference(wanted[what], found[what]) <= 1e-6, (one["name"], what)
        assert found["generated"] == wanted["generated"], one["name"]
        assert found["read"] == pytest.approx(wanted["read"], abs=1e-5), one["name"]


def test_stock_preference_training(ddp: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    cases = [
        case("sft", 3),
        case("dpo", 2),
        case("dpo", 3, checkpointing=True),
        case("dpo-full", 3),
        case("dpo-before", 3),
    ]
    check(cases, ddp, tmp_path)


@pytest.mark.full
def test_stock_preference_training_in_all_ways(ddp: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    ways = [(trainer, stage, again) for trainer in TRAINERS for stage in range(4) for again in (False, True)]
    check([case(trainer, stage, checkpointing=again) for trainer, stage, again in ways], ddp, tmp_path)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_adapters_that_peft_reads_while_it_saves(tmp_path: Path, stage: int) -> None:
    """Trainers have PEFT save on rank 0, which runs prompt encoders and makes state dicts of modules there."""
    kinds = ("modules_to_save", "prompt", "prefix")
    cases = [{**case(kind, stage), "kind": kind, "optimizer": False, "scheduler": False} for kind in kinds]
    for one, found in zip(cases, run(2, "adapters.py", cases, tmp_path, **OFFLINE), strict=True):
        for folder in ("final", "checkpoint-4"):
            assert found[folder] == pytest.approx(found["predicted"], rel=1e-6), (one["kind"], folder)
