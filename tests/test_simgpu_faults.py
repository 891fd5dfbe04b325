"""A test of the tests: waits of the accelerator's road are taken out in turn, and some body must see it."""

# ruff: noqa: E501  (the names of faults are the source's lines)

from __future__ import annotations

import pytest
from simgpu import faults, server
from simgpu.bodies import BODIES

from zeroshard.testing import RankError

UNSEEN: dict[str, str] = {
    "storage.disk DiskSlot.prefetch: self.wait()": "every write is over there: it raises what went wrong with them",
    "parameters.parameter_bucket ParameterBucket.__init__: self._resting.wait()": "it raises at once what went wrong; a later read waits for the write itself",
    "parameters.parameter_bucket ParameterBucket._make_master: master.wait()": "it raises at once what went wrong; a later read waits for the write itself",
    "parameters.parameter_bucket ParameterBucket.take_rows: rest.write(self.rows[rank]).wait(self.rows.device)": "the rows are given back next, which record_stream sees to, and not written to",
    "step.parking Parking._copy: one.content.wait()": "it raises what went wrong before memory is given back; a later read waits for the write itself",
    "gradients.gradient_bucket GradientBucket.start_gather: self.wait_gather()": "finish_reduction, which comes before it, has waited",
    "step.resident Frame.empty: transfer.wait(CPU)": "Resident.enter has waited for the reads, and a slot orders its own writes",
    "step.resident Resident._hold_read: self._frame.hold(transfer)": "Resident.enter has waited for the reads",
}
"""Waits that no body misses, and why."""
NO_BODY_YET = {
    "storage.transfers Copies._staged: self.copy(part, cast, after)",
    "storage.memory_slot MemorySlot.empty: self._in_flight.wait(self._memory.device)",
    "storage.memory_slot MemorySlot.write: self._copies.copy(self._memory, source, self._in_flight)",
    "parameters.parameter_bucket ParameterBucket.take_masters: self.rests[rank].write(values).wait(values.device)",
    "gradients.gradient_bucket GradientBucket.finish_reduction: self.wait_gather()",
    "recompute.saved_inputs Partition.__call__: self._collectives.all_gather(rows, 0, 'all-gather of partitioned activations').wait()",
    "step.resident Resident.refresh: self._reading.pop().wait(self.shard.step.device)",
    "step.resident Resident.enter: slot.wait()",
    "step.resident Resident.abandon: transfer.wait(CPU)",
    "step.resident Resident.abandon: slot.wait()",
    "step.sub_groups SubGroups.opened: resident.shard.master.wait()",
    "schedule.unit Unit.written_since: bucket.wait_unsharded()",
    "zero_redundancy.optimizer_state _bring: pending.wait()",
}
"""Waits whose absence no body was seen to notice, and that may well be needed."""
SUSPECTS: dict[str, tuple[str, ...]] = {
    "storage.transfers": ("cpu_memory_in_16_bits", "slots", "sub_groups"),
    "storage.memory_slot": ("slots", "cpu_memory_in_16_bits", "parking"),
    "storage.base": ("cpu_memory",),
    "storage.buffer_pool": ("sub_groups",),
    "storage.disk": ("slots", "disk"),
    "storage.direct_file": ("disk",),
    "collectives.native": ("stages",),
    "collectives.grouped": ("stages",),
    "parameters.parameter_bucket": ("reads_and_writes", "written_by_all", "checkpoints", "disk"),
    "parameters.away": ("cpu_memory",),
    "gradients.gradient_bucket": ("stages", "error_roads"),
    "recompute.saved_inputs": ("activation_checkpointing",),
    "step.parking": ("parking",),
    "step.resident": ("sub_groups", "disk"),
    "step.sub_groups": ("sub_groups",),
    "schedule.unit": ("stages", "error_roads", "reads_and_writes"),
    "zero_redundancy.parameter_bucket": ("zero_redundancy",),
    "zero_redundancy.optimizer_state": ("zero_redundancy",),
    "born": ("sharded_init",),
}
"""Who is asked first."""
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
    for mode in PUNISHING:
        for body in SUSPECTS[fault.partition(" ")[0]]:
            function = BODIES[body]
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
        if name not in UNSEEN and name not in NO_BODY_YET
    ],
)
def test_every_planted_fault_is_found(fault: str) -> None:
    assert who_sees(fault) is not None, f"nothing fails without: {fault}"
