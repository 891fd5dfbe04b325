"""Plans compared with the simulated accelerator: allocated, reserved and pinned memory."""

from __future__ import annotations

from typing import Any

import pytest
from simgpu import plans, server

import zeroshard
from zeroshard.tools.planning.segments import Segments

pytestmark = pytest.mark.full

MIB = 1 << 20


def planned(made: dict[str, Any], ranks: int, model: Any = plans.Layers, optimizer: Any = plans.default) -> Any:
    """The same on paper."""
    made_plan = zeroshard.plan(
        model, made, world_size=ranks, batch=plans.samples, optimizer=optimizer, machine="h100", presets=False
    )
    return made_plan.rows[0]


@pytest.mark.parametrize(
    ("stage", "ranks", "optimizer"), [(0, 1, plans.default), (2, 1, plans.fused), (3, 2, plans.default)]
)
def test_a_plan_is_what_the_accelerators_allocator_gives(stage: int, ranks: int, optimizer: Any) -> None:
    """An optimizer without a choice of kernels takes temporaries of all tensors at once there, and not on a CPU."""
    made = plans.config(stage)
    plan = planned(made, ranks, optimizer=optimizer)
    real = server.call(plans.trained, ranks=ranks, made=made, model=plans.Layers, optimizer=optimizer)
    for one in real:
        assert plan.figures.peak.nbytes == pytest.approx(one["allocated"], rel=0.001)
        assert plan.reserved_nbytes == one["reserved"]


def test_offloaded_inputs_of_checkpoints_take_the_planned_cpu_memory() -> None:
    made = plans.config(2, activation_checkpointing={"checkpoint_units": "auto", "cpu_checkpointing": True})
    plan = planned(made, 1, plans.many_inputs, plans.fused)
    real = server.call(plans.trained, ranks=1, made=made, model=plans.many_inputs, optimizer=plans.fused)[0]
    assert plan.figures.host_peak.parts["activations"] == real["pinned"] > 0
    assert plan.figures.peak.nbytes == pytest.approx(real["allocated"], rel=0.001)


def test_blocks_and_segments_are_those_of_the_caching_allocator() -> None:
    """By hand, from its rules."""
    segments = Segments()
    little = segments.take(1)
    assert (little.nbytes, segments.reserved) == (512, 2 * MIB)
    small = segments.take(MIB)
    assert (small.nbytes, segments.reserved) == (MIB, 2 * MIB)
    middle = segments.take(MIB + 1)  # a rest of a buffer of 20 MiB stays for others
    assert (middle.nbytes, segments.reserved) == (MIB + 512, 22 * MIB)
    nearly = segments.take(18 * MIB)  # what is left is too little for another
    assert (nearly.nbytes, segments.reserved) == (19 * MIB - 512, 22 * MIB)
    large = segments.take(10 * MIB + 1)
    assert (large.nbytes, segments.reserved) == (10 * MIB + 512, 34 * MIB)
    for block in (middle, nearly):
        segments.give_back(block)
    assert segments.take(19 * MIB + 1).start == middle.start  # neighbours that are free are one
    assert segments.reserved == 34 * MIB
