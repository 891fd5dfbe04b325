"""`zeroshard plan`, as users run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import zeroshard
from typer.testing import CliRunner

from zeroshard.errors import ZeroshardError
from zeroshard.tools.main import app
from zeroshard.tools.planning.table import size

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "steps_per_print": 10,
}  # fmt: skip
FACTORY = """
import torch
def make():
    return Mean(4, 1), lambda rank, step: (torch.zeros(1, 4),)
def trained():
    model = torch.nn.Linear(4, 1)
    with open("weights.bin", "rb") as file:
        model.load_state_dict(torch.load(file))
    return model, lambda rank, step: (torch.zeros(1, 4),)
def module():
    return torch.nn.Linear(4, 1)
class Mean(torch.nn.Linear):
    def forward(self, values):
        return super().forward(values).mean()
def meta():
    return torch.nn.Linear(4, 1, device="meta"), lambda rank, step: (torch.zeros(1, 4),)
class TwoSamples(Mean):
    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("offsets", torch.zeros(2, 4))
    def forward(self, values):
        return super().forward(values + self.offsets)
def wide():
    return Mean(4, 1), lambda rank, step: (torch.zeros(8, 4),)
def two_samples():
    return TwoSamples(), lambda rank, step: (torch.zeros(2, 4),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = CONFIG | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    configs = {
        "zero": config, "auto": CONFIG, "strange": {"model_type": "strange"}, "wrong": {"zero_optimization": {"stage": 4}},
        "typo": config | {"tensorboard": {"enabledd": True}}, "divided": config | {"tensor_parallel": {"autotp_size": 2}},
    }  # fmt: skip
    for name, content in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments: str) -> str:
    """What is said."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code != 0
    if isinstance(result.exception, ZeroshardError):
        return str(result.exception)
    return " ".join(result.output.split())


def planned_as_json(*arguments: str) -> Any:
    """What a program reads."""
    done = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert "Infinity" not in done.stdout
    return json.loads(done.stdout)


def printed(*arguments: str) -> list[str]:
    """What a person reads."""
    done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_a_config_comes_first_and_so_does_the_answer(folder: Path) -> None:
    done = zeroshard("plan", ".", "--gpus", "8", "--memory", "80GB", "--sequence", "32", "--config", "zero.json")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("fits: ") and " of 80.0 GB, " in lines[0] and lines[0].endswith(" left")
    assert "2 samples x 1 microbatch x 8 ranks = 16 per step" in lines[1]
    names = [line[:26].strip() for line in lines[lines.index("") + 2 :]]
    assert names[:5] == ["zero.json (stage 2)", "stage 0", "stage 1", "stage 3", "stage 1, optimizer on CPU"]
    assert "stage 3, both on disk" in names and "stage 2" not in names, "the config is that preset"
    assert max(map(len, lines)) <= 100


@pytest.mark.full
def test_what_does_not_fit_says_what_does(folder: Path) -> None:
    model = (".", "--gpus", "2", "--sequence", "512", "--config", "zero.json")
    needed = {row["name"]: row["needed"] for row in planned_as_json(*model)["rows"]}
    least = min(needed, key=lambda name: needed[name])
    assert needed[least] < needed["zero.json (stage 2)"]
    first, *_ = printed(*model, "--memory", f"{needed[least]}B")
    assert first.startswith("does not fit: 1.0") and first.endswith(f" missing; this fits: {least}")
    first, *others = printed(".", "--gpus", "2", "--memory", "1021MB", "--sequence", "512")
    assert first.startswith("no preset fits; the closest is stage ") and first.endswith(" missing")
    assert any(" NO " in line for line in others)
    first, *_ = printed(
        ".", "--gpus", "2", "--memory", "80GB", "--host-memory", "1kB", "--config", "zero.json", "--quick"
    )
    assert "of CPU memory" in first and "missing" in first


@pytest.mark.full
def test_what_was_assumed_is_said(folder: Path) -> None:
    lines = printed("factory.py:two_samples", "--gpus", "2", "--batch", "2")
    assert lines[0].startswith("fits with stage 0: ")
    assert "assumed: bf16 and AdamW (--config)" in lines
    lines = printed("factory.py:wide", "--gpus", "2")
    assert "assumed: 1 sample in a forward on one rank (--batch)" in lines
    assert "assumed: the factory's batch of 8 samples is resized to 1" in lines
    assert "assumed: 2048 tokens in a sample (--sequence)" in printed(".", "--quick", "--config", "zero.json")


@pytest.mark.full
def test_each_row_is_a_dry_run_of_its_config(folder: Path) -> None:
    told = planned_as_json(".", "--gpus", "8", "--hosts", "2", "--sequence", "16", "--config", "zero.json")
    assert told["refused"] == {} and told["has_config"] and told["fits"]
    names = [row["name"] for row in told["rows"]]
    assert names == [
        "zero.json (stage 2)", "stage 0", "stage 1", "stage 3", "stage 2 within hosts", "stage 3 within hosts",
        "stage 1, optimizer on CPU", "stage 2, optimizer on CPU", "stage 3, optimizer on CPU", "stage 3, parameters on CPU",
        "stage 2, both on CPU", "stage 3, both on CPU", "stage 3, both on disk",
    ]  # fmt: skip
    rows = {row["name"]: row for row in told["rows"]}
    crossing = [kind for kind in rows["stage 3 within hosts"]["step"]["sent"] if kind.endswith(" across")]
    assert crossing and rows["stage 3, both on disk"]["disk"] > 0
    for row in told["rows"]:
        assert sum(row["peak"]["parts"].values()) == row["peak"]["bytes"]
        assert row["needed"] >= max(row["peak"]["bytes"], row["start"]["bytes"]) + row["unseen"]["workspaces"]
        assert row["left"] == told["limit"] - row["needed"]
        (folder / "row.json").write_text(json.dumps(row["config"]))
        if row["name"] in ("stage 0", "stage 3, both on CPU"):
            again = planned_as_json(
                ".", "--gpus", "8", "--hosts", "2", "--sequence", "16", "--config", "row.json", "--quick"
            )
            assert {**again["rows"][0], "name": row["name"]} == row


@pytest.mark.parametrize(
    ("own", "given", "planned"),
    [
        ({"optimizer": CONFIG["optimizer"]}, ["lr=1e-3"], {"optimizer.params.lr": 1e-3, "steps_per_print": 10}),
        (
            {"train_micro_batch_size_per_gpu": None, "zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"}},
            ["train_micro_batch_size_per_gpu=4", "stage3_prefetch_bucket_size=10"],
            {"train_micro_batch_size_per_gpu": 4, "zero_optimization.stage3_prefetch_bucket_size": 10},
        ),
        ({"steps_per_print": "auto"}, [], {"train_batch_size": 16}),
        ({"steps_per_print": float("inf")}, [], {"train_batch_size": 16}),  # as accelerate has it; JSON has none
    ],
    ids=["a rate", "short names", "a default", "infinity"],
)
@pytest.mark.quick(3)
def test_what_is_auto_is_given(own: dict[str, Any], given: list[str], planned: dict[str, Any], folder: Path) -> None:
    (folder / "auto.json").write_text(json.dumps(json.loads((folder / "zero.json").read_text()) | own))
    values = [part for value in given for part in ("--auto", value)]
    told = planned_as_json("factory.py:make", "--config", "auto.json", "--quick", "--machine", "a100-80gb", *values)
    assert told["machine"] == "a100-80gb"
    config = told["rows"][0]["config"]
    assert config.get("steps_per_print") != "auto"
    for key, value in planned.items():
        found = config
        for part in key.split("."):
            found = found[part]
        assert found == value


@pytest.mark.full
def test_a_factorys_batch_has_the_samples_of_the_plan(folder: Path) -> None:
    def needed(samples: int) -> int:
        config = {"train_micro_batch_size_per_gpu": samples, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        (folder / "zero.json").write_text(json.dumps(config))
        told = planned_as_json("factory.py:make", "--config", "zero.json", "--quick")
        return int(told["rows"][0]["peak"]["bytes"])

    inputs_and_outputs = 10_000 * 4 * (4 + 1)
    assert needed(20_000) - needed(10_000) == pytest.approx(inputs_and_outputs, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (". --auto lr=1e-3", "name the config with --config"),
        (". --quick", "name the config to plan with --config"),
        (". --config auto.json --quick", "optimizer.params.lr"),
        (
            ". --config auto.json --auto lr=1e-3 --auto stge=3",
            "auto['stge'] is not the name of a config key. Did you mean 'stage'?",
        ),
        (". --config zero.json --batch 3 --quick", "so --batch 3 has no effect"),
        ("factory.py:make --sequence 8 --config zero.json", "--sequence has no effect"),
        (". --gpus 2 --hosts 3", "2 ranks cannot be spread over 3 hosts"),
        ("nowhere.json --config zero.json", "no file at"),
        (".. --config zero.json", "no config.json"),
        ("strange.json --config zero.json", "has no architecture 'strange'"),
        (". --memory 80 --config zero.json", "has no unit"),
        (". --machine h1000 --config zero.json", "there is no machine 'h1000'"),
        (". --config wrong.json", "zero_optimization.stage"),
        ("factory.py:make --config typo.json --quick", "enabledd"),
        ("factory.py:make --config divided.json", "a plan does not count tensor parallelism"),
        ("factory.py:trained --config zero.json", "from_config instead of from_pretrained"),
        ("factory.py:meta --config zero.json --quick", "on the meta device. Leave the device out"),
        ("factory.py:module --config zero.json", "must return (module, batch)"),
        ("factory.py:module", "must return (module, batch)"),  # the presets' first refusal
        ("x --sequence-parallel 4", "zeroshard plan has no --sequence-parallel: .* a shorter --sequence"),
        ("x --tile-tokens 4", "zeroshard plan has no --tile-tokens: .*zeroshard.sequence.tile"),
        ("x --tensor-parallel 4", "zeroshard plan has no --tensor-parallel: .*as many data-parallel ranks"),
        ("x --global-batch 4", "zeroshard plan has no --global-batch: .*as --batch"),
        ("x --write 4", "zeroshard plan has no --write: .*--json"),
        ("x --plot 4", "zeroshard plan has no --plot: .*--json"),
    ],
)
@pytest.mark.quick(25)
def test_a_mistake_is_a_sentence_with_the_remedy(arguments: str, expected: str, folder: Path) -> None:
    told = refused(*arguments.split())
    assert all(part in told for part in expected.split(".*"))


def test_sizes_have_a_unit_that_fits() -> None:
    texts = {31.41e9: "31.4 GB", 0.2e9: "0.20 GB", 12.3e6: "12.3 MB", 4100: "4.10 kB", -2e6: "-2.00 MB", 8: "8 bytes"}
    for nbytes, expected in texts.items():
        assert size(nbytes) == expected


@pytest.mark.full
def test_ranks_on_cpus_need_the_memory_of_their_host_together(folder: Path) -> None:
    def fits(memory: str) -> bool:
        options = ("--machine", "cpu", "--gpus", "2", "--host-memory", memory, "--config", "zero.json", "--quick")
        plan = planned_as_json("factory.py:make", *options)
        assert plan["rows"][0]["host"]["bytes"] >= 2 * plan["rows"][0]["needed"]
        return bool(plan["fits"])

    assert fits("2GB") and not fits("500MB")
