"""The quick set: few cases, and every two values of two axes."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from sampling import cover, mark_what_is_not_quick, pairs

AXES = {"ranks": (1, 2, 4), "optimizer": "abc", "clipped": (False, True), "precision": "fp", "stage": range(4)}


def every_pair(cases: list[dict[str, object]]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}


@pytest.mark.parametrize("legal", [lambda case: True, lambda case: case["ranks"] > 1 or case["stage"] == 0])
def test_every_pair_is_in_a_few_cases(legal: object) -> None:
    cases = [case for values in product(*AXES.values()) if legal(case := dict(zip(AXES, values, strict=True)))]  # type: ignore[operator]
    chosen = [cases[index] for index in cover([pairs(case.items()) for case in cases])]
    assert every_pair(chosen) == every_pair(cases)
    assert 12 <= len(chosen) <= 20 < len(cases)


def test_one_axis_and_none_are_whole() -> None:
    assert cover([pairs([("stage", stage)]) for stage in range(4)]) == {0, 1, 2, 3}
    assert cover([pairs([("stage", stage), ("ranks", ranks)]) for stage in range(4) for ranks in (1, 2)]) == set(
        range(8)
    )
    assert cover([pairs([])]) == set()


class Case:
    """What of a pytest item is looked at."""

    def __init__(self, name: str, marks: set[str], **params: object) -> None:
        self.nodeid, self.marks = f"test.py::{name}{list(params.values())}", marks
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.add(name)


def test_only_what_others_stand_for_is_left_out() -> None:
    bits = (None, torch.bfloat16)
    cases = [Case("many", set(), ranks=r, stage=s, dtype=d) for r in (1, 2) for s in (0, 1) for d in bits]
    single, large = Case("single", set()), Case("large", {"full"})
    mark_what_is_not_quick([*cases, single, large])  # type: ignore[list-item]
    quick = [case for case in (*cases, single, large) if not case.marks]
    assert [case.nodeid for case in quick[-1:]] == [single.nodeid]
    assert every_pair([case.callspec.params for case in quick]) == every_pair([case.callspec.params for case in cases])
    assert len(quick) - 1 < len(cases) and large.marks == {"full"}
    alone = Case("many", set(), ranks=1, stage=0, dtype=None)
    mark_what_is_not_quick([alone])  # type: ignore[list-item]
    assert not alone.marks, "who asks for one case gets it"
