"""Owns the measurements in benchmarks/results/accelerator.md: writes the results of `make accelerator` into the page.

    python benchmarks/accelerator_page.py runs/accelerator/results.json benchmarks/results/accelerator.md

It replaces everything between the page's two marks and refuses results from a rehearsal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
TITLES = {
    "facts": "The machine",
    "right": "Correctness",
    "memory": "Memory of a Llama of 1.3 B parameters",
    "speed": "Speed of a step",
    "offload": "Offload",
}
UNITS = {"gib": "GiB", "ms": "ms", "b": "billions"}
HEADINGS = {
    "plan_gib": "plan: peak allocated, GiB",
    "plan_reserved_gib": "plan: peak reserved, GiB",
    "formula_gib": "formula: model states, GiB",
    "report_gib": "memory_report() after the backward, GiB",
    "peak_gib": "peak allocated, GiB",
    "reserved_gib": "peak reserved, GiB",
    "driver_used_gib": "device memory in use, GiB",
    "after_forward_gib": "allocated after the forward, GiB",
    "kept": "times that memory was not freed",
    "ms": "step, ms",
    "x_first": "time / first system",
    "host_waits": "host synchronisations",
    "idle_share": "share of time that the device is idle",
    "where": "offload",
    "ratio": "share of optimizer states offloaded",
    "step_s": "step, s",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "tflops": "TFLOP/s",
    "retries": "retried allocations",
    "host_left_gib": "CPU memory left, GiB",
    "share": "speed relative to row 1",
}
PLACES = {
    "device": "none",
    "optimizer": "optimizer and gradients, to CPU memory",
    "all": "all states, to CPU memory",
    "disk": "optimizer and gradients, to disk",
    "FSDP2": "all states, to CPU memory, by FSDP2",
}
"""The text of each `where` of the part `offload`."""
PHRASES = {
    "feature": "training with each feature",
    "free, of total": "free of total",
    "host memory": "CPU memory",
    "driver_version,": "nvidia-smi: driver_version,",
    "pinning": "pinning CPU memory",
    "nccl forced": "policies with forced NCCL collectives",
    ", in turns": ", timed in turns",
    "stage 0, twice": "stage 0, two runs",
    "rests as masters": "master weights at rest",
    "with masters": "with fp32 master weights",
    "collectives forced": "forced collectives",
    "reduces fp32": "fp32 reductions",
    "reduces bf16": "bf16 reductions",
}
"""Short texts in results, and their longer forms on the page."""


def filled(page: str, results: dict[str, Any]) -> str:
    """Return the page with these results between its marks.

    Raises:
        ValueError: the page has no marks, or the results come from a rehearsal.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one {BEGIN} and one {END}.")
    if any(part.get("about", {}).get("rehearsal") for part in results["parts"].values()):
        raise ValueError("these are the results of a rehearsal: run make accelerator on an accelerator.")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(results)}\n{END}{after}"


def tables(results: dict[str, Any]) -> str:
    """Return the parts' tables in Markdown."""
    lines: list[str] = []
    for part, title in TITLES.items():
        found = results["parts"].get(part)
        if found is None:
            continue
        about = found.get("about", {})
        where = f"{about.get('device', 'an unknown device')}, torch {about.get('torch', 'unknown')}"
        lines += [
            f"## {title}",
            "",
            f"{where}. This part took {found['seconds']:.0f} s. Status: {found['end']}.",
            "",
        ]
        convert = {"right": counted, "offload": placed}.get(part, list)
        lines += [*_table(convert(found["rows"])), ""]
    return "\n".join(lines)


def counted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each check of the part `right`: the comparisons' count by result, and the names of wrong or skipped ones."""
    checks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        checks.setdefault(row["what"].partition(": ")[0], []).append(row)
    found = []
    for check, members in checks.items():
        results: dict[str, list[str]] = {}
        for row in members:
            results.setdefault(row["result"].partition(": ")[0], []).append(row["what"].partition(": ")[2])
        if len(members) == 1:
            said = members[0]["result"]
        else:
            named = ("WRONG", "left out")
            said = "; ".join(
                f"{len(names)} {kind}" + (f" ({'; '.join(names)})" if kind in named else "")
                for kind, names in results.items()
            )
        worst = [float(row["result"].rpartition(" ")[2]) for row in members if "differs by" in row["result"]]
        found.append({"check": check, "result": said, "largest difference": max(worst, default=None)})
    return found


def placed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the part `offload` with their places in words. The row without offload has no share of states."""
    found = []
    for row in rows:
        where = row["where"]
        ratio = None if where == "device" else row.get("ratio")
        found.append(row | {"where": PLACES.get(where, where), "ratio": ratio})
    return found


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["No row."]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    heads = [_head(column) for column in columns]
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(columns), *cells)]


def _head(column: str) -> str:
    """Return a column's heading: from `HEADINGS`, or from the key of a value, which ends with its unit (`parameters_b`)."""
    if column in HEADINGS:
        return HEADINGS[column]
    *words, last = column.split("_")
    if words and last in UNITS:
        return f"{' '.join(words)}, {UNITS[last]}"
    return column.replace("_", " ")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    text = str(value).replace("|", "/").replace("\n", " ")
    for short, long in PHRASES.items():
        text = text.replace(short, long)
    return text


def main() -> None:
    results, page = map(Path, sys.argv[1:3])
    page.write_text(filled(page.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    main()
