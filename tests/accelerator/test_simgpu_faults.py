"""A test of the tests: if a wait on the accelerator's path is removed, some body must fail."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from simgpu import faults, server
from simgpu.rare import EVERY_BODY, OF_FOUR_RANKS

from zeroshard.testing import RankError

Attempt = tuple[str, str]
"""A body, and the mode in which it runs."""

RUN = EVERY_BODY | OF_FOUR_RANKS
PUNISHING = ("all late", "default late", "others slow", "others late")
SEEN = Path(faults.__file__).with_name("seen.json")
"""The attempt that saw each fault. It is tried first, and with other faults of the package."""
QUICK_PACKAGES = ("storage", "gradients", "schedule")
"""The quick set takes out the last wait of each."""


def package(fault: str) -> str:
    module = faults.sites()[fault].module.removeprefix("zeroshard.")
    return next(group for group, modules in faults.GROUPS.items() if module in modules)


def cases() -> list[Any]:
    """Return each fault that has no excuse."""
    names = [name for name, site in faults.sites().items() if site.excuse is None]
    last = {package(name): name for name in names}
    quick = {last[one] for one in QUICK_PACKAGES}
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in names]


def seen() -> dict[str, Attempt]:
    return {fault: (body, mode) for fault, (body, mode) in json.loads(SEEN.read_text()).items()}


def attempts(fault: str) -> list[Attempt]:
    """Return all attempts; those that are likely to see the fault come first."""
    before = seen()
    named = [other for other in before if other in faults.sites()]
    alike = [before[other] for other in named if package(other) == package(fault)]
    rest = [(body, mode) for mode in PUNISHING for body in RUN]
    known = [before[fault]] if fault in before else []
    return list(dict.fromkeys([*known, *reversed(alike), *rest]))


def fails(fault: str, body: str, mode: str) -> bool:
    """Run a body without a wait. A body that takes too long has seen nothing."""
    ranks = 4 if body in OF_FOUR_RANKS else 2
    try:
        server.run(server.Request(RUN[body].__module__, body, {}, mode, ranks, fault=fault))
    except RankError as error:
        return "failed:" in str(error)
    return False


def test_every_wait_is_taken_out_or_listed_with_the_reason() -> None:
    assert not faults.waits_of_none(), "take the module into ROAD of tests/support/simgpu/faults.py, or into ELSEWHERE"
    for package in faults.ELSEWHERE:
        importlib.import_module(f"zeroshard.{package}")


def test_the_faults_that_were_seen_are_those_that_there_are() -> None:
    """A wait that moves to another line or function must take its name with it, or nobody notices when it is lost."""
    known, wanted = seen(), {name for name, site in faults.sites().items() if site.excuse is None}
    assert not known.keys() - wanted, f"no sites any longer: correct {SEEN}"
    assert not wanted - known.keys(), "run the test below with --rest: it says what to add"
    for body, mode in known.values():
        assert body in RUN and mode in PUNISHING


@pytest.mark.parametrize("fault", cases())
def test_every_injected_fault_is_found(fault: str) -> None:
    attempt = next((attempt for attempt in attempts(fault) if fails(fault, *attempt)), None)
    assert attempt is not None, f"nothing fails without: {fault}"
    assert fault in seen(), f"add to {SEEN}: {json.dumps({fault: attempt})}"
