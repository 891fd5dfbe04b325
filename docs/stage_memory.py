"""Writes the table of docs/which_stage.md, in each language: `python docs/stage_memory.py`. A test holds the pages to it."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import torch

from zeroshard.model.memory import formula
from zeroshard.policy import Policy, Precision

PAGES = [Path(__file__).parent / folder / "which_stage.md" for folder in (".", "zh-CN")]
BEGIN = "<!-- figures: docs/stage_memory.py -->\n"
MODELS = {"1 B": 1e9, "8 B": 8e9, "70 B": 70e9}
DEVICES = (1, 8, 64)
STAGES = range(4)


def gigabytes(nbytes: float) -> str:
    """Write bytes as GB of 1e9 bytes, with one digit after the point below 10. Halves are rounded up."""
    last_digit = Decimal("0.1") if nbytes < 9.95e9 else Decimal(1)
    return f"{(Decimal(nbytes) / 10**9).quantize(last_digit, ROUND_HALF_UP):,}"


def rows() -> list[str]:
    """Return a table row for each model and number of devices: GB of model states on a device, by stage."""
    dtypes = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16).resolve(torch.bfloat16)
    found = []
    for name, numel in MODELS.items():
        for devices in DEVICES:
            stages = [sum(formula(Policy.stage(stage), dtypes, numel, devices).values()) for stage in STAGES]
            cells = [name, str(devices), *(gigabytes(nbytes) for nbytes in stages)]
            found.append(f"| {' | '.join(cells)} |")
    return found


def with_rows(page: str) -> str:
    """Return a page's text with the rows of its table replaced."""
    before, after = page.split(BEGIN)
    lines = after.lstrip("\n").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    table = [*lines[:2], *rows()]
    return before + BEGIN + "\n" + "\n".join([*table, *lines[end:]]) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_rows(page.read_text(encoding="utf-8")), encoding="utf-8")
