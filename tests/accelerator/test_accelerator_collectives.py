"""Requests to accelerators' backends: one launch for a unit, one order of launches, and no wait of the host."""

from __future__ import annotations

import os
import struct
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import is_posted
from models import Stack, Untied, tokens
from ranks import Lines, on_ranks
from simgpu import device as simgpu
from simgpu import server
from simgpu.server import simulated
from twin import build

import zeroshard
from zeroshard import CollectiveError, Policy, Precision
from zeroshard.core import replicas
from zeroshard.core.norm import coefficient_of, norm_of, scale_, sums_of_squares
from zeroshard.core.replicas import digest_of, digests_as_bytes
from zeroshard.core.transport import choose
from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.grouped import Grouped
from zeroshard.launch import NOTICE_VARIABLE

CPU = torch.device("cpu")
SMALL_BUCKETS = 256
"""Elements: several buckets in each unit of the test models."""


def on_device(model: type[torch.nn.Module], stage: int, **options: Any) -> tuple[torch.nn.Module, zeroshard.Sharded]:
    torch.manual_seed(0)
    with simgpu.device():
        made = model()
    adamw = torch.optim.AdamW(made.parameters(), lr=1e-2)
    return made, zeroshard.shard(made, adamw, Policy.stage(stage), bucket_numel=SMALL_BUCKETS, **options)


def step(model: torch.nn.Module, sharded: zeroshard.Sharded, rank: int, number: int) -> None:
    model(tokens(rank, number)[0].to(simgpu.device())).backward()
    sharded.clip_grad_norm_(0.5)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()


@simulated()
def test_the_buckets_of_a_unit_are_one_launch(rank: int) -> None:
    """Each step of stage 2: a reduction and a gather for each unit, and one sum for the norm."""
    model, sharded = on_device(Stack, 2)
    units = len(model.get_submodule("blocks")) + 1  # type: ignore[arg-type]
    for number in range(3):
        simgpu.reset_counts()
        step(model, sharded, rank, number)
        assert simgpu.collectives["reduce_scatter"] == units
        assert simgpu.collectives["all_gather"] == units
        assert simgpu.collectives["all_reduce"] == 1


@simulated()
def test_what_has_begun_is_launched_after_an_error_too(rank: int) -> None:
    """Other ranks, and this one, wait for it."""
    collectives = choose.create_collectives(None, simgpu.device())
    rows = torch.zeros(2, 4, device=simgpu.device())
    rows[rank] = rank + 1
    with pytest.raises(KeyError), collectives.together():
        pending = collectives.all_gather(rows, 0, "rows")
        raise KeyError
    pending.wait()
    assert rows[:, 0].tolist() == [1, 2]
    collectives.close()


@simulated(ranks=3)
def test_transfers_are_started_at_once(rank: int) -> None:
    """Each to each other rank, and one that a rank sits out: one at a time they would wait for each other."""
    collectives = choose.create_collectives(None, simgpu.device())
    pairs = [(source, target) for source in range(3) for target in range(3) if source != target]
    values = [torch.full((5,), 10.0 * source + rank, device=simgpu.device()) for source, _ in pairs]
    simgpu.reset_counts()
    with collectives.together():
        pending = [
            collectives.transfer(value, source, target, "a transfer")
            for value, (source, target) in zip(values, pairs, strict=True)
        ]
    # torch 2.14 starts a batch of sends and receives in one launch; earlier releases start each by itself.
    assert simgpu.collectives == {"coalesced": 1} or simgpu.collectives.total() == 4, simgpu.collectives
    for one in pending:
        one.wait()
    for value, (source, target) in zip(values, pairs, strict=True):
        assert value[0] == 10.0 * source + (source if rank == target else rank)
    collectives.close()


class HeadOnRankZero(Untied):
    """Of the root's buckets one is complete early on rank 0, and at the end of the backward on others."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) if dist.get_rank() == 0 else self.run(self.embedding(tokens)).square().mean()


def order_of_launches(rank: int) -> list[str]:
    model, sharded = on_device(HeadOnRankZero, 3)
    simgpu.reset_counts()
    for number in range(4):
        step(model, sharded, rank, number)
    return [kind for kind, _ in simgpu.launched]


def test_gathers_and_reductions_start_in_one_order_on_all_ranks() -> None:
    """Where a rank takes another path, its gradients come later, and its launches must not: others wait for them.

    Backends have two communicators, whose kernels wait for each other's place on the device; without one, ranks wait inside of the
    backward.
    """
    first, second = server.call(order_of_launches)
    assert len(first) > 40
    assert {"all_gather", "reduce_scatter"} <= set(first)
    assert first == second


def values_and_messages(rank: int, device: str) -> None:
    collectives: Collectives = choose.create_collectives(None, torch.device(device))
    own = torch.tensor(rank + 0.1, dtype=torch.float64, device=device)
    total, agreed = collectives.sum_values(own, bytes([rank, 4]), "values")
    torch.testing.assert_close(total.cpu(), torch.tensor(3.3, dtype=torch.float64))
    assert total.device.type == device
    assert (agreed.every, agreed.some) == (b"\0\4", b"\3\4")
    total, agreed = collectives.sum_values(None, b"x", "no values")
    assert (float(total), agreed.are_equal) == (0.0, True)
    with pytest.raises(CollectiveError, match=r"ask(ed)? for the norm.*the opposite"):
        collectives.sum_values(own if rank == 1 else None, b"x", "the norm")


@pytest.mark.parametrize("device", ["cpu", "simgpu"])
def test_values_and_messages_of_all_ranks(device: str) -> None:
    if device == "cpu":
        on_ranks(values_and_messages, 3, device)
    else:
        server.call(values_and_messages, ranks=3, device=device)


def test_one_rank_has_its_value_alone() -> None:
    value = torch.tensor(0.1, dtype=torch.float64)
    total, agreed = Alone().sum_values(value, b"x", "values")
    assert torch.equal(total, value)
    assert (agreed.every, agreed.some) == (b"x", b"x")


@simulated()
def test_a_model_that_is_born_sharded_makes_no_groups(rank: int) -> None:
    """Communicators are dear, and nothing says when the last such parameter is gone: they use the user's own group."""
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    for _ in range(2):
        torch.manual_seed(0)
        with zeroshard.sharded_init(), simgpu.device():
            model = Stack()
        assert torch.isfinite(model.head.weight.norm())  # gathers the whole
    assert len(groups) == before
    torch.manual_seed(0)
    with simgpu.device():
        whole = Stack()
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters()), Policy.stage(3))
    assert len(groups) > before
    with zeroshard.unsharded(model):
        for one, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert torch.equal(one, other)
    sharded.remove()


@pytest.mark.ranks(2)
def test_what_a_device_waits_for_in_vain_is_told_before_its_backend_gives_up(rank: int) -> None:
    """The host has gone on; the rank whose device is not late says nothing."""
    os.environ[NOTICE_VARIABLE] = "0.5"
    said, collectives = Lines(), choose.create_collectives(None, CPU)
    assert isinstance(collectives, Grouped)
    watch, late = collectives.watch, threading.Event()
    watch.follow("all-gather of h.1", lambda: True)
    if rank == 0:
        watch.follow("all-gather of h.2", late.is_set)
        watch.follow("all-gather of h.3", late.is_set)
        while not said.lines:
            time.sleep(0.02)
        assert said.lines[0].startswith("rank 0 has waited ")
        assert "for all-gather of h.2; rank 1 is not waiting for any rank" in said.lines[0]
        late.set()
        while is_posted(watch):
            time.sleep(0.02)
    dist.barrier()
    assert len(said.lines) == (rank == 0)
    collectives.close()


# ---------------------------------------------------------------------- sums


@pytest.mark.parametrize("said", [None, "bfloat16"])
@simulated()
def test_narrow_gradients_travel_in_fp32_where_each_sum_is_rounded(rank: int, said: str | None) -> None:
    """Unless the user says otherwise."""
    precision = Precision(torch.bfloat16, reduce_dtype=None if said is None else getattr(torch, said))
    expected = torch.float32 if said is None else torch.bfloat16
    model, sharded = on_device(Stack, 2, precision=precision)
    assert sharded.dtypes.reduce == expected
    step(model, sharded, rank, 0)
    assert {dtype for kind, dtype in simgpu.launched if kind == "reduce_scatter"} == {expected}


@pytest.mark.ranks(2)
def test_narrow_gradients_stay_narrow_where_sums_are_made_in_fp32(rank: int) -> None:
    _, sharded = build(1, precision="bf16")
    assert sharded.dtypes.reduce == torch.bfloat16


def test_doubles_stay_doubles() -> None:
    for own, wire in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32)):
        assert Precision().resolve(own, lambda dtype: torch.promote_types(dtype, torch.float32)).reduce == wire
        assert Precision().resolve(own).reduce == own


# ---------------------------------------------------------------------- the norm


@pytest.mark.parametrize("norm", [3.0, 0.25, float("inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_coefficient_is_the_same_number_wherever_it_is_computed(norm: float, max_norm: float | None) -> None:
    there = coefficient_of(torch.tensor(norm, dtype=torch.float64), max_norm, 8.0)
    assert isinstance(there, torch.Tensor)
    assert there.item() == coefficient_of(norm, max_norm, 8.0)


def test_digests_of_the_same_values_in_other_places_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PLACED_NUMEL", 4)  # places count on from part to part
    flat = torch.arange(10.0)
    first, again, flipped, moved, empty = digests_as_bytes(
        [digest_of(one) for one in (flat, flat.clone(), flat.flip(0), flat.roll(4), flat[:0])]
    )
    assert first == again
    assert len({first, flipped, moved, empty}) == 4
    assert struct.unpack("<ddd", first) == (45.0, pytest.approx(285.0), 285.0)
    assert digests_as_bytes([]) == []


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_coefficients_stay_on_the_accelerator(dtype: torch.dtype) -> None:
    device = torch.accelerator.current_accelerator()
    flats = [torch.randn(numel, device=device).to(dtype) for numel in (1, 1000, 70_001)]
    sums = sums_of_squares(flats)
    for flat, squares in zip(flats, sums, strict=True):
        torch.testing.assert_close(squares.cpu(), flat.cpu().double().square().sum(), rtol=1e-4, atol=0)
    norm = norm_of(torch.stack(sums).sum())
    assert isinstance(norm, torch.Tensor)
    assert norm.device == flats[0].device
    expected = [flat.cpu() * 0.5 for flat in flats]
    scale_(flats, torch.full((), 0.5, dtype=torch.float64, device=device))
    assert all(torch.equal(flat.cpu(), half) for flat, half in zip(flats, expected, strict=True))


@pytest.mark.accelerator
@pytest.mark.parametrize("stage", range(4))
def test_clipping_gives_what_is_read_when_it_is_asked_for(stage: int) -> None:
    """Gradients that are not finite are left as they are, and named."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    model = Stack().to(device)
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1e-2), Policy.stage(stage))
    model(tokens(0, 0)[0].to(device)).backward()
    before = float(sharded.clip_grad_norm_(None))
    norm = sharded.clip_grad_norm_(before / 2)
    assert isinstance(norm, torch.Tensor)
    assert float(norm) == before
    assert not sharded.sharded_step.overflow
    assert float(sharded.clip_grad_norm_(None)) == pytest.approx(before / 2, rel=1e-5)
    sharded.optimizer.zero_grad()
    (model(tokens(0, 0)[0].to(device)) * float("inf")).backward()
    sharded.clip_grad_norm_(1.0)
    assert sharded.sharded_step.overflow
    assert sharded.sharded_step.not_finite()
    sharded.remove()
