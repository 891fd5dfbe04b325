"""Owns the figures of docs/accelerators_measured.md: writes the results of `make accelerator` into the page.

    python benchmarks/accelerator_page.py runs/accelerator/results.json docs/accelerators_measured.md

It replaces everything between the page's two marks, and refuses figures of a rehearsal.
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
UNITS = {"gib": "GiB", "ms": "ms", "b": "B"}
HEADINGS = {
    "x_first": "time / first system",
    "host_waits": "host synchronisations",
    "step_s": "step, s",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "tflops": "TFLOP/s",
}


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
        lines += [*_table(counted(found["rows"]) if part == "right" else found["rows"]), ""]
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


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["No row."]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    heads = [_head(column) for column in columns]
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(columns), *cells)]


def _head(column: str) -> str:
    """Return a column's heading: the key of a figure ends with its unit, as in `peak_gib`."""
    *words, last = column.split("_")
    if words and last in UNITS:
        return f"{' '.join(words)}, {UNITS[last]}"
    return HEADINGS.get(column, column.replace("_", " "))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")


def main() -> None:
    results, page = map(Path, sys.argv[1:3])
    page.write_text(filled(page.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    main()
