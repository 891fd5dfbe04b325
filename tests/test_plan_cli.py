"""`zeroshard plan`, as users run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import zeroshard
from insides import progress_of_plan
from typer.testing import CliRunner

from zeroshard.cli import plan
from zeroshard.cli.main import app
from zeroshard.errors import ZeroshardError
from zeroshard.planning.machine import TABLE
from zeroshard.planning.report import size

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


def test_a_config_is_judged(folder: Path) -> None:
    model = (".", "--gpus", "8", "--memory", "1024MB", "--sequence", "32")  # few doublings of the microbatch fill it
    written_to = ("--config", "zero.json", "--write", "out.json", "--plot", "memory.png")
    done = zeroshard("plan", *model, *written_to)
    assert done.returncode == 0, done.stderr
    for word in (
        "fits:",
        "parameters",
        "driver's context",
        "stage 3",
        "activation checkpointing",
        "largest microbatch",
    ):
        assert word in done.stdout
    written = json.loads((folder / "out.json").read_text())
    assert written["train_batch_size"] == 16
    assert written["steps_per_print"] == 10
    assert (folder / "memory.png").stat().st_size > 1000


def test_what_is_auto_is_given(folder: Path) -> None:
    (folder / "auto.json").write_text(json.dumps(CONFIG))
    planned = ["plan", ".", "--sequence", "32", "--quick", "--config", "auto.json"]
    assert "optimizer.params.lr" in refused(*planned[1:])
    done = CliRunner().invoke(app, [*planned, "--auto", "lr=1e-3", "--write", "out.json"])
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "out.json").read_text())["optimizer"]["params"]["lr"] == 1e-3


def test_a_batch_size_and_short_names_are_given_too(folder: Path) -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"},
    }
    (folder / "auto.json").write_text(json.dumps(config))
    values = ["--auto", "train_micro_batch_size_per_gpu=4", "--auto", "stage3_prefetch_bucket_size=10"]
    planned = ["plan", ".", "--sequence", "32", "--quick", "--config", "auto.json", *values, "--write", "out.json"]
    done = CliRunner().invoke(app, planned)
    assert done.exit_code == 0, done.output
    written = json.loads((folder / "out.json").read_text())
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["zero_optimization"]["stage3_prefetch_bucket_size"] == 10


def test_what_would_be_left_out_is_refused(folder: Path) -> None:
    (folder / "auto.json").write_text(json.dumps(CONFIG))
    planned = [".", "--sequence", "32"]
    for option in (("--auto", "lr=1e-3"), ("--quick",)):
        assert "name the config with --config" in refused(*planned, *option)
    told = refused(*planned, "--config", "auto.json", "--auto", "lr=1e-3", "--auto", "stge=3")
    assert "auto['stge'] is not the name of a config key. Did you mean 'stage'?" in told
    assert "set the config's train_batch_size" in refused(*planned, "--config", "auto.json", "--global-batch", "8")
    assert "Pass one of them" in refused(*planned, "--batch", "2", "--global-batch", "8")
    assert "so --batch 3 has no effect" in refused(*planned, "--config", "zero.json", "--batch", "3", "--quick")
    assert "--sequence has no effect" in refused("factory.py:make", "--sequence", "8", "--config", "zero.json")
    for name in ("memory.txt", "memory"):
        assert "is not the name of a picture" in refused(*planned, "--plot", name)


def test_a_factory_that_is_on_the_meta_device(folder: Path) -> None:
    assert "on the meta device. Leave the device out" in refused("factory.py:meta", "--config", "zero.json", "--quick")


def test_a_factorys_batch_has_the_samples_of_the_plan(folder: Path) -> None:
    def needed(samples: int) -> int:
        config = {"train_micro_batch_size_per_gpu": samples, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        (folder / "zero.json").write_text(json.dumps(config))
        return int(planned_as_json("factory.py:make", "--config", "zero.json", "--quick")["peak"]["bytes"])

    inputs_and_outputs = 10_000 * 4 * (4 + 1)
    assert needed(20_000) - needed(10_000) == pytest.approx(inputs_and_outputs, rel=0.01)


def test_json_is_for_programs(folder: Path) -> None:
    config = json.loads((folder / "zero.json").read_text()) | {"steps_per_print": float("inf")}  # as accelerate has it
    (folder / "zero.json").write_text(json.dumps(config))
    told = planned_as_json(
        "factory.py:make", "--gpus", "2", "--config", "zero.json", "--quick", "--machine", "a100-80gb"
    )
    assert told["fits"]
    assert sum(told["peak"]["parts"].values()) == told["peak"]["bytes"]
    assert told["needed"] >= told["peak"]["bytes"] + sum(told["unseen"].values())


def test_hosts_within_which_parameters_rest(folder: Path) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    (folder / "within.json").write_text(
        json.dumps(CONFIG | {"optimizer": {"type": "AdamW"}, "zero_optimization": zero})
    )
    planned = [".", "--sequence", "32", "--quick", "--config", "within.json"]
    told = {hosts: planned_as_json(*planned, "--gpus", "8", "--hosts", hosts) for hosts in ("1", "2")}
    assert told["1"]["step"]["sent"] == told["2"]["step"]["sent"]
    assert told["2"]["step"]["spent"]["network"] > 0
    assert "network" not in told["1"]["step"]["spent"]
    assert "2 ranks cannot be spread over 3 hosts" in refused(*planned, "--gpus", "2", "--hosts", "3", "--json")


@pytest.mark.full
def test_the_engine_sees_the_memory_that_is_named(folder: Path) -> None:
    """With little of it, sums of microbatches are not kept on the accelerator."""
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = CONFIG | {"optimizer": {"type": "AdamW"}, "zero_optimization": offloaded, "gradient_accumulation_steps": 4}
    (folder / "offloaded.json").write_text(json.dumps(config))

    def peak(memory: str) -> int:
        model = (".", "--gpus", "2", "--sequence", "16", "--sharded-init", "--memory", memory)
        return int(planned_as_json(*model, "--quick", "--config", "offloaded.json")["peak"]["bytes"])

    assert peak("1MB") < peak("80GB")


@pytest.mark.full
def test_a_search_over_hosts_tries_what_stays_inside(folder: Path) -> None:
    slow = {"bandwidth": 1e7, "latency": 1e-6}
    table = json.loads(TABLE.read_text())["h100"]
    (folder / "slow.json").write_text(json.dumps(table | {"between": slow, "transport": "gloo"}))
    model = (".", "--sequence", "16", "--gpus", "8", "--hosts", "2")
    told = planned_as_json(*model, "--machine", "slow.json", "--memory", "80GB")
    assert told["config"]["zero_optimization"]["zero_hpz_partition_size"] == 4


@pytest.mark.full
def test_without_a_config_the_fastest_that_fits_is_found(folder: Path) -> None:
    model = (".", "--gpus", "2", "--sequence", "16", "--memory", "80GB")
    told = planned_as_json(*model, "--batch", "2", "--write", "chosen.json")
    assert told["fits"]
    assert told["batch"]["train"] == 4
    assert told["chosen"] not in [one["what"] for one in told["next_best"]]
    assert len(told["next_best"]) == 3
    assert planned_as_json(*model, "--quick", "--config", "chosen.json")["peak"] == told["peak"]


def test_wrong_input_is_a_sentence_with_the_remedy(folder: Path) -> None:
    assert "no file at" in refused("nowhere.json", "--config", "zero.json")
    assert "no config.json" in refused(str(folder.parent), "--config", "zero.json")
    (folder / "strange.json").write_text(json.dumps({"model_type": "strange"}))
    assert "has no architecture 'strange'" in refused("strange.json", "--config", "zero.json")
    assert "has no unit" in refused(".", "--memory", "80", "--config", "zero.json")
    assert "from_config instead of from_pretrained" in refused("factory.py:trained", "--config", "zero.json")
    assert "must return (module, batch)" in refused("factory.py:module", "--config", "zero.json")
    (folder / "refused.json").write_text(json.dumps({"zero_optimization": {"stage": 4}}))
    assert "zero_optimization.stage" in refused(".", "--config", "refused.json")
    assert "there is no machine 'h1000'" in refused(".", "--machine", "h1000", "--config", "zero.json")


def test_a_search_that_finds_nothing_gives_the_first_refusal(folder: Path) -> None:
    assert "the first refusal: factory.py:module must return (module, batch)" in refused("factory.py:module")


def test_a_search_prints_what_it_assumed_and_the_next_best(folder: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "factory.py:loss", "--gpus", "2"], env={"COLUMNS": "150"})
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("assumed: machine h100 (--machine), 85.0 GB each (--memory), 2 ranks (--gpus)")
    assert "2 samples per step" in done.stdout
    assert "--sequence" not in done.stdout, "its batches have a length of their own"
    assert "the next best that fit" in done.stdout
    assert "0.00 GB" not in done.stdout


def test_progress_is_logged_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(plan, "monotonic", lambda: now[0])
    with progress_of_plan("searching") as told:
        for done in range(25):
            now[0] += 1
            told(done, 25)
    assert capsys.readouterr().err.splitlines() == [
        "searching: 9 of 25 dry runs, 10 s",
        "searching: 19 of 25 dry runs, 20 s",
    ]


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


def test_a_model_that_takes_one_batch_size_only_is_planned(folder: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "factory.py:two_samples", "--config", "zero.json"])
    assert done.exit_code == 0, done.output
    assert "fits:" in done.output and "the largest microbatch is unknown: the model could not be run" in done.output


@pytest.mark.full
def test_a_largest_micro_batch_at_the_limit_of_the_search_says_so(folder: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "factory.py:make", "--config", "zero.json"])
    assert "the largest microbatch that fits: at least " in done.output


def test_a_config_that_a_run_refuses_is_refused(folder: Path) -> None:
    config = json.loads((folder / "zero.json").read_text())
    (folder / "typo.json").write_text(json.dumps(config | {"tensorboard": {"enabledd": True}}))
    assert "enabledd" in refused("factory.py:make", "--config", "typo.json", "--quick")
    (folder / "auto.json").write_text(json.dumps(config | {"steps_per_print": "auto"}))
    done = CliRunner().invoke(
        app, ["plan", "factory.py:make", "--config", "auto.json", "--quick", "--write", "out.json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads((folder / "out.json").read_text()).get("steps_per_print") != "auto"


def test_ranks_on_cpus_need_the_memory_of_their_host_together(folder: Path) -> None:
    def fits(memory: str) -> bool:
        options = ("--machine", "cpu", "--gpus", "2", "--host-memory", memory, "--config", "zero.json", "--quick")
        plan = planned_as_json("factory.py:make", *options)
        assert plan["host"]["bytes"] >= 2 * plan["needed"]
        return bool(plan["fits"])

    assert fits("2GB") and not fits("500MB")
