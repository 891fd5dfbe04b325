"""Owns the figures of docs/accelerators.md: writes the results of `make accelerator` into the page.

    python benchmarks/accelerator_page.py runs/accelerator/results.json docs/accelerators.md

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
    "right": "What is right",
    "memory": "Memory of a Llama of 1.3 B parameters",
    "speed": "A step",
    "offload": "States elsewhere",
}


def filled(page: str, results: dict[str, Any]) -> str:
    """Return the page with these results between its marks.

    Raises:
        ValueError: the page has no marks, or the results are a rehearsal's.
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
        where = ", ".join(str(about[key]) for key in ("device", "torch") if key in about)
        lines += [
            f"### {title}",
            "",
            f"{where}; the part took {found['seconds']:.0f} s, and its end: {found['end']}.",
            "",
        ]
        lines += [*_table(found["rows"]), ""]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["No row."]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    heads = [column.replace("_", " ") for column in columns]
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(columns), *cells)]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")


def main() -> None:
    results, page = map(Path, sys.argv[1:3])
    page.write_text(filled(page.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    main()
