"""A run's log as one picture, and the errors if parts of it are missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from zeroshard import UsageError
from zeroshard.tools import curves
from zeroshard.tools.curves import draw, read_run
from zeroshard.tools.main import app


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number, "samples": 8 * number, "loss": 5.0 / number, "lr": 1e-3, "grad_norm": 1.0,
        "samples_per_second": 100.0, "tokens_per_second": 12800.0,
        "memory": {"parameters": 30 << 20, "optimizer": 60 << 20}, "peak": 200 << 20, **more,
    }  # fmt: skip


def write(folder: Path, steps: list[dict[str, Any]], end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) for one in ({"run": {"world_size": 2}}, *steps)]
    (folder / "steps.jsonl").write_text("\n".join(lines) + end)
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    figures: list[Any] = []
    save = curves.save
    monkeypatch.setattr(curves, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    return figures


def panels(figure: Any) -> dict[str, list[Any]]:
    """The values of each line, by title of its plot."""
    return {axes.get_title(): [list(line.get_ydata()) for line in axes.lines] for axes in figure.axes}


def test_one_picture_shows_a_run(tmp_path: Path, drawn: list[Any]) -> None:
    folder = write(tmp_path / "run", [step(1), step(2, grad_norm=None), step(4)])
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert done.output.replace("\n", "") == str(folder / "report.png")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    found = panels(drawn[0])
    assert found["loss"] == [[5.0, 2.5, 1.25]]
    assert list(drawn[0].axes[0].lines[0].get_xdata()) == [1, 2, 4]
    assert found["learning rate"] == [[1e-3] * 3]
    assert found["tokens per second"] == [[12800.0] * 3]
    assert found["memory of rank 0, MiB"] == [[60.0] * 3, [30.0] * 3, [200.0] * 3]
    norm = found["gradient norm before clipping"][0]
    assert norm[0] == norm[2] == 1.0 and norm[1] != norm[1]


def test_runs_share_a_picture(tmp_path: Path, drawn: list[Any]) -> None:
    folders = [write(tmp_path / name, [step(1), step(2)]) for name in "ab"]
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(tmp_path / "both.svg")])
    assert done.exit_code == 0, done.output
    assert "<svg" in (tmp_path / "both.svg").read_text()
    assert len(panels(drawn[0])["loss"]) == 2
    assert [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()] == ["a", "b"]


def test_a_long_run_has_a_line_of_means(tmp_path: Path, drawn: list[Any]) -> None:
    draw(
        [read_run(write(tmp_path, [step(number, loss=float(number % 2)) for number in range(1, 201)]))],
        tmp_path / "x.png",
    )
    every, means = panels(drawn[0])["loss"]
    assert len(every) == 200 and means == [0.5] * 50


def test_what_a_log_lacks_is_said_in_the_picture(tmp_path: Path, drawn: list[Any]) -> None:
    few = {"step": 1, "loss": 2.0, "lr": 0.1, "samples_per_second": 3.0}
    draw([read_run(write(tmp_path, [few]))], tmp_path / "x.png")
    texts = {axes.get_title(): [text.get_text() for text in axes.texts] for axes in drawn[0].axes}
    assert texts["memory of rank 0, MiB"] == texts["gradient norm before clipping"] == ["not in the log"]
    assert not texts["samples per second"] and not texts["loss"]


def test_a_missing_log_is_named_before_a_missing_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert isinstance(done.exception, UsageError) and "no log at" in str(done.exception)
    folder = write(tmp_path / "run", [step(1)])
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert isinstance(done.exception, UsageError)
    assert "zeroshard report needs matplotlib, which is not installed: pip install 'zeroshard[plots]'." in str(
        done.exception
    )
    assert not list(folder.glob("*.png"))


@pytest.mark.parametrize(
    ("numbers", "loss", "end", "shown", "note"),
    [
        ([1, 2], 5.0, '{"step": 3, "lo', [1, 2], "left out line 4, not a JSON object of a step (incomplete?)"),
        ([1, 2, 3, 2], 5.0, "", [1, 2], None),  # it went back to a checkpoint
        ([1, 2, 1], 5.0, "", [1], "more than one run from the start"),
        ([3, 4, 5, 6], None, "", [3, 4, 5, 6], "loss not finite 4 times, first at step 3."),
    ],
)
@pytest.mark.quick(4)
def test_what_is_odd_in_a_log_is_noted(
    numbers: list[int], loss: float | None, end: str, shown: list[int], note: str | None, tmp_path: Path
) -> None:
    folder = write(tmp_path, [step(number, loss=loss and loss + at) for at, number in enumerate(numbers)], f"\n{end}")
    run = read_run(folder)
    found, losses = run.series("loss")
    assert found == shown and (loss is None or losses[-1] == loss + len(numbers) - 1)
    assert len(run.notes) == (note is not None) and (note is None or note in run.notes[0])
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0 and (note is None or note in done.output)


ODD_LINES = [
    '{"step": NaN, "loss": 1}', '{"step": Infinity, "loss": 1}', f'{{"step": {"9" * 400}, "loss": 1}}', "[" * 100_000,
    f'{{"step": 3, "loss": {"9" * 400}, "memory": 3, "peak": "many"}}', '{"step": 3, "loss": -1e308, "lr": true}',
    '{"run": {"policy": "x", "parameters": "many"}}', '{"step": 3, "memory": {"parameters": {}}}',
]  # fmt: skip


def test_an_odd_line_does_not_cost_the_others(tmp_path: Path) -> None:
    for line in ODD_LINES:
        assert read_run(write(tmp_path, [step(1), step(2)], f"\n{line}\n")).series("loss")[0][:2] == [1, 2]
    folder = write(tmp_path, [step(1), step(2)], "".join(f"\n{line}\n" for line in ODD_LINES))
    draw([read_run(folder)], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (None, "no log at {run}"),
        ({}, "{run} holds no log: neither steps.jsonl"),
        ({"steps.jsonl": ""}, "holds no step: it is empty"),
        ({"steps.jsonl": '{"run": {}}\n'}, "holds no step: it is empty, or the run has not finished its first step"),
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


def test_a_picture_never_takes_the_place_of_a_log(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [step(1)])
    before = (folder / "steps.jsonl").read_text()
    for out, expected in ((tmp_path, "is a folder, not a file"), (folder / "steps.jsonl", "not the name of a picture")):
        done = CliRunner().invoke(app, ["report", str(folder), "--out", str(out)])
        assert isinstance(done.exception, UsageError) and expected in str(done.exception)
    assert (folder / "steps.jsonl").read_text() == before
