"""Owns the choice of parameter combinations: the quick set has one of each test, and the rest every pair of values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations

import pytest
import torch
from promises import promised

Need = tuple[Hashable, ...]


def values(axes: Iterable[Hashable]) -> set[Need]:
    """Return each value of a combination. A test without parameters has one empty combination."""
    return {(value,) for value in axes} or {()}


def pairs(axes: Iterable[Hashable]) -> set[Need]:
    """Return every pair of a combination's values, and each single value."""
    axes = list(axes)
    return set(combinations(axes, 2)) | values(axes)


def cover(cases: list[set[Need]], chosen: Iterable[int] = ()) -> set[int]:
    """Return indices of a few cases, including `chosen`, that together cover everything that any case covers.

    The choice is greedy: the case with the most missing elements comes next. Ties go to the case with the least used values,
    then to the last case, which has higher stages, more ranks and fewer bits.
    """
    picked = set(chosen)
    missing = set().union(*cases) - set().union(*(cases[index] for index in picked))
    uses = Counter(value for index in picked for value in cases[index])

    def worth(index: int) -> tuple[int, int, int]:
        return len(cases[index] & missing), -sum(uses[value] for value in cases[index]), index

    while missing:
        best = max(range(len(cases)), key=worth)
        picked.add(best)
        missing -= cases[best]
        uses.update(cases[best])
    return picked


def axes(item: pytest.Item) -> list[Hashable]:
    """Return (argument, value) for each parametrized argument. Objects are compared by identity."""
    given = getattr(item, "callspec", None)
    plain = (str, int, float, bool, type(None))
    of_item = sorted(given.params.items()) if given else []
    return [(name, repr(value) if isinstance(value, plain) else id(value)) for name, value in of_item]


def sample(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the quick set, and the rest. A combination in neither is not run.

    A case that is marked `full` belongs to the rest. Of a test of a promise (promises/README.md), the quick set has each value
    of each parameter once. Of any other test it has the last of these cases, which has the highest stage, or the last n if it
    is marked `quick(n)`. The rest has all other combinations of a test that is marked `every`. A machine with an accelerator
    runs every combination that needs one.
    """
    quick, rest = [], []
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        small = [index for index, case in enumerate(cases) if not case.get_closest_marker("full")]
        first = {small[number] for number in cover([values(axes(cases[index])) for index in small])}
        few = cases[0].get_closest_marker("quick")
        if few or (f"{cases[0].path.parent.name}/{cases[0].path.name}", name.rpartition("::")[2]) not in promised():
            first = set(sorted(first)[-(few.args[0] if few else 1) :])
        if torch.accelerator.is_available() and cases[0].get_closest_marker("accelerator"):
            first = set(range(len(cases)))
        second = cover([pairs(axes(case)) for case in cases], first) - first
        if cases[0].get_closest_marker("every"):
            second = set(range(len(cases))) - first
        quick += [cases[index] for index in sorted(first)]
        rest += [cases[index] for index in sorted(second)]
    return quick, rest
