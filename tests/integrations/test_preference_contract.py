"""Unmodified trl trainers with peft's adapters, under `zeroshard run`: the losses equal DDP's, and adapters are saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import run

pytestmark = pytest.mark.full

SCRIPT = "preference.py"
READ = ("sft-modules", "sft-prompt", "sft-prefix")
"""With adapters that PEFT runs or reads while it saves, on the rank that writes."""
TRAINERS = (*READ, "sft", "dpo", "dpo-full", "dpo-before")
OFFLINE = {"TRANSFORMERS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}


def case(trainer: str, stage: int | None, *, checkpointing: bool = False) -> dict[str, Any]:
    """Return one training; its name is a folder.

    "dpo-full" trains every weight, with a second model as the reference. "dpo-before" computes the reference's figures with the
    model itself, before it trains it.
    """
    name = f"{trainer}-{stage}-{checkpointing}"
    return {"name": name, "trainer": trainer, "stage": stage, "checkpointing": checkpointing}


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
            assert found[what] == pytest.approx(wanted[what], rel=0, abs=1e-6), (one["name"], what)
        assert found["generated"] == wanted["generated"], one["name"]
        assert found["read"] == pytest.approx(wanted["read"], abs=1e-5), one["name"]


def test_stock_preference_training(ddp: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    cases = [case(trainer, 3) for trainer in TRAINERS if trainer != "dpo"]
    check([*cases, case("dpo", 2), case("dpo", 3, checkpointing=True)], ddp, tmp_path)


@pytest.mark.full
def test_stock_preference_training_in_all_ways(ddp: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    ways = [(trainer, stage, again) for trainer in TRAINERS[3:] for stage in range(4) for again in (False, True)]
    ways += [(trainer, 2, False) for trainer in READ]
    check([case(trainer, stage, checkpointing=again) for trainer, stage, again in ways], ddp, tmp_path)
