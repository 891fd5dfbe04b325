"""The log of a run's steps: the printed line, the timers, and the monitors."""

from __future__ import annotations

import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from insides import replace_monitor
from models import Stack
from ranks import on_ranks, run_ranks
from twin import build_engine, engine_steps

import zeroshard
from zeroshard import ConfigError
from zeroshard.engine.config.schema import MONITORS, Schema, block_of

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
FIGURES = [f"Train/Samples/{figure}" for figure in ("grad_norm", "loss_scale", "lr", "train_loss")]


def run(config: dict[str, Any], rank: int = 0, steps: int = 4) -> tuple[zeroshard.Engine, list[float]]:
    engine = build_engine(2, **BASE, **config)
    losses = engine_steps(engine, rank, range(2 * steps))
    engine.destroy()
    return engine, [loss.item() for loss in losses]


def test_a_line_every_so_many_steps(capfd: pytest.CaptureFixture[str]) -> None:
    settings = {
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True},
    }

    losses = run_ranks(lambda rank: run(settings, rank)[1], 2)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in lines] == ["2", "4"], "rank 0 alone prints"
    mean = sum(sum(rank[2:4]) for rank in losses) / 4
    assert f"loss {mean:.4f}" in lines[0], "the mean over ranks and microbatches"
    assert "lr 1.000e-02  loss scale 1" in lines[0]
    assert re.search(r"\|g\| [\d.]+  [\d.]+ samples/s  memory [\d.]+ MiB", lines[0])
    for part in ("forward", "backward", "step", "reduce", "gather"):
        assert re.search(rf"ms: .*{part} [\d.]+", lines[0]), part
    assert re.search(r"MiB: parameters [\d.]+, gradients [\d.]+, optimizer [\d.]+, buffers", lines[0])
    assert re.search(r"sent MiB: .*reduce_scatter [\d.]+", lines[0])


def test_times_are_those_of_one_step_after_the_batch_size_was_set(capfd: pytest.CaptureFixture[str]) -> None:
    class Slow(Stack):
        def forward(self, *args: Any) -> Any:
            time.sleep(0.02)
            return super().forward(*args)

    engine = build_engine(2, make_model=Slow, **BASE, steps_per_print=2, wall_clock_breakdown=True)
    engine.set_train_batch_size(4 * engine.train_micro_batch_size_per_gpu())
    engine_steps(engine, 0, range(8))
    engine.destroy()
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert float(re.findall(r"forward ([\d.]+)", line)[0]) >= 4 * 20


def test_silence_where_nothing_is_asked_for_and_the_config_where_it_is(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for every in (None, float("inf"), 1e9):
        run({"steps_per_print": every})
    assert capfd.readouterr().out == ""
    monkeypatch.setenv("COLUMNS", "200")
    run({"dump_state": True}, steps=1)
    assert "zero_optimization.stage" in capfd.readouterr().out


def block(kind: str, folder: Path) -> dict[str, Any]:
    return {kind: {"enabled": True, "output_path": str(folder), "job_name": "job"}}


@pytest.mark.parametrize("kind", ["json_monitor", "csv_monitor"])
def test_a_log_that_the_disk_does_not_take_is_no_end(tmp_path: Path, kind: str) -> None:
    """Files may not grow beyond some lines: rank 0 says so once, and both ranks train to the end."""

    def body(rank: int) -> tuple[list[float], list[str]]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (900 if kind == "json_monitor" else 60, before[1]))
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                losses = run(block(kind, tmp_path), rank)[1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return losses, [str(one.message) for one in told if "the log" in str(one.message)]

    (losses, told), (others, nothing) = on_ranks(body, 2)
    assert len(losses) == len(others) == 8 and not nothing
    (line,) = told
    assert re.search(r"the log .*job.* ends before step [1-4]: File too large\. Training continues", line)


@pytest.mark.parametrize("kind", ["json_monitor", "csv_monitor"])
def test_a_log_in_a_place_that_is_no_folder_is_refused_before_the_first_step(kind: str, tmp_path: Path) -> None:
    (tmp_path / "job").write_text("")
    with pytest.raises(ConfigError, match=r"^the log .*job.* cannot be written: .*\. Name a folder"):
        run(block(kind, tmp_path), steps=0)


def test_services_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, comet = Mock(), Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    run({
        "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
        "comet": {"enabled": True, "samples_log_interval": 12, "project": "p", "experiment_name": "e"},
    })  # fmt: skip
    wandb.init.assert_called_once_with(project="p", group="g", entity="t")
    comet.start.assert_called_once_with(project="p")
    tracked, experiment = wandb.init.return_value, comet.start.return_value
    assert [call.kwargs["step"] for call in tracked.log.mock_calls] == [6, 12, 18, 24]
    assert sorted(tracked.log.mock_calls[0].args[0]) == FIGURES
    assert [call.kwargs["step"] for call in experiment.log_metrics.mock_calls] == [6, 18]
    tracked.finish.assert_called_once_with()
    experiment.set_name.assert_called_once_with("e")
    experiment.end.assert_called_once_with()


@pytest.mark.ranks(2)
def test_monitors_that_rank_0_cannot_make_are_an_error_on_every_rank(rank: int) -> None:
    """And the model may be given to `initialize` again."""
    model = Stack()
    with pytest.raises(ConfigError, match="pip install comet_ml"):
        build_engine(2, make_model=lambda: model, comet={"enabled": True})
    engine = build_engine(2, make_model=lambda: model)
    engine_steps(engine, rank, range(2))


def test_tensorboard_is_written_or_asked_for(tmp_path: Path) -> None:
    settings = block("tensorboard", tmp_path)
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            run(settings)
        return
    _, losses = run(settings)
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    scalars = events.Scalars("Train/Samples/train_loss")
    assert [event.step for event in scalars] == [6, 12, 18, 24]
    assert scalars[0].value == pytest.approx(sum(losses[:2]) / 2)


def test_one_list_names_the_monitors() -> None:
    """A block that can be enabled and that nothing makes would be accepted, and do nothing."""
    others = {"bf16", "fp16", "torch_autocast", "compile", "comms_logger", "expert_parallel"}
    can_be_enabled = {
        key for key in Schema.model_fields if "enabled" in getattr(block_of(Schema, key), "model_fields", {})
    }
    assert can_be_enabled == {*MONITORS, *others}


@pytest.mark.parametrize("name", MONITORS)
def test_every_monitor_is_told(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever its block names: an engine makes it, tells it each step, and closes it."""
    told: list[str] = []

    class Spy:
        def __init__(self, block: Any) -> None:
            told.append(f"made {type(block).__name__}")

        def write(self, figures: Any, events: dict[str, float]) -> None:
            told.append(f"{figures.step} {sorted(events)}")

        def close(self) -> None:
            told.append("closed")

    replace_monitor(monkeypatch, name, Spy)
    run({name: {"enabled": True}}, steps=2)
    assert told == [f"made {block_of(Schema, name).__name__}", f"1 {FIGURES}", f"2 {FIGURES}", "closed"]  # type: ignore[union-attr]


OWN_LOOP = """
import sys, torch, zeroshard
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
sharded = zeroshard.shard(model, optimizer, 2)
with zeroshard.progress(sharded, samples=8, monitors={monitors}) as progress:
    for step in range(3):
        loss = model(torch.ones(8, 4)).pow(2).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step(loss, norm)
"""


def in_own_process(folder: Path, monitors: dict[str, Any], **environment: str) -> None:
    """Train a loop of one's own with these monitors, in a process where trackers may start threads."""
    script = OWN_LOOP.replace("{monitors}", repr(monitors))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", **environment}
    subprocess.run([sys.executable, "-c", script], cwd=folder, env=environment, check=True, timeout=300)


@pytest.mark.full
def test_trackio_itself_is_told(tmp_path: Path) -> None:
    """The package, without a network."""
    in_own_process(tmp_path, {"trackio": {"project": "p", "name": "r"}}, TRACKIO_DIR=str(tmp_path))
    base = sqlite3.connect(tmp_path / "p.db")
    rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("r", 8), ("r", 16), ("r", 24)]
    for _, _, metrics in rows:
        figures = json.loads(metrics)
        assert figures["Train/Samples/lr"] == 0.5
        assert {"Train/Samples/train_loss", "Train/Samples/grad_norm"} <= figures.keys()


@pytest.mark.full
def test_mlflow_itself_is_told(tmp_path: Path) -> None:
    """The package, without a server: it writes files."""
    monitors = {"mlflow": {"tracking_uri": (tmp_path / "store").as_uri(), "experiment": "e", "run_name": "r"}}
    in_own_process(tmp_path, monitors, MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true")
    (rates,) = (tmp_path / "store").glob("*/*/metrics/Train/Samples/lr")
    lines = [line.split() for line in rates.read_text().splitlines()]
    assert [(float(value), int(samples)) for _, value, samples, *_ in lines] == [(0.5, 8), (0.5, 16), (0.5, 24)]
    assert (rates.parent / "train_loss").exists() and (rates.parent / "grad_norm").exists()
    assert "status: 3" in (rates.parents[3] / "meta.yaml").read_text(), "the run is finished"


@pytest.mark.parametrize("name", ["wandb", "comet", "trackio", "mlflow"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "comet_ml" if name == "comet" else name
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{name}.enabled is true.*pip install {package}"):
        run({name: {"enabled": True}})
