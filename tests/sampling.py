"""Owns the choice of the quick set: of a test's combinations, a few in which every two values of two axes still meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations

import pytest
import torch

Pair = tuple[Hashable, Hashable]


def pairs(values: Iterable[Hashable]) -> set[Pair]:
    """Every two of a combination's values; the value itself where it has one axis."""
    values = list(values)
    return set(combinations(values, 2)) or {(value, value) for value in values}


def cover(cases: list[set[Pair]]) -> set[int]:
    """Indices of a few cases that hold every pair that any case holds: the one with the most missing pairs, again and again."""
    missing, chosen = set().union(*cases), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def axes(item: pytest.Item) -> list[Hashable]:
    """(argument, value) for each argument that parametrize gives; what is no plain value is known by its identity."""
    given = getattr(item, "callspec", None)
    plain = (str, int, float, bool, type(None))
    values = sorted(given.params.items()) if given else []
    return [(name, repr(value) if isinstance(value, plain) else id(value)) for name, value in values]


def mark_what_is_not_quick(items: list[pytest.Item]) -> None:
    """Mark as `full` what of a test's combinations the quick set leaves out. Whoever has an accelerator runs all that need one."""
    runs_all = torch.accelerator.is_available()
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not (item.get_closest_marker("full") or (runs_all and item.get_closest_marker("accelerator"))):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        chosen = cover([pairs(axes(item)) for item in cases])
        for index, item in enumerate(cases):
            if len(cases) > 1 and index not in chosen:
                item.add_marker("full")
