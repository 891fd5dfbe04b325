"""The stock Trainer with `tensor_parallel.autotp_size` in its config has one process's losses, norms and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import IMPORTS, STOCK, run

from zeroshard.testing import RankError

pytestmark = pytest.mark.full

SCRIPT = "tensor_parallel.py"
IMPORTS[SCRIPT] = STOCK


def case(stage: int | None, **more: Any) -> dict[str, Any]:
    return {"name": "-".join(map(str, (stage, *more))), "stage": stage, **more}


def expect_near(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert len(found["losses"]) == 4 and len(found["evaluations"]) == 2
    for what in ("losses", "norms", "evaluations"):
        assert found[what] == pytest.approx(alone[what], rel=1e-5), what
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_stock_trainer_is_one_process(ranks: int, tmp_path: Path) -> None:
    stages: tuple[int, ...] = (1, 2, 3)
    (alone,) = run(1, SCRIPT, [case(None)], tmp_path / "alone")
    found = run(ranks, SCRIPT, [case(stage) for stage in stages], tmp_path / "divided")
    for one in found:
        expect_near(one, alone)
        for what in ("losses", "norms", "weights"):
            assert one[what] == found[0][what], "the bits of all stages"


@pytest.mark.full
def test_checkpoints_optimizers_of_configs_ties_and_bf16(tmp_path: Path) -> None:
    (alone,) = run(1, SCRIPT, [case(None, tied=True)], tmp_path / "alone")
    cases = [case(1, tied=True, optimizer=True, throw_away=False), case(2, tied=True, bf16=True)]
    whole, half = run(2, SCRIPT, cases, tmp_path / "divided")
    expect_near(whole, alone)
    assert half["losses"] == pytest.approx(whole["losses"], rel=0.05) and half["norms"] != whole["norms"]
    resume = str(tmp_path / "divided" / cases[0]["name"] / "checkpoint-2")
    (after,) = run(2, SCRIPT, [case(1, tied=True, optimizer=True, resume=resume)], tmp_path / "resumed")
    assert after["losses"] == whole["losses"] and after["weights"] == whole["weights"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_loop_of_accelerates_is_one_process(ranks: int, tmp_path: Path) -> None:
    (alone,) = run(1, SCRIPT, [case(None, loop=True)], tmp_path / "alone")
    (found,) = run(ranks, SCRIPT, [case(2, loop=True)], tmp_path / "divided")
    assert len(found["losses"]) == 4 and found["samples"] == 2
    assert any("every sample is in them 2 times" in one for one in found["warnings"])
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(alone[what], rel=1e-5), what


@pytest.mark.parametrize(
    ("ranks", "more", "works"),
    [(2, {"iterable": True}, True), pytest.param(4, {"iterable": True}, False, marks=pytest.mark.full),
     (2, {"dispatch": True}, False), pytest.param(4, {"iterable": True, "dispatch": False}, True, marks=pytest.mark.full)],
    ids=["one batch for all", "one batch for two models", "half of a length", "each rank reads"],
)  # fmt: skip
def test_batches_that_accelerate_dispatches(ranks: int, more: dict[str, Any], works: bool, tmp_path: Path) -> None:
    """It gives all ranks one batch, also those that should train on another. Its loader's length is that of one for each rank."""
    cases = [case(2, loop=True, **more)]
    if not works:
        with pytest.raises(RankError, match=r"accelerate dispatches this loader's batches.*dispatch_batches=False"):
            run(ranks, SCRIPT, cases, tmp_path / "refused")
        return
    (alone,) = run(1, SCRIPT, [case(None, loop=True)], tmp_path / "alone")
    (found,) = run(ranks, SCRIPT, cases, tmp_path / "divided")
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(alone[what], rel=1e-5), what


def test_a_model_of_transformers_own_loading_is_refused_where_training_begins(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "model")
    loaded = {"loaded": str(tmp_path / "model"), "transformers_plan": True}
    with pytest.raises(RankError, match=r"autotp_size.* in the config instead"):
        run(2, SCRIPT, [case(2, without=True, **loaded)], tmp_path / "refused")
