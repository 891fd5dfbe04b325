"""The duties of every transport. A new one needs a file, a line in `collectives/choose.py`, and a line in the table below."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from file_transport import FOLDER, Files
from insides import BEST
from lending_transport import Lending
from models import workload
from ranks import on_ranks
from torch import Tensor

from zeroshard import Place, Policy
from zeroshard.collectives.base import Collectives, sum_into
from zeroshard.collectives.composed import OverHosts, TwoLevel
from zeroshard.collectives.grouped import Grouped, PointToPoint
from zeroshard.collectives.members import Members
from zeroshard.collectives.native import Native
from zeroshard.collectives.shared_memory import SharedMemory
from zeroshard.collectives.watch import Watch
from zeroshard.testing import train

CPU = torch.device("cpu")
RANKS = 4
Make = Callable[[Members, torch.device, Watch], Grouped]


def two_level(make: Make, members: Members, device: torch.device, watch: Watch) -> Grouped:
    """Two hosts of two ranks."""
    return TwoLevel(members, device, watch, 2, make)


def over_hosts(make: Make, members: Members, device: torch.device, watch: Watch) -> Grouped:
    """Two hosts of two ranks."""
    return OverHosts(members, device, watch, [[0, 1], [2, 3]], make)


TRANSPORTS: dict[str, Make] = {
    "gloo": PointToPoint,
    "native": Native,
    "shared memory": SharedMemory,
    "files": Files,
    "files that lend": Lending,
    "shared memory over hosts": partial(over_hosts, SharedMemory),
    "gloo over hosts": partial(over_hosts, PointToPoint),
    "two levels of gloo": partial(two_level, PointToPoint),
    "two levels of shared memory": partial(two_level, SharedMemory),
    "two levels of files": partial(two_level, Files),
    "two levels that lend": partial(two_level, Lending),
}
IN_RANK_ORDER = ("gloo", "shared memory", "files", "files that lend", "shared memory over hosts", "gloo over hosts")
"""Transports that promise sums of fp32 in the order of ranks. Two levels make them host by host, and a backend as it likes."""

pytestmark = pytest.mark.parametrize("name", TRANSPORTS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))


def on_transport(name: str, body: Callable[[Collectives], None]) -> None:
    """Call `body` on every rank with a transport over all ranks."""

    def with_transport(rank: int) -> None:
        assert dist.group.WORLD is not None
        members = Members.of(dist.group.WORLD, CPU)
        watch = Watch(members.root, members.ranks, members.own, 30.0)
        collectives = TRANSPORTS[name](members, CPU, watch)
        body(collectives)
        collectives.exchange(b"x", "the end")
        collectives.close()
        watch.close()

    on_ranks(with_transport, RANKS)


def rows_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what a rank has, [RANKS, 5], of values whose sum depends on its order."""
    return torch.randn(RANKS, 5, generator=torch.Generator().manual_seed(rank)).to(dtype) * 3.0**rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gather_fills_every_row_from_its_owner(name: str, dtype: torch.dtype) -> None:
    """And a rank that has waited may write to its row, which rests nowhere else."""

    def body(collectives: Collectives) -> None:
        whole, own = rows_of(7, dtype), collectives.shard
        rows = collectives.buffer(whole.numel(), dtype).view_as(whole).fill_(9)
        rows[own] = whole[own]
        work = collectives.all_gather(rows, 0, "gather")
        if collectives.rank == 1:
            time.sleep(0.2)  # it reads when the others have what they waited for
        work.wait()
        work.wait()
        assert torch.equal(rows, whole)
        rows[own] = -1.0
        work.wait_released()
        assert work.is_released
        assert [collectives.owner(shard) for shard in range(RANKS)] == collectives.by_shard(
            torch.arange(RANKS)
        ).tolist()

    on_transport(name, body)


@pytest.mark.parametrize("rests_in", ["buffer", "torch"])
def test_a_gather_of_what_rests_elsewhere_asks_for_memory_once(name: str, rests_in: str) -> None:
    def body(collectives: Collectives) -> None:
        own = collectives.buffer(5, torch.float32) if rests_in == "buffer" else torch.zeros(5)
        for number in range(3):
            collectives.wait_released(own)
            own.copy_(rows_of(number)[collectives.shard])
            rows, asked = torch.full((RANKS, 5), float("nan")), list[int]()

            def prepare(rows: Tensor = rows, asked: list[int] = asked) -> None:
                asked.append(1)
                rows[collectives.shard].copy_(own)

            work = collectives.all_gather(rows, 0, "gather", own, prepare)
            work.push()
            work.wait()
            assert asked == [1]
            assert torch.equal(rows, rows_of(number))
        collectives.wait_released()

    on_transport(name, body)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_reduction_is_the_mean_in_the_order_of_ranks(name: str, dtype: torch.dtype, accumulate: bool) -> None:
    def body(collectives: Collectives) -> None:
        shard = collectives.shard
        sent = collectives.sum_dtype(dtype)
        out, expected = torch.ones(5), torch.ones(5)
        for number in range(2):  # the second may use the memory of the first
            rows = collectives.buffer(RANKS * 5, sent).view(RANKS, 5)
            rows.copy_(rows_of(collectives.rank, dtype))
            workspace = torch.empty(collectives.workspace_numel(rows), dtype=sent)
            with collectives.together():
                reduction = collectives.reduce_scatter(rows, workspace, number, "reduce", RANKS)
            reduction.finish(out, accumulate=accumulate)
            reduction.wait_released()
            assert reduction.is_released
            rows.fill_(float("nan"))
            sum_into([rows_of(other, dtype)[shard] for other in range(RANKS)], float(RANKS), expected, accumulate)
        if name in IN_RANK_ORDER:
            assert torch.equal(out, expected)
        torch.testing.assert_close(out, expected)

    on_transport(name, body)


def test_broadcasts_transfers_and_messages(name: str) -> None:
    def body(collectives: Collectives) -> None:
        rank = collectives.rank
        assert collectives.exchange(bytes([rank, 1]), "ranks") == [bytes([other, 1]) for other in range(RANKS)]
        values = [{"n": "x" * other} for other in range(RANKS)]
        assert collectives.exchange_json(values[rank], "json") == values
        found, messages = collectives.exchange_values(torch.tensor(rank / 3, dtype=torch.float64), b"m", "values")
        assert found.tolist() == [other / 3 for other in range(RANKS)]
        assert messages == [b"m"] * RANKS
        for value in (torch.tensor(rank), torch.tensor([rank == 2] * 3), torch.full((4, 2), float(rank)).t()):
            collectives.broadcast(value, 2)
            assert torch.equal(value, torch.full_like(value, 2))
        for source, target in ((2, 0), (0, 1), (3, 3), (1, 2)):
            message = torch.full((7,), float(rank))
            collectives.transfer(message, source, target, "transfer").wait()
            assert message[0] == (source if rank == target else rank)
        control = collectives.control()
        assert control.exchange(bytes([rank]), "ranks") == [bytes([other]) for other in range(RANKS)]

    on_transport(name, body)


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.quick(4)
def test_a_training_over_it(microbatches: int, name: str) -> None:
    """Its bits are those of a policy that keeps everything unsharded, offloaded or not, and what is lent does not change."""
    offloaded = {stage: Policy.stage(stage).offloaded(optimizer=Place.CPU) for stage in (1, 3)}
    alike = [[Policy.stage(0), Policy.stage(1), offloaded[3]]]
    if microbatches > 1:  # sharded gradients are summed in another order
        alike = [[Policy.stage(0), Policy.stage(1), offloaded[1]], [Policy.stage(2), Policy.stage(3), offloaded[3]]]

    def body(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(*BEST, lambda *arguments, lasting: TRANSPORTS[name](*arguments))  # noqa: PLW0108
            work = workload("tied", steps=2, max_norm=0.5, microbatches=microbatches)
            for policies in alike:
                first, *others = [train(rank, work, policy, bucket_numel=256) for policy in policies]
                assert all(other.equals(first) for other in others)

    on_ranks(body, RANKS)
