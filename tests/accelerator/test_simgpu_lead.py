"""A host far ahead of its device reuses freed memory, and the computation waits for no copy of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simgpu import lead, server

pytestmark = pytest.mark.full


def both(function: Any, moment: str) -> tuple[float, float]:
    """Return what is reserved with the host in step with the device, and with the host ahead."""
    lockstep, ahead = (
        server.call(function, ranks=1, mode="all late", lockstep=lockstep)[0][moment] for lockstep in (True, False)
    )
    return lockstep, ahead


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_unit_takes_the_memory_that_the_one_before_gave_back(moment: str) -> None:
    """Of 24 units with parameters in CPU memory. The allocator cannot see that a late copy is over; streams can be ordered."""
    lockstep, ahead = both(lead.reserved_with_parameters_in_cpu_memory, moment)
    assert ahead <= lockstep + 1.5


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_inputs_in_cpu_memory_leave_the_device(moment: str) -> None:
    """Of 24 checkpoints, two inputs may still be on their way."""
    lockstep, ahead = both(lead.reserved_with_inputs_in_cpu_memory, moment)
    assert ahead <= lockstep + 2
    assert lockstep < lead.BLOCKS / 2


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_waits_for_no_copy_of_gradients(stage: int, bits: int) -> None:
    """In the first microbatch and in later ones, whether the last is declared or not; and the bits do not depend on room."""
    runs = [
        server.call(lead.stalls_in_backward, ranks=1, mode="all late", stage=stage, bits=bits, declared=declared)[0]
        for declared in (True, False)
    ]
    runs.append(
        server.call(lead.stalls_without_room, ranks=1, mode="all late", stage=stage, bits=bits, declared=True)[0]
    )
    assert [run["stalls"] for run in runs[:2]] == [[0, 0, 0], [0, 0, 0]]
    assert sum(runs[2]["stalls"]) > 0, "the counter sees no wait"
    for run in runs[1:]:
        assert run["norms"] == runs[0]["norms"]
        assert torch.equal(run["parameters"], runs[0]["parameters"])
