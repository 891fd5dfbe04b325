"""Owns the picture of `zeroshard report`: the reading of `steps.jsonl`, and its curves as one PNG."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zeroshard.engine.monitors import STEPS
from zeroshard.errors import UsageError
from zeroshard.tools.plots import require_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 2**20
_TITLES = {
    "loss": "loss", "lr": "learning rate", "grad_norm": "gradient norm before clipping", "speed": "tokens per second",
    "memory": "memory of rank 0, MiB",
}  # fmt: skip
_LARGEST = 1e300
"""A number of this magnitude or more counts as not finite, since no axis could show it."""


@dataclass
class RunLog:
    """The steps of a run, with rising numbers.

    Attributes:
        notes: sentences about lines that were left out.
    """

    path: Path
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The log's folder, or the file's name if it is not `steps.jsonl`."""
        path = self.path.resolve()
        return path.parent.name if path.name == STEPS else path.stem

    def series(self, *keys: str) -> tuple[list[float], list[float]]:
        """Return the steps that have a value at `entry[key][key]...`, and the values; NaN if a value is not a finite number."""
        at, values = [], []
        for entry in self.steps:
            found: Any = entry
            for key in keys:
                found = found.get(key, math.inf) if isinstance(found, Mapping) else math.inf
            if found is not math.inf:
                at.append(float(entry["step"]))
                values.append(float(found) if _is_finite(found) else math.nan)
        return at, values


def read_run(path: Path) -> RunLog:
    """Read a log: a file, or a folder with `steps.jsonl`. Steps that a resumed run repeated replace the older ones.

    Raises:
        UsageError: there is no log, or no step in it.
    """
    file = _file_of(path)
    run = RunLog(file)
    left_out: list[int] = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and _is_finite(entry.get("step")):
            while run.steps and run.steps[-1]["step"] >= entry["step"]:
                run.steps.pop()
                if not run.steps:
                    run.notes = [f"{file.name}: more than one run from the start; only the last is drawn."]
            run.steps.append(entry)
        elif line.strip() and not (isinstance(entry, dict) and "run" in entry):
            left_out.append(number)
    if not run.steps:
        found = "it is empty, or the run has not finished its first step"
        if left_out:
            found = f"line {left_out[0]} is not a JSON object of a step"
        raise UsageError(f"{file} holds no step: {found}. Name the log of a run that has finished a step.")
    if left_out:
        lines = ", ".join(map(str, left_out[:5])) + ", ..." * (len(left_out) > 5)
        run.notes.append(f"{file.name}: left out line {lines}, not a JSON object of a step (incomplete?).")
    at, losses = run.series("loss")
    broken = [step for step, loss in zip(at, losses, strict=True) if math.isnan(loss)]
    if broken:
        run.notes.append(f"{file.name}: loss not finite {len(broken)} times, first at step {broken[0]:.0f}.")
    return run


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / STEPS).is_file():
        return path / STEPS
    if not path.exists():
        raise UsageError(f"no log at {path}: pass the folder that a run's monitor wrote to.")
    below = [str(log.parent) for log in sorted(path.glob(f"*/{STEPS}"))]
    if below:
        raise UsageError(f"{path} holds no log, but these below it do: {', '.join(below[:3])}. Pass one of them.")
    raise UsageError(
        f"{path} holds no log: neither {STEPS} nor a folder with it. Write one with json_monitor or "
        "zeroshard.progress(log=...)."
    )


def draw(runs: Sequence[RunLog], path: Path) -> None:
    """Write a picture of runs: loss, learning rate, gradient norm, throughput and memory by step. Needs matplotlib."""
    require_matplotlib("a picture of a run")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    axes = figure.subplot_mosaic([["loss", "loss"], ["lr", "grad_norm"], ["speed", "memory"]])
    for run in runs:
        label = run.name if len(runs) > 1 else ""
        _curve(axes["loss"], *run.series("loss"), label)
        axes["lr"].plot(*run.series("lr"))
        _curve(axes["grad_norm"], *run.series("grad_norm"))
        speed = run.series("tokens_per_second")
        if not speed[0]:
            speed = run.series("samples_per_second")
            axes["speed"].set_title("samples per second")
        _curve(axes["speed"], *speed)
        kinds = sorted(
            {kind for entry in run.steps if isinstance(entry.get("memory"), dict) for kind in entry["memory"]}
        )
        for kind in kinds if len(runs) == 1 else ():
            at, values = run.series("memory", kind)
            axes["memory"].plot(at, [value / _MIB for value in values], label=kind)
        at, values = run.series("peak")
        axes["memory"].plot(at, [value / _MIB for value in values], "--", label=f"{label} peak".strip())
    for key, one in axes.items():
        one.set_title(one.get_title() or _TITLES[key], fontsize=11)
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[1]:
            one.legend(frameon=False, fontsize=9)
        if not any(np.size(line.get_xdata()) for line in one.lines):
            one.text(0.5, 0.5, "not in the log", transform=one.transAxes, ha="center", color="gray")
        if key in ("speed", "memory", "lr"):
            one.set_ylim(bottom=0)
        if key != "loss":
            one.set_xlabel("step")
    figure.suptitle(", ".join(f"{run.name}: {len(run.steps):,} steps" for run in runs))
    save(figure, path)


def _curve(axes: Axes, at: list[float], values: list[float], label: str = "") -> None:
    """Draw a series; a long one faintly, with the mean of each 2 % of it."""
    stretch = len(at) // 50
    marker = "." if len(at) < 3 else ""  # a single point does not form a line
    (line,) = axes.plot(at, values, marker=marker, linewidth=1, alpha=0.35 if stretch > 1 else 1)
    if stretch > 1:
        parts = [slice(low, low + stretch) for low in range(0, len(at), stretch)]
        means = [[sum(numbers[part]) / len(numbers[part]) for part in parts] for numbers in (at, values)]
        (line,) = axes.plot(*means, linewidth=1.6, color=line.get_color())
    if label:
        line.set_label(label)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
