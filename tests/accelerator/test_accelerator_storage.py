"""Storages on an accelerator: values that are cast during copies, pinned memory for slots, and waits between writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from insides import staged_copy
from torch import Tensor, nn
from twin import update

import zeroshard
from zeroshard.core.eight_bits import BLOCK_NUMEL
from zeroshard.core.storage import base
from zeroshard.core.storage.base import CpuStorage, slab_nbytes
from zeroshard.core.storage.buffers import BufferPool
from zeroshard.core.storage.storages import Storages
from zeroshard.core.storage.transfers import STAGED_COUNT, STAGED_NBYTES, Copies
from zeroshard.policy import Place, Policy, Precision

CPU = torch.device("cpu")
MB = 1 << 20


@pytest.mark.parametrize("numel", [0, 1, STAGED_NBYTES // 2, 5 * STAGED_NBYTES // 2 + 3])
def test_what_is_cast_on_its_way_passes_through_few_buffers(numel: int) -> None:
    copies, source, target = Copies(CPU), torch.randn(numel), torch.empty(numel, dtype=torch.bfloat16)
    for _ in range(3):
        staged_copy(copies, target, source)
        assert torch.equal(target, source.bfloat16())
    assert copies.staging.nbytes <= STAGED_COUNT * STAGED_NBYTES


@pytest.mark.accelerator
def test_casts_to_an_accelerator_and_back() -> None:
    """Many on their way at once, through the same buffers."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    copies = Copies(device)
    sources = [torch.randn(STAGED_NBYTES) for _ in range(4)]
    targets = [torch.empty(STAGED_NBYTES, dtype=torch.bfloat16, device=device) for _ in sources]
    transfers = [copies.copy(target, source) for target, source in zip(targets, sources, strict=True)]
    for transfer, target, source in zip(transfers, targets, sources, strict=True):
        transfer.wait(device)
        assert torch.equal(target.cpu(), source.bfloat16())
        back = torch.empty(STAGED_NBYTES)
        copies.copy(back, target).wait(CPU)
        assert torch.equal(back, source.bfloat16().float())


def test_slots_leave_little_pinned_memory_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds pinned memory up to a power of two; what is left over of one slot serves others."""
    taken = [0]

    def pinned(nbytes: int, *, pin: bool) -> torch.Tensor:
        assert pin
        taken[0] += 1 << (nbytes - 1).bit_length()
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(base, "aligned_bytes", pinned)
    storage = CpuStorage(Copies(CPU), pin=True)
    for _ in range(60):
        storage.slot("a large one", 180 * MB // 4, torch.float32)
    assert taken[0] < 1.15 * storage.nbytes
    before = taken[0]
    for _ in range(100):
        storage.slot("a small one", MB // 4, torch.float32)
    assert taken[0] == before, "there was room"


@pytest.mark.parametrize("taken", [0, 100 * MB, 3000 * MB])
@pytest.mark.parametrize("nbytes", [4096, 100 * MB, 180 * MB, 256 * MB, 300 * MB, 1025 * MB])
def test_a_slab_is_no_larger_than_what_was_taken(nbytes: int, taken: int) -> None:
    size = slab_nbytes(nbytes, taken)
    assert size >= nbytes
    assert size.bit_count() == 1
    assert size <= max(base.SLAB_NBYTES, 2 * nbytes, taken)


@pytest.mark.parametrize("place", Place)
def test_whoever_read_a_slot_can_tell_that_it_was_written_to(place: Place, tmp_path: Path) -> None:
    """Master weights that were read ahead for a step are read again where they were set meanwhile."""
    policy = Policy.stage(2).offloaded(optimizer=Place.DISK, path=str(tmp_path))
    storages = Storages(policy, CPU)
    storage = (
        CpuStorage(Copies(CPU), pin=False) if place is Place.CPU else storages.open(place, policy.offload_optimizer)
    )
    slot = storage.slot("some", 8, torch.float32)
    pool = BufferPool(CPU, storages.accelerator.room)
    out = torch.empty(8)
    versions = [slot.version]
    for value in (1.0, 2.0):
        slot.write(torch.full((8,), value)).wait(CPU)
        versions.append(slot.version)
        with slot.borrowed(storages.accelerator, pool, write=True) as memory:
            memory.add_(0.5)
        versions.append(slot.version)
        slot.read(out).wait(CPU)
        with slot.borrowed(storages.accelerator, pool) as memory:
            assert torch.equal(memory, out)
        assert torch.equal(out, torch.full((8,), value + 0.5))
        assert slot.version == versions[-1]
    assert sorted(set(versions)) == versions
    storages.close()


@pytest.mark.accelerator
def test_small_states_travel_only_when_they_are_parked() -> None:
    """The CPU runs the step of an optimizer in CPU memory, so only gradients and parameters travel, whatever its states are in."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    moved, copy = 0, Copies.copy

    def counted(copies: Copies, target: Tensor, source: Tensor, *after: Any) -> Any:
        nonlocal moved
        is_on_its_way = target.dtype == source.dtype or source.device.type != "cpu"  # otherwise staging buffers follow
        if target.device != source.device and is_on_its_way:
            moved += target.nbytes
        return copy(copies, target, source, *after)

    in_a_step: list[int] = []
    numel, least = 6 * 256 * 256, 4 * 256  # the biases keep their states in fp32
    for states, itemsize in ((None, 4.0), (torch.bfloat16, 2.0), (torch.uint8, 1 + 4 / BLOCK_NUMEL)):
        for place in (Place.CPU, Place.ACCELERATOR):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(256, 256, bias=number < 4) for number in range(6)]).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            policy = Policy.stage(2).offloaded(optimizer=place)
            sharded = zeroshard.shard(model, optimizer, policy, precision=Precision(state_dtype=states))
            of_states = 2 * (itemsize * numel + (2 if states == torch.bfloat16 else 4) * least)
            with mock.patch.object(Copies, "copy", counted):
                for _ in range(2):
                    moved = 0
                    update(model(torch.ones(2, 256, device=device)).sum(), optimizer)
                if place is Place.CPU:
                    in_a_step.append(moved)
                    assert sharded.memory_report()["cpu"] > of_states
                    continue
                assert moved == 0
                sharded.offload_states(("optimizer",))
                assert moved == pytest.approx(of_states, rel=0.01), states
                sharded.reload_states()
                assert moved == pytest.approx(2 * of_states, rel=0.01), states
    assert 0 < in_a_step[0] == in_a_step[1] == in_a_step[2]
