"""Owns the reading of a run's log: the JSON lines that `JsonLinesMonitor` wrote.

A killed run may leave an incomplete line, which the reader skips with a note. A run that resumes from a checkpoint may
repeat steps: the reader keeps the newer ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.observe.monitors import STEPS

_PLAIN = ("loss", "lr", "loss_scale", "grad_norm", "samples_per_second", "tokens_per_second", "peak", "reserved", "at")
_GROUPS = ("memory", "seconds", "sent")
_LARGEST = 1e300
"""A number of this magnitude or more counts as not finite, since no axis could show it."""


@dataclass
class Series:
    """Numbers by step. NaN marks a number that was not finite."""

    at: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        """Append a number. First drop those at step `at` or later, which belong to a run that was rolled back."""
        self.go_back(at)
        self.at.append(at)
        self.values.append(value)

    def go_back(self, at: float) -> None:
        """Drop the numbers at step `at` or later."""
        while self.at and self.at[-1] >= at:
            self.at.pop()
            self.values.pop()

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass
class RunLog:
    """The steps of a run.

    Attributes:
        about: the run's policy, versions and similar facts, if the log has them.
        series: the series by name (loss, lr, loss_scale, grad_norm, samples_per_second, tokens_per_second, peak,
            reserved, at), and by part (such as memory/parameters, seconds/forward, and sent/all_gather in bytes per
            step).
        applied: 1 for a step that was applied, and 0 for a skipped step.
        notes: sentences about parts of the log that were left out.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=dict)
    applied: Series = field(default_factory=Series)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, at: float, value: float | None) -> None:
        """Add a number of one step; None if it was not finite."""
        self.series.setdefault(name, Series()).add(at, _float(value))

    def get(self, name: str) -> Series:
        """Return a series, or an empty one if the log lacks it."""
        return self.series.get(name, Series())

    def group(self, name: str) -> dict[str, Series]:
        """Return the series of memory, seconds or sent, by part."""
        return {key.partition("/")[2]: one for key, one in self.series.items() if key.startswith(f"{name}/")}

    @property
    def skipped(self) -> list[float]:
        """The steps that were not applied."""
        return [at for at, value in zip(self.applied.at, self.applied.values, strict=True) if not value]


def read_run(path: Path) -> RunLog:
    """Read a log: a file of JSON lines, or a folder with `steps.jsonl`. Raise `UsageError` if it is missing or holds no step."""
    if not path.exists():
        raise UsageError(f"no log at {path}: pass the folder that a run's monitor wrote to.")
    if path.is_file():
        return _read_file(path)
    if (path / STEPS).is_file():
        return _read_file(path / STEPS)
    below = [str(log.parent) for log in sorted(path.glob(f"*/{STEPS}"))]
    if below:
        raise UsageError(f"{path} holds no log, but these below it do: {', '.join(below[:3])}. Pass one of them.")
    raise UsageError(
        f"{path} holds no log: neither {STEPS} nor a folder with it. Write one with json_monitor or "
        "zeroshard.progress(log=...)."
    )


def _read_file(path: Path) -> RunLog:
    run = RunLog(path)
    left_out: list[int] = []
    sent_at: float | None = None  # the last step that logged its bytes
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict):
                entry = {}
            if isinstance(entry.get("run"), dict):
                run.about = entry["run"]
                sent_at = None
            elif math.isfinite(_float(entry.get("step"))):
                at = entry["step"]
                if sent_at is None:
                    sent_at = at - 1
                _add_step(run, entry, at, max(at - sent_at, 1))
                if "sent" in entry:
                    sent_at = at
            elif line.strip():
                left_out.append(number)
    if not run.series:
        found = "it is empty, or the run has not finished its first step"
        if left_out:
            found = f"line {left_out[0]} is not a JSON object of a step"
        raise UsageError(f"{path} holds no step: {found}. Name the log of a run that has finished a step.")
    if left_out:
        lines = ", ".join(map(str, left_out[:5]))
        if len(left_out) > 5:
            lines += ", ..."
        plural = "s" * (len(left_out) > 1)
        run.notes.append(f"{path.name}: line{plural} {lines} left out, not a JSON object of a step (incomplete?).")
    return run


def _add_step(run: RunLog, entry: Mapping[str, Any], at: float, steps: float) -> None:
    """Add a step's figures. `steps` is the number of steps over which the logged bytes were sent."""
    if run.applied.at and run.applied.at[-1] >= at:  # roll back also the series that this step lacks
        if run.applied.at[0] >= at:
            note = f"{run.path.name}: more than one run from the start; the page shows only the last. Use one folder per run."
            run.notes += [note] * (note not in run.notes)
        for series in run.series.values():
            series.go_back(at)
        run.series = {name: series for name, series in run.series.items() if series.at}
    numbers = {name: entry[name] for name in _PLAIN if name in entry}
    for group in _GROUPS:
        parts = entry.get(group)
        if isinstance(parts, dict):
            numbers |= {f"{group}/{part}": value for part, value in parts.items()}
    for name, value in numbers.items():
        if name.startswith("sent/"):
            run.add(name, at, _float(value) / steps)
        elif value is None or _is_number(value):
            run.add(name, at, value)
    run.applied.add(at, float(bool(entry.get("applied", True))))


def _float(value: Any) -> float:
    if _is_number(value) and abs(value) < _LARGEST:
        return float(value)
    return math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
