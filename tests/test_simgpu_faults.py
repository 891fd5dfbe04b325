"""A test of the tests: waits of the accelerator's road are taken out in turn, and some body must see it."""

# ruff: noqa: E501  (the names of faults are the source's lines)

from __future__ import annotations

import pytest
from simgpu import faults, server
from simgpu.rare import EVERY_BODY

from zeroshard.testing import RankError

UNSEEN: dict[str, str] = {
    "parameters.parameter_bucket ParameterBucket._make_master: master.wait()": "it bounds memory, and orders nothing: whoever reads the slot waits for the write, which keeps its source; without it the "
    "whole values of many units would be alive at start-up",
    "parameters.parameter_bucket ParameterBucket.take_masters: self.rests[rank].write(values).wait(values.device)": "master weights beside what rests are of another dtype, so what travels is a copy that was cast, and the scratch that is given "
    "back next is read by nobody; the wait is what `Slot.write` asks for",
}
"""Waits that no body can miss, and why."""
SUSPECTS: dict[str, tuple[str, ...]] = {
    "storage.transfers": ("cpu_memory_in_16_bits", "slots", "sub_groups"),
    "storage.memory_slot": ("cpu_memory", "slots", "cpu_memory_in_16_bits", "parking"),
    "storage.base": ("cpu_memory",),
    "storage.buffer_pool": ("sub_groups",),
    "storage.disk": ("slots", "disk"),
    "storage.direct_file": ("disk",),
    "collectives.native": ("stages",),
    "collectives.grouped": ("stages",),
    "parameters.parameter_bucket": ("reads_and_writes", "written_by_all", "checkpoints", "disk"),
    "parameters.parameter_bucket ParameterBucket.__init__": ("late_files",),
    "parameters.parameter_bucket ParameterBucket._spread": ("hosts",),
    "parameters.parameter_bucket ParameterBucket.settle": ("hosts",),
    "parameters.parameter_bucket ParameterBucket.take_rows": ("nested",),
    "parameters.parameter_bucket ParameterBucket.take_masters": ("masters_set",),
    "parameters.away": ("cpu_memory",),
    "gradients.gradient_bucket": ("stages", "error_roads"),
    "gradients.gradient_bucket GradientBucket.finish_reduction": ("several_backwards", "stages"),
    "recompute.saved_inputs": ("activation_checkpointing",),
    "recompute.saved_inputs Partition": ("partitioned_activations",),
    "step.parking": ("parking",),
    "step.parking Parking._copy": ("parking_on_late_files",),
    "step.resident": ("sub_groups", "disk"),
    "step.resident Frame": ("late_files",),
    "step.resident Resident.abandon": ("failing_disk", "forgotten_reads"),
    "step.resident Resident.enter": ("unclipped", "sub_groups", "disk"),
    "step.resident Resident.refresh": ("states_at_once",),
    "step.sub_groups": ("sub_groups",),
    "step.sub_groups SubGroups.opened": ("states_at_once",),
    "schedule.unit": ("stages", "error_roads", "reads_and_writes"),
    "schedule.unit Unit.written_since": ("nested",),
    "zero_redundancy.parameter_bucket": ("zero_redundancy",),
    "zero_redundancy.optimizer_state": ("zero_redundancy",),
    "born": ("sharded_init",),
}
"""Who is asked, by how names begin: the longest beginning counts."""
PUNISHING = ("all late", "default late", "others slow", "others late")
QUICK = (
    "storage.transfers _Copy",
    "storage.transfers Copies",
    "collectives.native",
    "collectives.grouped",
    "recompute",
)


def who_sees(fault: str) -> str | None:
    """The body and the mode in which it fails. One that takes too long has seen nothing."""
    suspects = SUSPECTS[max((name for name in SUSPECTS if fault.startswith(name)), key=len)]
    for mode in PUNISHING:
        for body in suspects:
            function = EVERY_BODY[body]
            request = server.Request(function.__module__, function.__qualname__, {}, mode, 2, fault=fault)
            try:
                server.run(request)
            except RankError as error:
                if "failed:" in str(error):
                    return f"{body}, {mode}"
    return None


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(name, marks=() if name.startswith(QUICK) else pytest.mark.full)
        for name in faults.sites()
        if name not in UNSEEN
    ],
)
def test_every_planted_fault_is_found(fault: str) -> None:
    assert who_sees(fault) is not None, f"nothing fails without: {fault}"


def test_what_cannot_be_missed_is_there() -> None:
    assert UNSEEN.keys() <= faults.sites().keys()
