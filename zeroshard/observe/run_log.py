"""Owns the reading of what a run kept of its steps: JSON lines, or the CSV monitor's files. Called by cli, for report_page.

A run that was killed leaves a half-written line, which is left out and noted. One that went on from a checkpoint goes back in its
steps: the newer ones count.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.observe.monitors import STEPS

_CSV_PREFIX = "Train/Samples/"
_CSV_NAMES = {"train_loss": "loss", "lr": "lr", "loss_scale": "loss_scale", "grad_norm": "grad_norm"}
_CSV_GROUPS = {"elapsed_time_ms_": ("seconds", 1e-3), "memory_bytes_": ("memory", 1.0), "sent_bytes_": ("sent", 1.0)}
_PLAIN = ("loss", "lr", "loss_scale", "grad_norm", "samples_per_second", "tokens_per_second", "peak", "at")
_GROUPS = ("memory", "seconds", "sent")
_LARGEST = 1e300
"""What is larger counts as not finite: no axis could be drawn that far."""


@dataclass
class Series:
    """Numbers along the steps. NaN: it was not finite."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        """One more; what is at `at` or after is of a run that was gone back on."""
        self.go_back(at)
        self.at.append(at)
        self.values.append(value)

    def go_back(self, at: float) -> None:
        """Forget what is at `at` or after."""
        while self.at and self.at[-1] >= at:
            self.at.pop()
            self.values.pop()


@dataclass
class RunLog:
    """What is known of a run.

    Attributes:
        path: where it was read.
        axis: what the series run along: "step" or "samples".
        about: of the run, where the log says so.
        series: by name: loss, lr, loss_scale, grad_norm, samples_per_second, tokens_per_second, peak, at; and by part, such as
            memory/parameters, seconds/forward, sent/all_gather (bytes of one step).
        applied: 1, or 0 for a step that was skipped.
        notes: what was left out, a sentence each.
    """

    path: Path
    axis: str
    about: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    applied: Series = field(default_factory=Series)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, at: float, value: float | None) -> None:
        """A number of one step; None: it was not finite."""
        self.series.setdefault(name, Series()).add(at, _float(value))

    def group(self, name: str) -> dict[str, Series]:
        """Series by part: of memory, seconds or sent."""
        return {key.partition("/")[2]: one for key, one in self.series.items() if key.startswith(f"{name}/")}

    @property
    def skipped(self) -> list[float]:
        """Where a step was not applied."""
        return [at for at, value in zip(self.applied.at, self.applied.values, strict=True) if not value]


def read_run(path: Path) -> RunLog:
    """Read a log: a file of JSON lines, or a folder with `steps.jsonl` or the CSV monitor's files.

    Raises:
        UsageError: there is none, or it holds no step.
    """
    if path.is_file():
        return _read_json_lines(path)
    if not path.exists():
        raise UsageError(f"no log at {path}: give the folder that a run's monitor wrote to.")
    if (path / STEPS).is_file():
        return _read_json_lines(path / STEPS)
    files = sorted(path.glob("Train_Samples_*.csv"))
    if files:
        return _read_csv(path, files)
    below = [one for one in sorted(path.iterdir()) if one.is_dir() and _holds_log(one)]
    if below:
        raise UsageError(
            f"{path} holds no log, but these below it do: {', '.join(map(str, below[:3]))}. Give one of them."
        )
    raise UsageError(
        f"{path} holds no log: neither {STEPS} (json_monitor, zeroshard.progress(log=...)) nor Train_Samples_*.csv (csv_monitor)."
    )


def _holds_log(folder: Path) -> bool:
    return (folder / STEPS).is_file() or any(folder.glob("Train_Samples_*.csv"))


def _read_json_lines(path: Path) -> RunLog:
    run = RunLog(path, "step")
    left_out: list[int] = []
    sent_at: float | None = None  # the step whose bytes were told last
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            told = _object(line)
            if told is not None and isinstance(told.get("run"), dict):
                run.about, sent_at = told["run"], None
                continue
            if told is None or not _is_number(told.get("step")) or math.isnan(_float(told["step"])):
                left_out += [number] if line.strip() else []
                continue
            at = told["step"]
            sent_at = at - 1 if sent_at is None else sent_at
            _add_step(run, told, at, max(at - sent_at, 1))
            sent_at = at if "sent" in told else sent_at
    _finish(run, path, left_out, "a JSON object of a step")
    return run


def _object(line: str) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _add_step(run: RunLog, told: Mapping[str, Any], at: float, steps: float) -> None:
    """`steps`: in which what it says to be sent was sent."""
    if run.applied.at and run.applied.at[-1] >= at:  # also those go back of which this step does not tell
        if run.applied.at[0] >= at:
            run.notes.append(
                f"{run.path.name}: it holds more than one run from the start, and the page only the last. Give each a folder."
            )
        for series in run.series.values():
            series.go_back(at)
        run.series = {name: series for name, series in run.series.items() if series.at}
    numbers = {name: told[name] for name in _PLAIN if name in told}
    for group in _GROUPS:
        parts = told.get(group)
        numbers |= {f"{group}/{part}": value for part, value in parts.items()} if isinstance(parts, dict) else {}
    for name, value in numbers.items():
        if value is None or _is_number(value):
            run.add(name, at, _float(value) / steps if name.startswith("sent/") else value)
    run.applied.add(at, float(bool(told.get("applied", True))))


def _float(value: float | None) -> float:
    return float(value) if value is not None and abs(value) < _LARGEST else math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_csv(folder: Path, files: Sequence[Path]) -> RunLog:
    run = RunLog(folder, "samples")
    for path in files:
        left_out: list[int] = []
        name, factor, rows = "", 1.0, 0
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for number, row in _rows(file.read()):
                if row[:1] == ["samples"] and len(row) == 2:
                    name, factor = _csv_name(row[1])
                elif not (name and _add_row(run, name, factor, row)):
                    left_out.append(number)
                else:
                    rows += 1
        if left_out and rows:
            run.notes.append(_left_out(path, left_out, "a row of samples and a number"))
    norms = run.series.get("grad_norm", Series())
    for at, norm in zip(norms.at, norms.values, strict=True):
        run.applied.add(at, float(math.isfinite(norm)))
    _finish(run, folder, [], "")
    return run


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """Rows that are there, by number. A last line without an end is half-written: a number in it may lack digits."""
    whole, _, rest = text.rpartition("\n")
    for number, row in enumerate(csv.reader(whole.splitlines()), start=1):
        if row:
            yield number, row
    if rest:
        yield text.count("\n") + 1, [rest]


def _csv_name(told: str) -> tuple[str, float]:
    """Our name of a figure, and what its numbers are multiplied by."""
    name = told.removeprefix(_CSV_PREFIX)
    for prefix, (group, factor) in _CSV_GROUPS.items():
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}", factor
    return _CSV_NAMES.get(name, name), 1.0


def _add_row(run: RunLog, name: str, factor: float, row: Sequence[str]) -> bool:
    try:
        at, value = float(row[0]), float(row[1])
    except (ValueError, IndexError):
        return False
    run.add(name, at, value * factor)
    return True


def _finish(run: RunLog, path: Path, left_out: Sequence[int], what: str) -> None:
    if not run.series:
        found = (
            f"line {left_out[0]} is not {what}" if left_out else "it is empty, or the run has not ended its first step"
        )
        raise UsageError(f"{path} holds no step: {found}.")
    if left_out:
        run.notes.append(_left_out(path, left_out, what))


def _left_out(path: Path, numbers: Sequence[int], what: str) -> str:
    lines = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"{path.name}: line{'s' if len(numbers) > 1 else ''} {lines} left out, not {what} (half-written?)."
