"""An unmodified accelerate loop, under `zeroshard run` and `accelerate launch`: losses equal DDP's, and every save works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import run, zeroshard

import zeroshard as package
from zeroshard.integrations.shim_path import shim_path

pytestmark = pytest.mark.full

SCRIPT = "accelerate_loop.py"
TOLERANCE = {"no": 1e-6, "bf16": 3e-2}
LAUNCHED = [
    "accelerate.commands.launch", "--use_deepspeed", "--zero_stage=3", "--zero3_init_flag=true", "--zero3_save_16bit_model=true",
    "--gradient_accumulation_steps=2", "--gradient_clipping=0.5", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no",
]  # fmt: skip


def case(stage: int | str | None, *, config: bool = False, dtype: str = "no", two: bool = False) -> dict[str, Any]:
    """One run of the script; its name is a folder. At stage 3 of a config the model is born sharded."""
    born = config and stage == 3
    name = f"{stage}-{config}-{dtype}-{two}"
    return {"name": name, "stage": stage, "config": config, "dtype": dtype, "two": two, "born": born}


@pytest.fixture(scope="session")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What DDP comes to in fp32: with torch's schedule, with a config's, and with two models."""
    cases = [case(None), case(None, config=True), case(None, two=True)]
    return run(2, SCRIPT, cases, tmp_path_factory.mktemp("ddp"))


def flat(told: Any) -> list[float]:
    """The figures of microbatch after microbatch: losses; or losses, norms (-1 within a step) and rates."""
    rows = [row if isinstance(row, list) else [row] for row in told]
    return [-1.0 if figure is None else figure for row in rows for figure in row]


def check(one: dict[str, Any], found: dict[str, Any], ddp: list[dict[str, Any]]) -> None:
    wanted, tolerance = ddp[2 if one["two"] else one["config"]], TOLERANCE[one["dtype"]]
    assert found.keys() == wanted.keys()
    for what in ("told", "resumed", "back"):
        if what in wanted:
            assert flat(found[what]) == pytest.approx(flat(wanted[what]), abs=tolerance, rel=0), (one["name"], what)
    if one["two"]:
        return
    told = found["told"]
    assert found["resumed"] == told[2:], "another start goes on with the same bits"
    assert found["back"] == told[2:5], "and so does a run that goes back"
    assert found["keys"] == wanted["keys"]
    assert found["evaluated"] == pytest.approx(wanted["evaluated"], abs=tolerance)
    assert found["values"] == pytest.approx(wanted["values"], abs=250 * tolerance)  # a sum over 5000 elements
    assert found["read"] == pytest.approx(wanted["read"], abs=250 * tolerance)
    assert found["read"][0] == found["read"][1]


def test_stock_loop(ddp: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = [case(stage, config=stage % 2 == 1) for stage in range(4)] + [case(2, two=True)]
    for one, found in zip(cases, run(2, SCRIPT, cases, tmp_path), strict=True):
        check(one, found, ddp)


@pytest.mark.full
def test_accelerate_launch(ddp: list[dict[str, Any]], tmp_path: Path) -> None:
    """All that it takes is the path."""
    paths = f"{shim_path()}:{Path(package.__file__).parent.parent}"
    (found,) = run(LAUNCHED, SCRIPT, [case("launched")], tmp_path, PYTHONPATH=paths)
    check(case("launched"), found, ddp)


@pytest.mark.full
def test_stock_loop_in_all_ways(ddp: list[dict[str, Any]], tmp_path: Path) -> None:
    cases = [
        case(stage, config=config, dtype=dtype) for stage in range(4) for config in (False, True) for dtype in TOLERANCE
    ]
    cases += [case(stage, two=True) for stage in range(4)]
    for one, found in zip(cases, run(zeroshard(2), SCRIPT, cases, tmp_path), strict=True):
        check(one, found, ddp)
