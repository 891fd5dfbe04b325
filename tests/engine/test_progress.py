"""The terminal display of a run, and its log."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from insides import columns_of_a_bar
from models import Stack, tokens
from quiet import no_warnings
from ranks import on_ranks
from simgpu import budgets, server
from torch import nn
from twin import build, build_engine, engine_steps, gpt_batch, update
from typer.testing import CliRunner

import zeroshard
from zeroshard import ConfigError, UsageError
from zeroshard.checkpoint import display as display_module
from zeroshard.checkpoint.display import Display, ProgressRow
from zeroshard.engine import training_progress
from zeroshard.engine.monitors import Sent
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.tools.main import app

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}


class Terminal(io.StringIO):
    """Stands for stderr, once opened, with a person before it."""

    def open(self) -> None:
        sys.stderr = self

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """What was drawn, without control codes."""
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue()))
        return [line.strip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


class Clock:
    """A monotonic clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """stderr, from where the test opens it: what a fixture sets, pytest's capturing would set back."""
    for name, value in {"TERM": "xterm", "COLUMNS": "200", "LINES": "40", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ZEROSHARD_PROGRESS", raising=False)
    before = sys.stderr
    yield Terminal()
    sys.stderr = before


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(display_module, "monotonic", made)
    return made


@pytest.fixture
def engine() -> Iterator[zeroshard.Engine]:
    made = build_engine(2, **CONFIG)
    yield made
    made.destroy()


# ---------------------------------------------------------------------- what lasts


def test_what_takes_more_than_two_seconds_has_a_bar(terminal: Terminal, time: Clock) -> None:
    terminal.open()
    with Display().task('saving "[a]"', 4e9) as row:
        row.advance(1e9)
        assert not terminal.lines
        time.now += 2.5
        for _ in range(3):
            row.advance(0.5e9)
            time.now += 1
        assert any(re.search(r'saving "\[a\]" .*2\.5/4\.0 GB 500\.0 MB/s 0:00:03', line) for line in terminal.lines)
        time.now -= 0.9
        before = len(terminal.getvalue())
        row.advance(1.0)
        assert len(terminal.getvalue()) == before, "drawn again before anybody could have read it"


@pytest.mark.parametrize("why", ["over sooner", "not rank 0", "switched off", "no terminal"])
def test_quiet(why: str, terminal: Terminal, time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.open()
    if why == "switched off":
        monkeypatch.setenv("ZEROSHARD_PROGRESS", "0")
    if why == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    with Display(speaks=why != "not rank 0").task("loading", 100) as row:
        time.now += 1.9 if why == "over sooner" else 10
        row.advance(100)
    assert terminal.getvalue() == ""


def test_bars_of_things_within_things(terminal: Terminal, time: Clock) -> None:
    terminal.open()
    display = Display()
    with display.shown(ProgressRow("training", 10, display)), display.task("saving", 10) as row:
        time.now += 3
        row.advance(5)
        drawn = terminal.lines
    assert any(line.startswith("training") and "0/10" in line for line in drawn)
    assert any(line.startswith("saving") and "5/10 bytes" in line for line in drawn)


def test_a_bar_fits_a_narrow_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.open()
    monkeypatch.setenv("COLUMNS", "60")
    display = Display()
    with display.shown(ProgressRow("", 300, display, columns=["loss 2.341", "3,000 tokens/s", "peak 800 MiB"])):
        assert any(re.search(r"0/300 -:--:-- loss 2\.341$", line) for line in terminal.lines)
    assert all(len(line) <= 60 for line in terminal.lines)


def test_printed_lines_stand_above(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.open()
    monkeypatch.setattr(sys, "stdout", terminal)
    display = Display()
    with display.shown(ProgressRow("training", 10, display)):
        print("said")
        assert "said" in terminal.lines
        after = terminal.lines[terminal.lines.index("said") :]
        assert any(line.startswith("training") for line in after), "drawn again"
    assert sys.stdout is terminal


class Noted(Display):
    """Remembers its rows, whether anybody would see them or not."""

    rows: ClassVar[list[ProgressRow]] = []

    @contextmanager
    def task(self, what: str, total: float | None = None, *, in_bytes: bool = True) -> Iterator[ProgressRow]:
        with super().task(what, total, in_bytes=in_bytes) as row:
            self.rows.append(row)
            yield row


def test_what_lasts_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of saves, loads, exports and commands add up to what was announced."""
    Noted.rows.clear()
    for module in ("model.shard", "model.pretrained", "checkpoint.hugging_face", "checkpoint.display"):
        monkeypatch.setattr(importlib.import_module(f"zeroshard.{module}"), "Display", Noted)
    config = GPTConfig(layers=2, width=64, heads=2, context=16)
    engine = build_engine(2, make_model=lambda: GPT(config))
    update(engine(*gpt_batch(0, 0)), engine.optimizer)
    engine.save_checkpoint(tmp_path / "checkpoints", "a")
    engine.load_checkpoint(tmp_path / "checkpoints")
    engine.export(tmp_path / "exported")
    engine.destroy()
    zeroshard.load_pretrained(GPT(config), tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    for command in (["inspect", "checkpoints"], ["consolidate", "checkpoints", "consolidated"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    exported = f'"{tmp_path}/exported"'
    names = ['saving "a"', 'loading "a"', f"exporting to {exported}", f"loading {exported}", "verifying"]
    assert [row.what for row in Noted.rows] == [*names, 'writing "consolidated"']
    for row in Noted.rows:
        # The headers of files are in one of the two.
        assert row.total and row.done == pytest.approx(row.total, rel=0.05), (row.what, row.done, row.total)


# ---------------------------------------------------------------------- trainings


def train(engine: zeroshard.Engine, steps: int, rank: int = 0, *, divides: bool = False) -> list[float]:
    """Train, as a stock Trainer does if `divides`, and return the losses of the microbatches."""
    if not divides:
        return [loss.item() for loss in engine_steps(engine, rank, range(2 * steps))]
    losses = []
    for number in range(2 * steps):
        loss = engine(*tokens(rank, number))
        engine.backward(loss / 2, scale_wrt_gas=False)
        engine.step()
        losses.append(loss.item())
    return losses


def test_the_bar_of_an_engine(terminal: Terminal, engine: zeroshard.Engine) -> None:
    terminal.open()
    with zeroshard.progress(engine, steps=4, tokens=5, peak_flops=1e12):
        losses = train(engine, 4)
    last = next(line for line in reversed(terminal.lines) if "4/4" in line)
    assert f"loss {sum(losses[-2:]) / 2:.4g}" in last
    for figure in (r"[\d.,]+ tokens/s", r"[\d.,]+ samples/s", r"MFU [\d.]+%", "peak", r"lr 1\.00e-02", r"norm [\d.]+"):
        assert re.search(figure, last), (figure, last)


def test_without_a_terminal_a_line_comes_now_and_then(
    engine: zeroshard.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = io.StringIO()
    monkeypatch.setattr(training_progress, "READ_SECONDS", 0.0)
    monkeypatch.setattr(training_progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", plain)
    monkeypatch.delenv("ZEROSHARD_PROGRESS", raising=False)
    with zeroshard.progress(engine, steps=2):
        losses = train(engine, 2)
    monkeypatch.setenv("ZEROSHARD_PROGRESS", "0")
    with zeroshard.progress(engine, steps=2):
        train(engine, 1)
    lines = plain.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert f"loss {sum(losses[2:]) / 2:.4g}" in lines[1]
    assert "\x1b" not in plain.getvalue()


def test_ranks_that_divide_tensors_count_in_mfu() -> None:
    columns = columns_of_a_bar(Stack(), ranks=8, samples_per_second=0.5, flops=8e9, peak_flops=1e9)
    assert {"0.5 samples/s", "MFU 50.0%"} <= set(columns)


def test_the_bar_can_be_left_before_the_loop_is(
    terminal: Terminal, engine: zeroshard.Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.open()
    with zeroshard.progress(engine, steps=4) as progress:
        train(engine, 1)
        progress.print("above", 1)
        progress.stop()
        drawn = terminal.getvalue()
        train(engine, 1)
    assert terminal.getvalue() == drawn
    assert "1/4" in terminal.lines[-1]
    assert capsys.readouterr().out == "above 1\n"


def test_progress_within_progress_of_one_engine(terminal: Terminal, engine: zeroshard.Engine) -> None:
    """As of epochs: the outer bar goes on after the inner one."""
    terminal.open()
    with zeroshard.progress(engine, steps=4):
        with zeroshard.progress(engine, steps=2):
            train(engine, 2)
        train(engine, 1)
    assert any("2/2" in line for line in terminal.lines)
    assert "3/4" in terminal.lines[-1]


Given = Callable[..., Any]
WRONG: dict[str, tuple[Callable[[Given, Given], object], str]] = {
    "steps": (lambda engine, _: engine(steps="4"), "steps='4'"),
    "fewer than no steps": (lambda engine, _: engine(steps=-1), "0 or more"),
    "samples": (lambda engine, _: engine(samples="many"), "samples='many'"),
    "no peak": (lambda engine, _: engine(peak_flops=0), "more than 0"),
    "tokens": (lambda engine, _: engine(tokens=-1), "tokens=-1"),
    "a module": (lambda *_: zeroshard.progress(nn.Linear(1, 1)), r"progress\(\) cannot show a Linear. Pass the engine"),
    "a step of an engine": (lambda engine, _: engine().__enter__().step(1.0), "with an engine"),
    "a step outside": (lambda _, loop: loop().step(1.0), "outside of `with"),
    "three losses": (lambda _, loop: loop().__enter__().step(torch.ones(3)), r"a loss of shape \(3,\)"),
    "a file as a log, engine": (
        lambda engine, _: engine(log="file").__enter__(),
        "file/steps.jsonl cannot be written: .*Name a",
    ),
    "a file as a log": (
        lambda _, loop: loop(log="file").__enter__(),
        "file/steps.jsonl cannot be written: .*Name a folder",
    ),
}
"""A use of progress() of an engine, or of a loop of one's own, and what it is told, at once."""


@pytest.mark.quick(99)
@pytest.mark.parametrize("name", WRONG)
def test_what_would_be_lost_or_wrong_is_refused(
    name: str, engine: zeroshard.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    _, sharded = build(2)
    use, told = WRONG[name]
    with pytest.raises(UsageError, match=told):
        use(partial(zeroshard.progress, engine), partial(zeroshard.progress, sharded))
    train(engine, 1)


def plain_loop(rank: int, steps: int, log: Path | None = None, begin: int = 0, **more: Any) -> list[float]:
    model, sharded = build(3)
    losses = []
    given = {"steps": begin + steps, "begin": begin, "samples": 6, "tokens": 5, "log": log, **more}
    with no_warnings(), zeroshard.progress(sharded, **given) as progress:  # the loss requires a gradient
        for number in range(steps):
            loss = model(*tokens(rank, number))
            loss.backward()
            norm = sharded.clip_grad_norm_(1.0)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            progress.step(loss, norm)
            losses.append(loss.item())
    sharded.remove()
    return losses


def records(folder: Path) -> list[dict[str, Any]]:
    """Read a log, which is JSON even of settings that JSON lacks, such as infinity."""
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_the_log_and_the_monitors_of_a_plain_loop(tmp_path: Path) -> None:
    monitors = {name: {"output_path": str(tmp_path), "job_name": name} for name in ("csv_monitor", "json_monitor")}
    monitors |= {"wandb": {"enabled": False}}  # type: ignore[dict-item]
    losses = on_ranks(lambda rank: plain_loop(rank, 5, tmp_path / "run", monitors=monitors), 2)
    about, *steps = records(tmp_path / "run")
    assert about["run"]["world_size"] == 2
    assert about["run"]["policy"]["parameters"]["sharded"] is True
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5]
    assert [one["samples"] for one in steps] == [6, 12, 18, 24, 30]
    assert [one["loss"] for one in steps] == pytest.approx(losses[0]), "rank 0's"
    assert all(one["lr"] == 1e-2 and one["applied"] and one["grad_norm"] > 0 for one in steps)
    assert steps[-1]["memory"]["parameters"] > 0 and steps[-1]["peak"] > 0 and steps[-1]["sent"]
    assert steps[-1]["tokens_per_second"] == pytest.approx(5 * steps[-1]["samples_per_second"])
    assert [one["loss"] for one in records(tmp_path / "json_monitor")[1:]] == [one["loss"] for one in steps]
    head, *rows = (tmp_path / "csv_monitor" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert head == "samples,Train/Samples/train_loss"
    assert [float(row.split(",")[1]) for row in rows] == [one["loss"] for one in steps]
    assert len([*(tmp_path / "csv_monitor").iterdir()]) == 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("monitors", "expected"),
    [
        ({"tensorbord": {}}, "tensorbord: unknown key; did you mean 'tensorboard'?"),
        ({"csv_monitor": {"folder": "x"}}, "csv_monitor.folder: unknown key"),
        ({"csv_monitor": True}, 'Write "csv_monitor": {"enabled": true}.'),
        ({"comet": {}}, "pip install comet_ml"),
        ("nowhere.json", "there is no config file"),
    ],
)
def test_wrong_monitors_are_an_error_on_every_rank(rank: int, monitors: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        plain_loop(rank, 1, monitors=monitors)


def test_a_log_goes_on_after_a_line_that_was_half_written(tmp_path: Path) -> None:
    plain_loop(0, 2, tmp_path)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    plain_loop(0, 2, tmp_path, begin=2)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert lines[3] == '{"step": 3, "lo'
    assert [json.loads(line)["step"] for line in lines[5:]] == [3, 4]


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("how", ["config", "monitors", "log"])
def test_the_log_of_an_engine(how: str, divides: bool, tmp_path: Path) -> None:
    block = {"json_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    shown: dict[str, Any] = {"config": {}, "monitors": {"monitors": block}, "log": {"log": tmp_path / "run"}}[how]

    def body(rank: int) -> list[float]:
        more = block if how == "config" else {}
        engine = build_engine(2, **CONFIG, wall_clock_breakdown=True, steps_per_print=float("inf"), **more)
        with zeroshard.progress(engine, **shown):
            losses = train(engine, 3, rank, divides=divides)
        train(engine, 1, rank)
        engine.destroy()
        return losses

    losses = on_ranks(body, 2)
    about, *steps = records(tmp_path / "run")
    assert about["run"]["trained"] == about["run"]["parameters"]
    assert [one["step"] for one in steps] == [1, 2, 3, *([4] if how == "config" else [])]
    means = [sum(rank[2 * step] + rank[2 * step + 1] for rank in losses) / 4 for step in range(3)]
    assert [one["loss"] for one in steps[:3]] == pytest.approx(means), "the mean over ranks and microbatches"
    assert {"forward", "backward", "step"} <= set(steps[0]["seconds"])
    assert all(one["sent"] for one in steps)


def test_a_log_goes_on_after_another_progress_has_ended(engine: zeroshard.Engine, tmp_path: Path) -> None:
    shown = zeroshard.progress(engine, steps=3)
    logged = zeroshard.progress(engine, steps=3, log=tmp_path)
    with logged:
        with shown:
            train(engine, 1)
        train(engine, 1)
    shown.__enter__()
    with logged:
        train(engine, 1)
        shown.__exit__(None, None, None)
        train(engine, 1)
    assert len([line for line in records(tmp_path) if "step" in line]) == 4


def test_counters_of_bytes_may_be_cleared_by_others() -> None:
    sent = Sent({"a": 2})
    assert sent.take({"a": 5}) == {"a": 3}
    assert sent.take({"a": 7, "b": 1}) == {"a": 2, "b": 1}
    assert sent.take({"a": 3}) == {"a": 3}, "somebody cleared them"
    assert sent.take({"a": 3}) == {}


@pytest.mark.full
def test_the_host_never_waits_for_a_figure(tmp_path: Path) -> None:
    found = server.call(budgets.watched_steps, mode="all late", folder=str(tmp_path))[0]
    assert sum(found["synchronisations"].values()) == 0, found
    assert sum(found["pageable_copies"].values()) == 0, found
    _, *steps = records(tmp_path)
    assert [one["step"] for one in steps] == list(range(1, len(found["losses"]) + 1))
    assert [one["loss"] for one in steps] == pytest.approx(found["losses"].tolist(), rel=1e-6)
    assert steps[-1]["reserved"] >= steps[-1]["peak"] > steps[-1]["memory"]["parameters"] > 0
