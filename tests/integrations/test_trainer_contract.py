"""The unmodified transformers Trainer under `zeroshard run`: losses equal DDP's, whether the config or the Trainer sets a key."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contracts import server
from folders import RECORDED
from sampling import cover, pairs, values

SCRIPTS = Path(__file__).parent / "contracts"
STOCK = ("transformers.trainer", "accelerate", "deepspeed")
TRL = (*STOCK, "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
LLAMA = (*STOCK, "peft", "datasets", "transformers.models.llama.modeling_llama")
IMPORTS = {
    "trainer.py": STOCK,
    "other_sizes.py": STOCK,
    "accelerate_loop.py": STOCK,
    "preference.py": TRL,
    "llama_factory.py": (*LLAMA, "zeroshard.model.shard"),
    "verl_worker.py": LLAMA,
}
"""What each script imports when it has begun, too: transformers and trl import most of themselves at the first use of a name."""
AXES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "optimizer": (True, False),
    "scheduler": (True, False),
    "dtype": ("fp32", "bf16", "fp16"),
    "checkpointing": (False, True),
}
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3, "fp16": 1e-3}


def case(**values: Any) -> dict[str, Any]:
    """One training; its name is a folder."""
    whole = {"stage": None, "optimizer": False, "scheduler": False, "dtype": "fp32", "checkpointing": False, **values}
    return {"name": "-".join(str(whole[key]) for key in AXES), **whole}


def all_cases() -> list[dict[str, Any]]:
    return [case(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values())]


def few_cases(need: Callable[..., set[Any]]) -> list[dict[str, Any]]:
    """Return a few of them that hold each value once, or every two values together."""
    cases = all_cases()
    return [cases[index] for index in sorted(cover([need([(key, one[key]) for key in AXES]) for one in cases]))]


def run(
    launcher: list[str] | int, script: str, cases: list[dict[str, Any]], folder: Path, **environment: str
) -> list[dict[str, Any]]:
    """Run a script of `contracts/` over cases, in one job; returns what rank 0 found, case by case.

    `launcher` is a command that starts the ranks, or their number: then they are forked where the trainers are imported.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given, out = folder / "cases.json", folder / "out.json"
    given.write_text(json.dumps(cases))
    out.unlink(missing_ok=True)
    if isinstance(launcher, int):
        server.run(server.Job(script, [str(given), str(out)], launcher, environment), IMPORTS[script])
    else:
        command = [sys.executable, "-m", *launcher, str(SCRIPTS / script), str(given), str(out)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def zeroshard(ranks: int) -> list[str]:
    return ["zeroshard", "run", "--nproc-per-node", str(ranks)]


@pytest.fixture(scope="session")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    """What DDP comes to in fp32, by whether the schedule is DeepSpeed's."""
    cases = [case(scheduler=scheduler) for scheduler in (False, True)]
    return dict(zip((False, True), run(2, "trainer.py", cases, tmp_path_factory.mktemp("ddp")), strict=True))


def expect_near(found: Any, expected: Any, tolerance: float, *names: Any) -> None:
    assert found == pytest.approx(expected, rel=0, abs=tolerance), names


def check(cases: list[dict[str, Any]], found: list[dict[str, Any]], ddp: dict[bool, dict[str, Any]]) -> None:
    for one, result in zip(cases, found, strict=True):
        reference, tolerance = ddp[one["scheduler"]], TOLERANCE[one["dtype"]]
        for what in ("losses", "norms", "evaluations", "evaluated", "read"):
            expect_near(result[what], reference[what], tolerance, one["name"], what)
        assert Path(result["best"]).name == "checkpoint-4", one["name"]
        assert one["dtype"] != "fp32" or result["generated"] == reference["generated"], one["name"]


def test_stock_trainer(ddp: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    cases = few_cases(values)
    check(cases, run(2, "trainer.py", cases, tmp_path), ddp)


def test_adafactor(tmp_path: Path) -> None:
    """The Trainer allows optimizers that DeepSpeed has not tested; they get whole parameters."""
    cases = [{**case(stage=stage), "arguments": {"optim": "adafactor"}} for stage in (None, 2, 3)]
    stock, *sharded = run(2, "trainer.py", cases, tmp_path)
    for found in sharded:
        expect_near(found["losses"], stock["losses"], 1e-6)


def test_a_script_that_only_evaluates(tmp_path: Path) -> None:
    """With the config that it trains with: its schedule has no steps to decay over."""
    cases = [case()] + [case(stage=3, optimizer=optimizer, scheduler=True) for optimizer in (True, False)]
    stock, *sharded = run(2, "trainer.py", [{**one, "only_evaluates": True} for one in cases], tmp_path)
    for found in sharded:
        expect_near(found["evaluated"], stock["evaluated"], 1e-6)
        expect_near(found["predicted"], stock["predicted"], 1e-2, "a sum over 16 x 8 x 64 logits")


def head_of_another_size(folder: Path) -> str:
    """Save a small classifier of five labels, and return its folder."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, num_labels=5)
    transformers.LlamaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def test_a_constructor_that_builds_a_part_from_a_config(tmp_path: Path) -> None:
    """At stage 3 transformers initialises that part on rank 0, and other ranks must not initialise it again."""
    one = {**case(stage=3), "builds": True, "ignores": True, "file": head_of_another_size(tmp_path / "file")}
    (answers,) = (found["answers"] for found in run(2, "other_sizes.py", [one], tmp_path / "runs"))
    first, second = (answer["losses"] for answer in answers)
    assert first == second
    assert len(set(first)) == len(first) == 6


def test_a_head_of_another_size_than_the_file(tmp_path: Path) -> None:
    """At stage 3 only rank 0 reads values; all ranks raise the error of plain loading, or initialise the head."""
    file = head_of_another_size(tmp_path / "file")
    cases = [
        {**case(stage=stage), "name": f"{stage}-{ignores}", "ignores": ignores, "file": file}
        for stage in (None, 2, 3)
        for ignores in (True, False)
    ]
    answers = [found["answers"] for found in run(2, "other_sizes.py", cases, tmp_path / "runs")]
    expected = answers[0][0]["losses"]
    for one, (first, second) in zip(cases, answers, strict=True):
        if one["ignores"]:  # a new head has other random values at stage 3, and small ones
            expect_near(first["losses"], expected, 0.5, one["name"])
        else:
            assert "ignore_mismatched_sizes" in first["error"] and "error" in second, (one["name"], first, second)


@pytest.mark.full
def test_stock_trainer_under_zeroshard_run(ddp: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    cases = few_cases(pairs)
    check(cases, run(zeroshard(2), "trainer.py", cases, tmp_path), ddp)


@pytest.mark.full
def test_stock_trainer_of_an_older_release(ddp: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    older = Path(sys.prefix, "older")
    if not older.is_dir():
        pytest.skip(f"no older transformers and accelerate in {older}: `make clean test` installs them")
    cases = few_cases(pairs)
    paths = os.pathsep.join([str(older), os.environ.get("PYTHONPATH", "")])
    check(cases, run(zeroshard(2), "trainer.py", cases, tmp_path, PYTHONPATH=paths), ddp)


@pytest.mark.full
def test_stock_trainer_alone(ddp: dict[bool, dict[str, Any]], tmp_path: Path) -> None:
    """One rank sums in another order."""
    cases = few_cases(pairs)
    found = run(zeroshard(1), "trainer.py", cases, tmp_path)
    for one, result in zip(cases, found, strict=True):
        expect_near(result["losses"], ddp[one["scheduler"]]["losses"], max(TOLERANCE[one["dtype"]], 1e-5), one["name"])


USERS = RECORDED / "configs"


@pytest.mark.full
def test_the_users_configs_unchanged(tmp_path: Path) -> None:
    """What such files fix must agree with the arguments, as transformers asks; the rest is "auto"."""
    fixed = {"learning_rate": 1e-5, "warmup_steps": 100, "adam_epsilon": 1e-8}
    first, second = (str(USERS / name) for name in ("zero1.json", "zero2.json"))
    cases = [
        {**case(stage=first), "name": "zero1", "arguments": fixed},
        {**case(stage=second), "name": "zero2"},
        {**case(stage=second, dtype="fp16"), "name": "zero2-fp16", "arguments": {"learning_rate": 1e-4}},
    ]
    for result in run(zeroshard(2), "trainer.py", cases, tmp_path):
        assert len(result["losses"]) == 4 and abs(result["read"] - result["losses"][0]) < 0.5


@pytest.mark.full
def test_resume_at_the_same_and_at_another_stage_and_world_size(tmp_path: Path) -> None:
    cases = [case(stage=stage, optimizer=stage % 2 == 0, scheduler=stage > 1) for stage in range(4)]
    kept = [{**one, "throw_away": False} for one in cases]
    resumed = [{**one, "resume": str(tmp_path / one["name"] / "checkpoint-2")} for one in cases]
    again = [{**one, "name": f"again-{one['name']}"} for one in resumed]
    other = [{**one, "name": f"other-{one['name']}", "stage": (one["stage"] + 2) % 4} for one in resumed]
    found = run(zeroshard(2), "trainer.py", [*kept, *again, *other], tmp_path)
    alone = run(zeroshard(1), "trainer.py", [{**one, "name": f"alone-{one['name']}"} for one in other], tmp_path)
    for index, wanted in enumerate(found[:4]):
        for result, tolerance in ((found[index + 4], 0.0), (found[index + 8], 1e-6), (alone[index], 1e-5)):
            expect_near(result["losses"][-2:], wanted["losses"][-2:], tolerance, cases[index]["name"])
            expect_near(result["evaluated"], wanted["evaluated"], max(tolerance, 1e-5))
