"""What a step of 32 blocks costs by the pretend accelerator's counters, beside FSDP2 on the same device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from simgpu import budgets, server
from simgpu.budgets import total

STAGES = (2, 3)


@cache
def measured(system: str, stage: int, clips: bool) -> dict[str, Any]:
    """Of rank 0."""
    counts: dict[str, Any] = server.call(budgets.one_step, system=system, stage=stage, clips=clips)[0]
    print(f"{system}, stage {stage}, clipping {clips}:")
    for kind in ("collectives", "launches", "synchronisations", "pageable_copies"):
        print(f"    {kind} {total(counts, kind)}: {counts[kind]}")
    return counts


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_fsdp2(stage: int) -> None:
    """Two systems that know nothing of each other, in fp32."""
    ours, theirs = (
        server.call(budgets.one_step, mode="all late", system=system, stage=stage, clips=True, layers=3, bits=32)[0]
        for system in ("zeroshard", "FSDP2")
    )
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_collectives(stage: int) -> None:
    ours, theirs = (total(measured(system, stage, False), "collectives") for system in ("zeroshard", "FSDP2"))
    assert ours <= theirs + 2


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clips", [False, True])
def test_the_host_never_waits(stage: int, clips: bool) -> None:
    assert total(measured("zeroshard", stage, clips), "synchronisations") == 0


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_goes_through_pageable_memory(stage: int) -> None:
    assert total(measured("zeroshard", stage, True), "pageable_copies") == 0


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clips", [False, True])
def test_kernels(stage: int, clips: bool) -> None:
    ours, theirs = (total(measured(system, stage, clips), "launches") for system in ("zeroshard", "FSDP2"))
    assert ours <= theirs
