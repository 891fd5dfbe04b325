"""The duties of every transport. A new one needs a file, a line in `core/transport/choose.py`, and a line in the table below."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_transport import FOLDER, Files
from insides import BEST
from lending_transport import Lending
from models import workload
from ranks import on_ranks
from test_collectives import collect_and_spread
from torch import Tensor

import zeroshard
from zeroshard import Place, Policy
from zeroshard.core.transport.base import Collectives, sum_into
from zeroshard.core.transport.composed import OverHosts, TwoLevel
from zeroshard.core.transport.grouped import Grouped, PointToPoint
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.native import Native
from zeroshard.core.transport.rounds import merged
from zeroshard.core.transport.shared_memory import SharedMemory
from zeroshard.core.transport.watch import Watch
from zeroshard.testing import train

CPU = torch.device("cpu")
RANKS = 4
PACKAGE = Path(zeroshard.__file__).parent
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
    """A rank that has waited may write to its row."""

    def body(collectives: Collectives) -> None:
        whole, own = rows_of(7, dtype), collectives.shard
        rows = torch.full_like(whole, 9)
        rows[own] = whole[own]
        work = collectives.all_gather(rows, 0, "gather")
        if collectives.rank == 1:
            time.sleep(0.2)  # it reads when the others have what they waited for
        work.push()
        work.wait()
        work.wait()
        assert torch.equal(rows, whole)
        rows[own] = -1.0
        assert collectives.owner(own) == collectives.rank

    on_transport(name, body)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_reduction_is_the_mean_in_the_order_of_ranks(name: str, dtype: torch.dtype, accumulate: bool) -> None:
    def body(collectives: Collectives) -> None:
        shard = collectives.shard
        sent = collectives.sum_dtype(dtype)
        out, expected = torch.ones(5), torch.ones(5)
        for number in range(2):  # the second may use the memory of the first
            rows = rows_of(collectives.rank, dtype).to(sent)
            workspace = torch.empty(collectives.workspace_numel(rows), dtype=sent)
            with collectives.together():
                reduction = collectives.reduce_scatter(rows, workspace, number, "reduce", RANKS)
            if collectives.rank == 1:
                time.sleep(0.05)  # it adds when the others have finished
            reduction.finish(out, accumulate=accumulate)
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
        assert collectives.exchange_json(["same"], "json") == [["same"]] * RANKS
        assert collectives.exchange_if_different(b"same", "messages") == [b"same"] * RANKS
        different = [bytes([other == 1]) for other in range(RANKS)]
        assert collectives.exchange_if_different(different[rank], "messages") == different
        for value in (torch.tensor(rank), torch.tensor([rank == 2] * 3), torch.full((4, 2), float(rank)).t()):
            collectives.broadcast(value, 2)
            assert torch.equal(value, torch.full_like(value, 2))
        for source, target in ((2, 0), (0, 1), (3, 3), (1, 2)):
            message = torch.full((7,), float(rank))
            collectives.transfer(message, source, target, "transfer").wait()
            assert message[0] == (source if rank == target else rank)
            collectives.broadcast(message, source)  # which ranks without part in the transfer count alike
            assert message.eq(source).all()
        control = collectives.control()
        assert control.exchange(bytes([rank]), "ranks") == [bytes([other]) for other in range(RANKS)]
        collect_and_spread(collectives)

    on_transport(name, body)


def test_messages_are_combined_in_one_tree_by_shards(name: str) -> None:
    """So that a sum has the same bits over every transport. A message is written as the tree that it went through."""

    def body(collectives: Collectives) -> None:
        shard = collectives.shard
        found = collectives.combine(f"{shard}".encode().center(30), tree_of, "tree")
        assert found == merged([f"{one}".encode().center(30) for one in range(RANKS)], tree_of)
        assert found.strip() == b"((0 1) (2 3))"
        values = rows_of(shard).double()[0]
        agreed = collectives.agree(bytes([1 << shard, 7]), "answers", values.tolist())
        assert (agreed.every, agreed.some) == (b"\0\7", b"\x0f\7")
        first, second, third, fourth = (rows_of(other).double()[0] for other in range(RANKS))
        assert agreed.values.tolist() == ((first + second) + (third + fourth)).tolist()
        largest = collectives.agree(b"", "values", values.tolist(), torch.maximum).values
        assert largest.tolist() == torch.stack([first, second, third, fourth]).amax(0).tolist()
        assert collectives.agree(b"\1", "answers").are_equal
        total, agreed = collectives.sum_values(torch.tensor(0.1 * shard, dtype=torch.float64), b"\1", "values")
        assert (float(total), agreed.are_equal) == ((0.0 + 0.1) + (0.2 + 0.1 * 3), True)

    on_transport(name, body)


def tree_of(one: bytes, other: bytes) -> bytes:
    """Return two messages in parentheses, of their length."""
    return b"(%s %s)".replace(b"%s", one.strip(), 1).replace(b"%s", other.strip(), 1).center(len(one))


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


def test_a_transport_calls_none_of_its_callers(name: str) -> None:
    """No code of the rooms above runs inside an operation, or while it is waited for."""

    def body(rank: int) -> None:
        seen: set[str] = set()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(*BEST, lambda *arguments, lasting: watched(TRANSPORTS[name](*arguments), seen))
            train(rank, workload(steps=2), Policy.stage(3), bucket_numel=256)
        assert f"core/transport/{Path(inspect.getfile(Grouped)).name}" in seen
        assert {room for room in seen if not room.startswith(("core/transport/", "errors/"))} == set()

    on_ranks(body, RANKS)


def watched(collectives: Grouped, seen: set[str]) -> Grouped:
    """Add the files of zeroshard whose functions run inside the transport's operations to `seen`."""

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            before = sys.getprofile()
            sys.setprofile(note)
            try:
                return function(*arguments, **options)
            finally:
                sys.setprofile(before)

        return record

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            seen.add(path.relative_to(PACKAGE).as_posix())

    for operation in ("all_gather", "reduce_scatter"):
        original = recorded(getattr(collectives, operation))

        def started(*arguments: Any, original: Callable[..., Any] = original) -> Any:
            pending = original(*arguments)
            for end in ("wait", "push", "abandon", "finish"):
                if hasattr(pending, end):
                    setattr(pending, end, recorded(getattr(pending, end)))
            return pending

        setattr(collectives, operation, started)
    return collectives
