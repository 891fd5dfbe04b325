"""The stock Trainer with `expert_parallel.autoep_size` in its config has one process's losses, norms and weights, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import IMPORTS, STOCK, run

pytestmark = pytest.mark.full

SCRIPT = "experts.py"
IMPORTS[SCRIPT] = STOCK


def case(stage: int | None, ep: int = 2, **more: Any) -> dict[str, Any]:
    return {"name": "-".join(map(str, (stage, ep, *more))), "stage": stage, "ep": ep, **more}


def expect_near(found: dict[str, Any], alone: dict[str, Any]) -> None:
    assert len(found["losses"]) == len(found["norms"]) == 4
    for what in ("losses", "norms", "evaluations"):
        assert found[what] == pytest.approx(alone[what], abs=1e-5), what
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-4)


def test_the_stock_trainer_is_one_process(tmp_path: Path) -> None:
    (alone,) = run(1, SCRIPT, [case(None)], tmp_path / "alone")
    cases = [case(stage, ep) for ep in (2, 4) for stage in (1, 2, 3)]
    cases += [case(3, optimizer=True), case(3, checkpointing=True), case(2, checkpointing=True, optimizer=True)]
    found = run(4, SCRIPT, cases, tmp_path / "divided")
    for one, of in zip(found, cases, strict=True):
        expect_near(one, alone)
        like = found[0 if of["ep"] == 2 else 3]
        if "optimizer" not in of:
            assert all(one[what] == like[what] for what in ("losses", "norms", "weights")), "the bits of all stages"


def test_a_run_resumes_with_other_numbers_of_expert_ranks(tmp_path: Path) -> None:
    """transformers' own trainer refuses to resume models that it divides while it loads them."""
    saves = case(3, 2, throw_away=False)
    (whole,) = run(4, SCRIPT, [saves], tmp_path / "whole")
    checkpoint = str(tmp_path / "whole" / saves["name"] / "checkpoint-2")
    cases = [case(3, 2, resume=checkpoint), case(2, 1, resume=checkpoint), case(1, 4, resume=checkpoint)]
    same, *others = run(4, SCRIPT, cases, tmp_path / "resumed")
    assert same["losses"] == whole["losses"] and same["weights"] == whole["weights"]
    for one in others:
        expect_near(one, whole)
    (two,) = run(2, SCRIPT, [case(3, 2, resume=checkpoint)], tmp_path / "two")
    expect_near(two, whole)


def test_bf16(tmp_path: Path) -> None:
    (alone,) = run(1, SCRIPT, [case(None)], tmp_path / "alone")
    second, third = run(4, SCRIPT, [case(2, bf16=True), case(3, bf16=True)], tmp_path / "divided")
    assert second["losses"] == third["losses"] and second["weights"] == third["weights"]
    assert second["losses"] == pytest.approx(alone["losses"], rel=0.05) and second["norms"] != alone["norms"]


def test_a_loop_of_accelerates_is_one_process(tmp_path: Path) -> None:
    (alone,) = run(1, SCRIPT, [case(None, loop=True)], tmp_path / "alone")
    for found in run(4, SCRIPT, [case(1, loop=True), case(3, 4, loop=True)], tmp_path / "divided"):
        assert len(found["losses"]) == 4 and found["experts"] == [4, 4]
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(alone[what], abs=1e-5), what


def test_a_model_is_loaded_from_files(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
    model.save_pretrained(tmp_path / "model")
    loaded = {"loaded": str(tmp_path / "model")}
    (alone,) = run(1, SCRIPT, [case(None, **loaded)], tmp_path / "alone")
    for found in run(4, SCRIPT, [case(2, **loaded), case(3, **loaded)], tmp_path / "divided"):
        expect_near(found, alone)
