"""Owns the rows of the table in step.py: a system from systems.py in an environment, with a short name that selects it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch

from jobs import GLOO, KEEPS_PAGES

DEEPSPEED = "deepspeed"


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    system: str
    """A key of systems.SYSTEMS."""
    label: str
    environment: dict[str, str] = field(default_factory=dict)
    by_default: bool = True
    measures_memory: bool = True
    is_training: bool = True
    """Whether the losses must equal DDP's."""


def _ours() -> dict[str, Row]:
    rows = {}
    stages = {
        "zs0": "stage 0",
        "zs1": "stage 1",
        "zs2": "stage 2",
        "zs3-kept": "stage 3, keeps units",
        "zs3": "stage 3",
    }
    for key, stage in stages.items():
        name, sharded = f"zeroshard {stage}", key != "zs0"
        rows[key] = Row(name, name)
        rows[f"{key}@gloo"] = Row(name, f"{name}; over gloo", GLOO, by_default=sharded)
        rows[f"{key}@malloc"] = Row(name, f"{name}; malloc keeps pages", KEEPS_PAGES, by_default=sharded)
    return rows


FIRST, LAST = "ddp", "ddp-again"
"""The baseline, which runs twice in each round to show the noise."""
RIVAL = "fsdp2"
ROWS: dict[str, Row] = {
    FIRST: Row("DDP", "DDP, fused AdamW"),
    "ddp@malloc": Row("DDP", "DDP, fused AdamW; malloc keeps pages", KEEPS_PAGES),
    "floor": Row("floor: no communication", "floor: ranks without communication", is_training=False, measures_memory=False),
    "floor@malloc": Row(
        "floor: no communication", "floor; malloc keeps pages", KEEPS_PAGES, by_default=False, is_training=False, measures_memory=False
    ),
    "zro": Row("DDP + torch ZeroRedundancyOptimizer", "DDP + torch ZeroRedundancyOptimizer"),
    "fsdp2-kept": Row("FSDP2, keeps units", "FSDP2, keeps units"),
    RIVAL: Row("FSDP2", "FSDP2, reshards units"),
    **{
        f"{DEEPSPEED}{stage}": Row(f"DeepSpeed stage {stage}", f"DeepSpeed stage {stage}") for stage in (1, 2, 3)
    },
    **_ours(),
    LAST: Row("DDP", "DDP, fused AdamW, again", measures_memory=False),
}  # fmt: skip


def chosen(patterns: Iterable[str], *, has_deepspeed: bool) -> dict[str, Row]:
    """Return the rows whose short names match ("zs3*"), or the default rows. DDP is always the first and the last.

    Raises:
        ValueError: a pattern matches no row.
    """
    has_deepspeed = has_deepspeed or importlib.util.find_spec("deepspeed") is not None
    patterns = [pattern for text in patterns for pattern in text.split(",")]
    for pattern in patterns:
        if not any(fnmatch(key, pattern) for key in ROWS):
            raise ValueError(f"no row is named {pattern}: choose of {', '.join(ROWS)}")

    def is_chosen(key: str) -> bool:
        if key in (FIRST, LAST):
            return True
        if patterns:
            return any(fnmatch(key, pattern) for pattern in patterns)
        return ROWS[key].by_default and (has_deepspeed or not key.startswith(DEEPSPEED))

    return {key: row for key, row in ROWS.items() if is_chosen(key)}
