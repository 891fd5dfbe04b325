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
def loss():
    return Mean(4, 1), lambda rank, step: (torch.zeros(1, 4),)
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
    (tmp_path / "zero.json").write_text(json.dumps(CONFIG | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}))
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


@pytest.mark.full
def test_what_is_auto_is_given(folder: Path) -> None:
    (folder / "auto.json").write_text(json.dumps(CONFIG))
    planned = [".", "--sequence", "32", "--quick", "--config", "auto.json"]
    assert "optimizer.params.lr" in refused(*planned)
    config = planned_as_json(*planned, "--auto", "lr=1e-3")["rows"][0]["config"]
    assert config["optimizer"]["params"]["lr"] == 1e-3
    assert (config["train_batch_size"], config["steps_per_print"]) == (16, 10)


def test_a_batch_size_and_short_names_are_given_too(folder: Path) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"},
    }
    (folder / "auto.json").write_text(json.dumps(config))
    values = ["--auto", "train_micro_batch_size_per_gpu=4", "--auto", "stage3_prefetch_bucket_size=10"]
    told = planned_as_json(".", "--sequence", "32", "--quick", "--config", "auto.json", *values)["rows"][0]["config"]
    assert told["train_micro_batch_size_per_gpu"] == 4
    assert told["zero_optimization"]["stage3_prefetch_bucket_size"] == 10


def test_what_would_be_left_out_is_refused(folder: Path) -> None:
    (folder / "auto.json").write_text(json.dumps(CONFIG))
    planned = [".", "--sequence", "32"]
    assert "name the config with --config" in refused(*planned, "--auto", "lr=1e-3")
    assert "name the config to plan with --config" in refused(*planned, "--quick")
    told = refused(*planned, "--config", "auto.json", "--auto", "lr=1e-3", "--auto", "stge=3")
    assert "auto['stge'] is not the name of a config key. Did you mean 'stage'?" in told
    assert "so --batch 3 has no effect" in refused(*planned, "--config", "zero.json", "--batch", "3", "--quick")
    assert "--sequence has no effect" in refused("factory.py:make", "--sequence", "8", "--config", "zero.json")
    assert "2 ranks cannot be spread over 3 hosts" in refused(*planned, "--gpus", "2", "--hosts", "3")


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--sequence-parallel", "a shorter --sequence"), ("--tile-tokens", "zeroshard.sequence.tile"),
        ("--tensor-parallel", "as many data-parallel ranks"), ("--global-batch", "as --batch"), ("--write", "--json"),
        ("--plot", "--json"),
    ],
)  # fmt: skip
def test_an_option_of_earlier_releases_names_its_remedy(option: str, remedy: str) -> None:
    told = refused("config.json", option, "4")
    assert f"zeroshard plan has no {option}: " in told and remedy in told


@pytest.mark.full
def test_a_factory_that_is_on_the_meta_device(folder: Path) -> None:
    assert "on the meta device. Leave the device out" in refused("factory.py:meta", "--config", "zero.json", "--quick")


@pytest.mark.full
def test_a_factorys_batch_has_the_samples_of_the_plan(folder: Path) -> None:
    def needed(samples: int) -> int:
        config = {"train_micro_batch_size_per_gpu": samples, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        (folder / "zero.json").write_text(json.dumps(config))
        told = planned_as_json("factory.py:make", "--config", "zero.json", "--quick")
        return int(told["rows"][0]["peak"]["bytes"])

    inputs_and_outputs = 10_000 * 4 * (4 + 1)
    assert needed(20_000) - needed(10_000) == pytest.approx(inputs_and_outputs, rel=0.01)


@pytest.mark.full
def test_json_has_no_infinity(folder: Path) -> None:
    config = json.loads((folder / "zero.json").read_text()) | {"steps_per_print": float("inf")}  # as accelerate has it
    (folder / "zero.json").write_text(json.dumps(config))
    told = planned_as_json("factory.py:make", "--config", "zero.json", "--quick", "--machine", "a100-80gb")
    assert told["machine"] == "a100-80gb"


@pytest.mark.full
def test_the_engine_sees_the_memory_that_is_named(folder: Path) -> None:
    """With little of it, sums of microbatches are not kept on the accelerator."""
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = CONFIG | {"optimizer": {"type": "AdamW"}, "zero_optimization": offloaded, "gradient_accumulation_steps": 4}
    (folder / "offloaded.json").write_text(json.dumps(config))

    def peak(memory: str) -> int:
        model = (".", "--gpus", "2", "--sequence", "16", "--sharded-init", "--memory", memory)
        return int(planned_as_json(*model, "--quick", "--config", "offloaded.json")["rows"][0]["peak"]["bytes"])

    assert peak("1MB") < peak("80GB")


def test_wrong_input_is_a_sentence_with_the_remedy(folder: Path) -> None:
    assert "no file at" in refused("nowhere.json", "--config", "zero.json")
    assert "no config.json" in refused(str(folder.parent), "--config", "zero.json")
    (folder / "strange.json").write_text(json.dumps({"model_type": "strange"}))
    assert "has no architecture 'strange'" in refused("strange.json", "--config", "zero.json")
    assert "has no unit" in refused(".", "--memory", "80", "--config", "zero.json")
    assert "from_config instead of from_pretrained" in refused("factory.py:trained", "--config", "zero.json")
    assert "must return (module, batch)" in refused("factory.py:module", "--config", "zero.json")
    assert "must return (module, batch)" in refused("factory.py:module"), "the presets' first refusal"
    (folder / "refused.json").write_text(json.dumps({"zero_optimization": {"stage": 4}}))
    assert "zero_optimization.stage" in refused(".", "--config", "refused.json")
    assert "there is no machine 'h1000'" in refused(".", "--machine", "h1000", "--config", "zero.json")


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (31.41e9, "31.4 GB"),
        (0.2e9, "0.20 GB"),
        (12.3e6, "12.3 MB"),
        (4100, "4.10 kB"),
        (-2e6, "-2.00 MB"),
        (8, "8 bytes"),
    ],
)
def test_sizes_have_a_unit_that_fits(nbytes: float, expected: str) -> None:
    assert size(nbytes) == expected


def test_a_config_that_a_run_refuses_is_refused(folder: Path) -> None:
    config = json.loads((folder / "zero.json").read_text())
    (folder / "typo.json").write_text(json.dumps(config | {"tensorboard": {"enabledd": True}}))
    assert "enabledd" in refused("factory.py:make", "--config", "typo.json", "--quick")
    (folder / "auto.json").write_text(json.dumps(config | {"steps_per_print": "auto"}))
    told = planned_as_json("factory.py:make", "--config", "auto.json", "--quick")
    assert told["rows"][0]["config"].get("steps_per_print") != "auto"
    (folder / "divided.json").write_text(json.dumps(config | {"tensor_parallel": {"autotp_size": 2}}))
    assert "a plan does not count tensor parallelism" in refused("factory.py:make", "--config", "divided.json")


@pytest.mark.full
def test_ranks_on_cpus_need_the_memory_of_their_host_together(folder: Path) -> None:
    def fits(memory: str) -> bool:
        options = ("--machine", "cpu", "--gpus", "2", "--host-memory", memory, "--config", "zero.json", "--quick")
        plan = planned_as_json("factory.py:make", *options)
        assert plan["rows"][0]["host"]["bytes"] >= 2 * plan["rows"][0]["needed"]
        return bool(plan["fits"])

    assert fits("2GB") and not fits("500MB")
