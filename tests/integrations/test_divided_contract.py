"""A stock trainer whose config divides sequences, tensors or experts over ranks has one process's figures and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_trainer_contract import IMPORTS, STOCK, run

from zeroshard.testing import RankError

pytestmark = pytest.mark.full

SEQUENCES, DIVIDED = "long_sequences.py", "divided.py"
IMPORTS.update({SEQUENCES: STOCK, DIVIDED: STOCK})
FOUR = pytest.param(4, marks=pytest.mark.full)
TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def case(stage: int | None, **more: Any) -> dict[str, Any]:
    """Return one training; its name is a folder. With `ep` it divides experts over so many ranks."""
    ways = [key if isinstance(value, str) else f"{key}{value}" for key, value in more.items()]
    return {"name": "-".join([str(stage), *ways]), "stage": stage, **more}


def expect_near(found: dict[str, Any], alone: dict[str, Any], **within: float) -> None:
    """Assert that two trainings are near each other: within 1e-5 of each value, if nothing else is said."""
    assert len(found["losses"]) == len(found["norms"]) == len(alone["losses"]) == 4
    for what in ("losses", "norms", "evaluations"):
        assert found.get(what, []) == pytest.approx(alone.get(what, []), **(within or {"rel": 1e-5})), what
    if "weights" in alone:
        assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-4)


def expect_equal(found: dict[str, Any], other: dict[str, Any]) -> None:
    for what in ("losses", "norms", "weights"):
        assert found[what] == other[what], what


# ---------------------------------------------------------------------- sequences


@pytest.mark.parametrize("tuner", [False, True], ids=["Trainer", "TRL"])
def test_sequences_that_are_cut(tuner: bool, tmp_path: Path) -> None:
    if tuner:
        pytest.importorskip("trl")
    cases = [case(stage, tuner=tuner, checkpointing=stage == 3) for stage in (1, 2, 3)]
    (alone,) = run(1, SEQUENCES, [case(None, tuner=tuner, checkpointing=False)], tmp_path / "alone")
    found = run(2, SEQUENCES, cases, tmp_path / "cut")
    for one in found:
        expect_near(one, alone)
        assert not one["saved"], "the name of the attention"
        assert one["losses"] == found[0]["losses"], "the bits of all stages"


# ---------------------------------------------------------------------- tensors


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_tensors_of_the_stock_trainer(ranks: int, tmp_path: Path) -> None:
    (alone,) = run(1, DIVIDED, [case(None)], tmp_path / "alone")
    found = run(ranks, DIVIDED, [case(stage) for stage in (1, 2, 3)], tmp_path / "divided")
    assert len(alone["evaluations"]) == 2
    for one in found:
        expect_near(one, alone)
        expect_equal(one, found[0])


def test_checkpoints_optimizers_of_configs_ties_and_bf16(tmp_path: Path) -> None:
    (alone,) = run(1, DIVIDED, [case(None, tied=True)], tmp_path / "alone")
    cases = [case(1, tied=True, optimizer=True, throw_away=False), case(2, tied=True, bf16=True)]
    whole, half = run(2, DIVIDED, cases, tmp_path / "divided")
    expect_near(whole, alone)
    assert half["losses"] == pytest.approx(whole["losses"], rel=0.05) and half["norms"] != whole["norms"]
    resume = str(tmp_path / "divided" / cases[0]["name"] / "checkpoint-2")
    (after,) = run(2, DIVIDED, [case(1, tied=True, optimizer=True, resume=resume)], tmp_path / "resumed")
    expect_equal(after, whole)


DISPATCHED = r"accelerate dispatches this loader's batches.*dispatch_batches=False"


@pytest.mark.parametrize(
    ("ranks", "more", "error"),
    [
        (2, {}, None),
        pytest.param(4, {}, None, marks=pytest.mark.full),
        (2, {"iterable": True}, None),
        pytest.param(4, {"iterable": True}, DISPATCHED, marks=pytest.mark.full),
        (2, {"dispatch": True}, DISPATCHED),
        pytest.param(4, {"iterable": True, "dispatch": False}, None, marks=pytest.mark.full),
    ],
    ids=[
        "a list",
        "a list on four",
        "one batch for all",
        "one batch for two models",
        "half of a length",
        "each rank reads",
    ],
)
def test_tensors_in_a_loop_of_accelerates(ranks: int, more: dict[str, Any], error: str | None, tmp_path: Path) -> None:
    """It may give all ranks one batch, also those that should train on another. Its loader's length is that of one for each."""
    cases = [case(2, loop=True, **more)]
    if error is not None:
        with pytest.raises(RankError, match=error):
            run(ranks, DIVIDED, cases, tmp_path / "refused")
        return
    (alone,) = run(1, DIVIDED, [case(None, loop=True)], tmp_path / "alone")
    (found,) = run(ranks, DIVIDED, cases, tmp_path / "divided")
    expect_near(found, alone)
    assert found["samples"] == 2
    if not more:
        assert any("every sample is in them 2 times" in one for one in found["warnings"])


def test_a_model_of_transformers_own_loading_is_refused_where_training_begins(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "model")
    loaded = case(2, without=True, loaded=str(tmp_path / "model"), transformers_plan=True)
    with pytest.raises(RankError, match=r"autotp_size.* in the config instead"):
        run(2, DIVIDED, [loaded], tmp_path / "refused")


# ---------------------------------------------------------------------- experts


def test_experts_of_the_stock_trainer(tmp_path: Path) -> None:
    (alone,) = run(1, DIVIDED, [case(None, ep=1)], tmp_path / "alone")
    cases = [case(stage, ep=ep) for ep in (2, 4) for stage in (1, 2, 3)]
    cases += [case(3, ep=2, optimizer=True), case(3, ep=2, checkpointing=True)]
    cases += [case(2, ep=2, checkpointing=True, optimizer=True)]
    found = run(4, DIVIDED, cases, tmp_path / "divided")
    for one, of in zip(found, cases, strict=True):
        expect_near(one, alone, abs=1e-5)
        if "optimizer" not in of:
            expect_equal(one, found[0 if of["ep"] == 2 else 3])


def test_a_run_resumes_with_other_numbers_of_expert_ranks(tmp_path: Path) -> None:
    """transformers' own trainer refuses to resume models that it divides while it loads them."""
    saves = case(3, ep=2, throw_away=False)
    (whole,) = run(4, DIVIDED, [saves], tmp_path / "whole")
    checkpoint = str(tmp_path / "whole" / saves["name"] / "checkpoint-2")
    cases = [case(stage, ep=ep, resume=checkpoint) for stage, ep in ((3, 2), (2, 1), (1, 4))]
    same, *others = run(4, DIVIDED, cases, tmp_path / "resumed")
    expect_equal(same, whole)
    for one in [*others, *run(2, DIVIDED, cases[:1], tmp_path / "two")]:
        expect_near(one, whole, abs=1e-5)


def test_experts_in_bf16_in_a_loop_of_accelerates_and_from_files(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **experts)).save_pretrained(tmp_path / "model")
    loaded = {"loaded": str(tmp_path / "model")}
    ways: list[dict[str, Any]] = [{}, {"loop": True}, loaded]
    alone, in_a_loop, from_files = run(1, DIVIDED, [case(None, ep=1, **way) for way in ways], tmp_path / "alone")
    cases = [case(2, ep=2, bf16=True), case(3, ep=2, bf16=True), case(1, ep=2, loop=True), case(3, ep=4, loop=True)]
    cases += [case(stage, ep=2, **loaded) for stage in (2, 3)]
    found = run(4, DIVIDED, cases, tmp_path / "divided")
    expect_equal(found[0], found[1])
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=0.05) and found[0]["norms"] != alone["norms"]
    for one in found[2:4]:
        expect_near(one, in_a_loop, abs=1e-5)
        assert one["experts"] == [4, 4]
    for one in found[4:]:
        expect_near(one, from_files, abs=1e-5)
