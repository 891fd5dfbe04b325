"""The cost of a step in the simulated accelerator's counters, compared with FSDP2 on the same device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from simgpu import budgets, server
from simgpu.budgets import total

pytestmark = pytest.mark.full

STAGES = pytest.mark.parametrize("stage", [2, 3])
LAYERS = pytest.mark.parametrize("layers", [6, pytest.param(32, marks=pytest.mark.full)])
"""The counters of 32 are the table of docs/accelerators.md: `pytest --rest -s` prints them."""


@cache
def measured(system: str, stage: int, clips: bool, layers: int) -> dict[str, Any]:
    """Count what a step costs on rank 0."""
    options = {"system": system, "stage": stage, "clips": clips, "layers": layers}
    counts: dict[str, Any] = server.call(budgets.one_step, **options)[0]
    print(f"{system}, stage {stage}, clipping {clips}, {layers} blocks:")
    for kind in ("collectives", "launches", "synchronisations", "pageable_copies"):
        print(f"    {kind} {total(counts, kind)}: {counts[kind]}")
    return counts


@LAYERS
@STAGES
def test_a_step_has_no_more_collectives_than_fsdp2s(stage: int, layers: int) -> None:
    ours, theirs = (total(measured(system, stage, False, layers), "collectives") for system in ("zeroshard", "FSDP2"))
    assert ours <= theirs


@pytest.mark.full
@LAYERS
def test_a_step_of_stage_2_launches_fewer_kernels_than_fsdp2s(layers: int) -> None:
    ours, theirs = (total(measured(system, 2, False, layers), "launches") for system in ("zeroshard", "FSDP2"))
    assert ours < theirs


@pytest.mark.every
@LAYERS
@STAGES
@pytest.mark.parametrize("clips", [False, True])
def test_the_host_never_waits(clips: bool, stage: int, layers: int) -> None:
    assert total(measured("zeroshard", stage, clips, layers), "synchronisations") == 0


@pytest.mark.every
@LAYERS
@STAGES
@pytest.mark.parametrize("clips", [False, True])
def test_nothing_goes_through_pageable_memory(clips: bool, stage: int, layers: int) -> None:
    assert total(measured("zeroshard", stage, clips, layers), "pageable_copies") == 0


@pytest.mark.parametrize("door", ["engine", "Trainer"])
def test_bf16_without_overflow_checks_makes_the_host_wait_for_nothing(door: str) -> None:
    counts = server.call(budgets.unchecked_step, mode="all late", door=door)[0]
    assert budgets.total(counts, "synchronisations") == 0, counts
    assert counts["norm"] > 0
