"""Owns the statistics of repeated runs: medians, spreads, ratios within a round, and tables for a terminal or Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

MIB = 2**20
RESULTS = Path(__file__).parent / "results"
Run = dict[str, Any]
"""The results of one run: "times" in seconds, one for each step, and other measurements."""
Column = tuple[str, Callable[[str], str]]
"""A heading, and a row's cell by the row's name."""


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and, if there are several values, the lowest and the highest: "0.85 (0.83 to 0.88)"."""
    if not values:
        return ""
    median = f"{statistics.median(values):.{digits}f}"
    return median if len(values) == 1 else f"{median} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratios(runs: Sequence[Run | None], bases: Sequence[Sequence[Run | None]], key: str = "times") -> list[float]:
    """Return, for each round in which all ran, the row's median step time divided by the mean of the bases' medians.

    Args:
        runs: one run for each round, or None if it failed. A row that always fails has fewer runs.
        bases: the same for each row to compare with.
    """
    found = []
    for number, run in enumerate(runs):
        against = [one for base in bases if number < len(base) and (one := base[number])]
        if run and against:
            found.append(statistics.median(run[key]) / statistics.mean(statistics.median(one[key]) for one in against))
    return found


def median_of(runs: Sequence[Run | None], key: str) -> float | None:
    """Return the median over all steps of all runs, or over one value per run."""
    values: list[float] = []
    for run in runs:
        if run:
            values += run[key] if isinstance(run[key], list) else [run[key]]
    return statistics.median(values) if values else None


def number(value: float | None, scale: float = 1.0, digits: int = 0, unit: str = "") -> str:
    """Return the text of a value for a cell, or an empty text if there is none."""
    return "" if value is None else f"{value * scale:.{digits}f}{unit}"


def show(title: str, columns: Sequence[Column], rows: Sequence[str], *, markdown: bool) -> None:
    """Print the table with lines and colours, or as Markdown."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    if markdown:
        print("\n".join(markdown_lines([heading for heading, _ in columns], cells)))
        return
    table = Table(title=title, title_justify="left")
    for heading, _ in columns:
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    widest = 2 + sum(
        3 + max(map(len, column)) for column in zip([heading for heading, _ in columns], *cells, strict=True)
    )
    Console(width=max(widest, Console().width)).print(table)


def markdown_lines(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. No cell may contain a vertical bar."""
    assert not any("|" in cell for row in cells for cell in row)
    lines = [headings, ["---"] * len(headings), *cells]
    return [f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines]


def machine() -> dict[str, Any]:
    """Return the conditions of the measurements: the processor, the kernel, torch, and the load when the run began."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release().split("-")[0],
        "torch": torch.__version__,
        "load at start": os.getloadavg()[0],
    }


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(_rounded(results), indent=1) + "\n")
    partial.rename(path)


def load(path: Path) -> dict[str, Any]:
    """Load the results that `save` wrote."""
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def _rounded(value: Any) -> Any:
    """Round floats to 12 significant digits, so that a diff shows no noise."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value
