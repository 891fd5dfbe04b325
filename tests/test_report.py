"""A run's log as one page, and the errors if parts of it are missing."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from typer.testing import CliRunner

import zeroshard
from zeroshard import UsageError
from zeroshard.cli.main import app
from zeroshard.observe.report_page import MAX_POINTS, page, thinned
from zeroshard.observe.run_log import RunLog, Series, read_run
from zeroshard.observe.underflow import UnderflowReport

ABOUT = {
    "world_size": 2, "parameters": 10_000_000, "dtype": "bfloat16", "device": "<cpu>", "torch": "2.13",
    "policy": {"parameters": {"sharded": False}, "gradients": {"sharded": True}, "optimizer": {"sharded": True}},
}  # fmt: skip


def step(number: int, **more: Any) -> dict[str, Any]:
    skipped = number % 10 == 7
    return {
        "step": number, "samples": 8 * number, "at": 1.7e9 + number, "loss": 5.0 / number, "lr": 1e-3, "loss_scale": 2.0**16,
        "grad_norm": None if skipped else 1.0, "applied": not skipped, "samples_per_second": 100.0, "tokens_per_second": 12800.0,
        "seconds": {"forward": 0.01, "backward": 0.02}, "sent": {"reduce_scatter": 2 << 20},
        "memory": {"parameters": 30 << 20, "optimizer": 60 << 20}, "peak": 200 << 20,
        "reserved": 256 << 20, **more,
    }  # fmt: skip


def write(folder: Path, steps: list[dict[str, Any]], end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) for one in ({"run": ABOUT}, *steps)]
    (folder / "steps.jsonl").write_text("\n".join(lines) + end)
    return folder


def pictures_of(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", text)


def test_one_page_holds_everything(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(number) for number in range(1, 31)])
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    text = (folder / "report.html").read_text()
    assert pictures_of(text) == [
        "loss", "learning rate", "norm of the gradients before clipping", "loss scale, and skipped steps",
        "tokens per second", "memory of rank 0 by category, MiB", "time of a step by part, ms",
        "sent by rank 0 in a step by collective, MiB",
    ]  # fmt: skip
    assert text.count("<svg") == 8
    assert "256 MiB" in text
    assert "<script" not in text and "@import" not in text
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text.replace("xlink:href", "href")), "it needs the network"
    assert "10.0 M parameters, 2 ranks, sharded: gradients, optimizer, bfloat16, &lt;cpu&gt;, torch 2.13" in text
    assert "<dt>skipped steps</dt><dd>3</dd>" in text
    assert "<title>run</title>" in text
    assert "<details>" not in text, "this log has neither config nor environment"
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_a_page_names_lossy_communication(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2},
            "json_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
        }
        engine, *_ = zeroshard.initialize(model=torch.nn.Linear(2, 1), config=config)
        engine.backward(engine(torch.ones(1, 2)).mean())
        engine.step()
        engine.destroy()

    on_ranks(body, 4)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "run" / "report.html").read_text()
    assert "lossy communication: gradients across hosts int8" in text


def test_a_page_shows_the_config_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "wandb": {"group": "secret"}}
    config["json_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "my job"}
    engine, *_ = zeroshard.initialize(model=torch.nn.Linear(2, 1), config=config)
    engine.backward(engine(torch.ones(1, 2)).mean())
    engine.step()
    engine.destroy()
    text = page(read_run(tmp_path / "my job"))
    assert "<title>my job</title>" in text
    assert "<summary>config</summary>" in text
    assert "train_micro_batch_size_per_gpu" in text
    assert "<summary>environment</summary>" in text
    assert "OMP_NUM_THREADS" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "x:y", "--plot", "{tmp}/memory.png"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_matplotlib_the_remedy_comes_before_any_work(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model and the function that these name do not exist: a command that looked for them would fail otherwise."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, [argument.replace("{tmp}", str(tmp_path)) for argument in arguments])
    assert isinstance(done.exception, UsageError)
    assert "is not installed: pip install 'zeroshard[plots]'." in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_missing_log_is_named_before_a_missing_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert isinstance(done.exception, UsageError) and "no log at" in str(done.exception)
    folder = write(tmp_path / "run", [step(1)])
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert "zeroshard report needs matplotlib, which is not installed" in str(done.exception)
    assert not (folder / "report.html").exists()


def test_without_matplotlib_an_underflow_report_is_a_table_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = UnderflowReport(1.0, {1.0: {"weight": 0.5}}, {1.0: 0.5}, frozenset(), {-3: 4})
    assert report.table().row_count == 2
    with pytest.raises(UsageError, match="zeroshard\\[plots\\]"):
        report.plot(tmp_path / "underflow.png")


def test_a_step_alone_and_a_log_of_losses_alone(tmp_path: Path) -> None:
    assert len(pictures_of(page(read_run(write(tmp_path / "one", [step(1)]))))) == 8
    few = {"step": 1, "samples": 8, "loss": 2.0, "lr": 0.1, "loss_scale": 1.0, "grad_norm": 1.0, "applied": True}
    run = read_run(write(tmp_path / "few", [few, {**few, "step": 2, "loss": None}]))
    assert pictures_of(page(run)) == ["loss", "learning rate", "norm of the gradients before clipping"]


def test_steps_on_the_axis_are_whole(tmp_path: Path) -> None:
    text = page(read_run(write(tmp_path, [step(number, loss=100.0) for number in range(1, 6)])))
    loss = text[text.index("<figcaption>loss") :].partition("</figure>")[0]
    assert ">5</text>" in loss
    assert ">2.5</text>" not in loss


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path, [step(1), step(2)], end='\n{"step": 3, "lo')
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0
    assert "steps.jsonl: line 4 left out, not a JSON object of a step (incomplete?)" in done.output
    assert read_run(folder).series["loss"].at == [1, 2]


def test_a_run_that_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, [step(1), step(2), step(3, sent={"broadcast": 5}), step(2, loss=9.0)])
    run = read_run(folder)
    assert (run.series["loss"].at, run.series["loss"].values) == ([1, 2], [5.0, 9.0])
    assert "broadcast" not in run.group("sent")
    assert "9" in page(run)


def test_a_page_never_takes_the_place_of_a_log(tmp_path: Path) -> None:
    folder = write(tmp_path, [step(1)])
    before = (folder / "steps.jsonl").read_text()
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(folder / "steps.jsonl")])
    assert isinstance(done.exception, UsageError) and "a log's suffix" in str(done.exception)
    assert (folder / "steps.jsonl").read_text() == before


def test_losses_that_are_not_finite_are_said(tmp_path: Path) -> None:
    """Where no loss is finite there is no plot of them that could show it."""
    text = page(read_run(write(tmp_path, [step(number, loss=None) for number in range(3, 7)])))
    assert "loss" not in pictures_of(text)
    assert "<dt>loss not finite</dt><dd>4 times, first at 3</dd>" in text


def test_a_second_run_from_the_start_is_noted(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, [step(1), step(2), step(1, loss=9.0)]))
    assert run.series["loss"].values == [9.0]
    (note,) = run.notes
    assert "more than one run from the start" in note
    assert not read_run(write(tmp_path, [step(1), step(2), step(2)])).notes


ODD_LINES = [
    '{"step": NaN, "loss": 1}', '{"step": Infinity, "loss": 1}', f'{{"step": {"9" * 400}, "loss": 1}}', "[" * 100_000,
    f'{{"step": 3, "loss": {"9" * 400}, "sent": {{"broadcast": {"9" * 400}}}}}', '{"step": 3, "loss": -1e308}',
    '{"run": {"policy": "x", "parameters": "many"}}', '{"run": {"policy": {"parameters": 3}}}',
]  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES)
def test_an_odd_line_does_not_cost_the_others(line: str, tmp_path: Path) -> None:
    folder = write(tmp_path, [step(1), step(2)], end=f"\n{line}\n")
    run = read_run(folder)
    assert run.series["loss"].at[:2] == [1, 2] and run.series["loss"].at[-1] in (2, 3)


def test_a_page_of_odd_lines_has_its_pictures(tmp_path: Path) -> None:
    folder = write(tmp_path, [step(1), step(2)], end="".join(f"\n{line}\n" for line in ODD_LINES))
    assert "loss" in pictures_of(page(read_run(folder)))


def test_bytes_of_a_step_where_not_every_step_says_them(tmp_path: Path) -> None:
    steps = [step(number) for number in range(1, 9)]
    for one in steps:
        if one["step"] % 4:
            del one["sent"]
    sent = read_run(write(tmp_path, steps)).group("sent")["reduce_scatter"]
    assert sent.values == [(2 << 20) / 4, (2 << 20) / 4]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (None, "no log at {run}"),
        ({}, "{run} holds no log: neither steps.jsonl"),
        ({"steps.jsonl": ""}, "holds no step: it is empty"),
        (
            {"steps.jsonl": json.dumps({"run": ABOUT}) + "\n"},
            "holds no step: it is empty, or the run has not finished its first step",
        ),
        ({"steps.jsonl": "what\n"}, "holds no step: line 1 is not a JSON object of a step"),
        ({"job/steps.jsonl": "{}"}, "but these below it do: {run}/job. Pass one of them."),
    ],
)
def test_what_is_no_log_is_a_sentence(files: dict[str, str] | None, expected: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name, content in (files or {}).items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)
    if files == {}:
        run.mkdir()
    done = CliRunner().invoke(app, ["report", str(run)])
    assert isinstance(done.exception, UsageError), done.output
    assert expected.replace("{run}", str(run)) in str(done.exception)
    assert "\n" not in str(done.exception)


def test_where_the_page_cannot_be(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(1)])
    done = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path)])
    assert "is a folder, not a file" in str(done.exception)


def test_long_runs_keep_their_spikes_and_gaps() -> None:
    many = Series(list(range(100_000)), [1.0] * 100_000)
    many.values[54_321] = 99.0
    many.values[10] = float("nan")
    thin = thinned(many)
    assert len(thin.at) <= MAX_POINTS and max(thin.values) == 99.0
    assert thinned(Series([1], [2.0])) == Series([1], [2.0])


def test_a_page_of_a_long_run_stays_small() -> None:
    run = RunLog(Path("x"))
    for number in range(30_000):
        run.add("loss", number, 1.0 + number % 7)
        run.add("memory/parameters", number, 5e8)
    assert len(page(run)) < 400_000
