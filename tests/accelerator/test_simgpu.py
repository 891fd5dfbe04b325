"""Training on the simulated accelerator, with late kernels: the bits equal the CPU's, or are the same under all policies."""

from __future__ import annotations

import pytest
import torch
from simgpu import device, server
from simgpu.device import MODES
from simgpu.rare import EVERY_BODY, OF_FOUR_RANKS

from zeroshard.testing import RankError

QUICK = [("stages", "all late", 2), ("cpu_memory", "all late", 2)]
"""What every training on an accelerator uses, and what most offloads use."""
OF_FILES = ("disk", "slots", "asynchronous_checkpoints", "late_files", "parking_on_late_files", "failing_disk")
OTHERS = [mode for mode in MODES if mode not in ("all late", "others slow")]
RUN = EVERY_BODY | OF_FOUR_RANKS
RANKS = {**dict.fromkeys(EVERY_BODY, 2), **dict.fromkeys(OF_FOUR_RANKS, 4)}
CASES = [(body, "all late", RANKS[body]) for body in RUN]
CASES += [(body, OTHERS[number % len(OTHERS)], RANKS[body]) for number, body in enumerate(RUN)]
CASES += [(body, "others slow", 2) for body in OF_FILES]
CASES += [(body, "all late", 3) for body in ("stages", "whole_parameters", "checkpoints", "cpu_memory")]


@pytest.mark.every
@pytest.mark.parametrize(
    ("body", "mode", "ranks"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.full, id="-".join(map(str, case)))
        for case in CASES
    ],
)
def test_no_wait_is_missing(body: str, mode: str, ranks: int) -> None:
    server.call(RUN[body], ranks=ranks, mode=mode)


# ---------------------------------------------------------------------- the device itself


def _freed(rank: int, waits: bool) -> bool:
    """A side stream reads what the default stream has freed. Returns whether it found the values."""
    side = torch.Stream(device.device())
    value = torch.ones(1000, device=device.device())
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        total = value.sum()
    if waits:
        value.record_stream(side)
    del value
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.current_stream().wait_stream(side)
    return total.item() == 1000


def _unordered(rank: int, waits: bool) -> bool:
    """Two streams write to and read from one tensor."""
    side = torch.Stream(device.device())
    value = torch.zeros(1000, device=device.device())
    torch.accelerator.synchronize()
    with side:
        value.fill_(1)
    if waits:
        torch.accelerator.current_stream().wait_stream(side)
    return value.sum().item() == 1000


def _pinned(rank: int, waits: bool) -> bool:
    """The host reads pinned memory that a copy was started into."""
    value = torch.ones(1000, device=device.device())
    landing = torch.zeros(1000, pin_memory=True)
    landing.copy_(value, non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    return bool((landing == 1).all())


def _pageable(rank: int, waits: bool) -> bool:
    """From pageable memory a copy has read its source when it returns; to such memory it waits."""
    source = torch.ones(1000)
    value = source.to(device.device(), non_blocking=True)
    source.zero_()
    landing = torch.zeros(1000)
    landing.copy_(value, non_blocking=True)
    return bool((landing == 1).all())


def _collective(rank: int, waits: bool) -> bool:
    """A collective runs on a stream of the group's; its `wait` is that of a stream."""
    value = torch.full((1000,), float(rank + 1), device=device.device())
    work = torch.distributed.all_reduce(value, async_op=True)
    assert work is not None
    if waits:
        before = sum(device.counts().synchronisations.values())
        work.wait()
        assert sum(device.counts().synchronisations.values()) == before
    return value.sum().item() == 3000


@pytest.mark.parametrize("case", [_freed, _unordered, _pinned, _pageable, _collective], ids=lambda case: case.__name__)
def test_who_waits_too_little_is_punished(case: object) -> None:
    for mode in ("all late", "others late"):
        assert server.call(case, mode=mode, waits=True) == [True, True]
    if case is not _pageable:
        assert server.call(case, mode="all late", waits=False) == [False, False]


def _fails(rank: int) -> None:
    torch.ones(2, device=device.device()) + torch.ones(2, device=device.device())
    device.native().launch(0, lambda: 1 / 0)
    torch.accelerator.synchronize()


def test_a_kernel_that_fails_is_told_at_the_next_synchronisation() -> None:
    with pytest.raises(RankError, match="a kernel failed on simgpu: ZeroDivisionError"):
        server.call(_fails)


@server.simulated()
def test_it_counts(rank: int) -> None:
    first, second = torch.ones(8, device=device.device()), torch.ones(8, device=device.device())
    device.reset_counts()
    torch._foreach_add_([first, second], 1.0)
    first.mul_(second)
    torch.distributed.all_reduce(first)
    first.sum().item()
    counts = device.counts()
    assert counts.launches == {"aten::_foreach_add_": 1, "aten::mul": 1, "aten::sum": 1}
    assert counts.synchronisations == {"item": 1} and counts.collectives == {"all_reduce": 1}
