"""The stock Trainer with `ParallelismConfig(sp_size=2, sp_backend="deepspeed")` has one process's losses and norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import IMPORTS, STOCK, run

pytestmark = pytest.mark.full

SCRIPT = "long_sequences.py"
IMPORTS[SCRIPT] = STOCK


def case(stage: int | None, checkpointing: bool = False) -> dict[str, Any]:
    return {"name": f"{stage}-{checkpointing}", "stage": stage, "checkpointing": checkpointing}


def test_the_stock_trainer_is_one_process(tmp_path: Path) -> None:
    stages: tuple[int, ...] = (1, 2, 3)
    (alone,) = run(1, SCRIPT, [case(None)], tmp_path / "alone")
    found = run(2, SCRIPT, [case(stage, checkpointing=stage == 3) for stage in stages], tmp_path / "cut")
    assert len(alone["losses"]) == 4 and len(alone["evaluations"]) == 2
    for one in found:
        for what in ("losses", "norms", "evaluations"):
            assert one[what] == pytest.approx(alone[what], rel=1e-5), what
        assert not one["saved"], "the name of the attention"
    assert found[0]["losses"] == found[1]["losses"] == found[2]["losses"]


@pytest.mark.full
def test_fine_tuning_of_trl_is_one_process(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (alone,) = run(1, SCRIPT, [{**case(None), "tuner": True}], tmp_path / "alone")
    found = run(2, SCRIPT, [{**case(stage), "tuner": True} for stage in (2, 3)], tmp_path / "cut")
    for one in found:
        for what in ("losses", "norms"):
            assert one[what] == pytest.approx(alone[what], rel=1e-5), what
