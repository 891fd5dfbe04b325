"""Process groups are released, and errors name ranks that wait, are missing or have died. No wait is endless."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from insides import STAGED, is_posted, read_others, transport_of
from models import tokens, workload
from ranks import Lines, RankError, run_ranks, until
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from twin import build

import zeroshard
from zeroshard import CollectiveError, Policy, UsageError, launch
from zeroshard.core.transport import watch as watching
from zeroshard.core.transport.base import CHUNK_NUMEL, Alone, Collectives, sum_into
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.composed import Everyone
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.shared_memory import Neighbours
from zeroshard.core.transport.tree import FIRST_NBYTES, collect, spread
from zeroshard.core.transport.watch import Told, describe_failure, spell
from zeroshard.launch import NOTICE_VARIABLE
from zeroshard.testing import train

CPU = torch.device("cpu")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTICE_VARIABLE, "1")
    monkeypatch.setattr(watching, "REPORT_SECONDS", 1.0)


def agree(collectives: Collectives, rank: int) -> None:
    assert collectives.exchange(bytes([rank]), "ranks") == [bytes([r]) for r in range(collectives.world_size)]


# ---------------------------------------------------------------------- groups of our own


@pytest.mark.ranks(2)
@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of every group"
)
def test_the_order_of_the_users_group_is_kept(rank: int) -> None:
    turned = dist.new_group([1, 0], sort_ranks=False)
    collectives = create_collectives(turned, CPU)
    assert collectives.rank == dist.get_rank(turned) == 1 - rank
    agree(collectives, 1 - rank)
    value = torch.tensor([rank])
    collectives.broadcast(value)
    assert value.item() == 1


@pytest.mark.ranks(2)
def test_closed_collectives_say_so(rank: int) -> None:
    collectives = create_collectives(None, CPU)
    control = collectives.control()
    agree(control, rank)
    collectives.close()
    with pytest.raises(UsageError, match="closed"):
        collectives.exchange(b"x", "anything")
    control.close()


@pytest.mark.ranks(2)
def test_staging_changes_no_bits(rank: int) -> None:
    work = workload("untied", steps=3)
    plain = [train(rank, work, Policy.stage(stage)) for stage in range(4)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*STAGED, True)
        for stage in range(4):
            assert train(rank, work, Policy.stage(stage)).equals(plain[stage])


@pytest.mark.ranks(2)
def test_a_group_that_does_not_serve_a_device_passes_through_cpu_memory(rank: int) -> None:
    """Its tensors are not handed to a backend that would take their addresses for CPU memory."""
    assert dist.group.WORLD is not None
    assert Members.of(dist.group.WORLD, torch.device("privateuseone")).backend == "gloo"


def test_one_contribution_is_not_written_to_itself() -> None:
    row = torch.rand(CHUNK_NUMEL + 3)
    before = row._version
    sum_into([row], 1.0, row, accumulate=False)
    assert row._version == before
    out = torch.ones_like(row)
    sum_into([row], 1.0, out, accumulate=True)
    assert torch.equal(out, 1 + row)
    sum_into([row.bfloat16()], 1.0, out, accumulate=False)
    assert torch.equal(out, row.bfloat16().float())


def test_a_mean_is_the_sum_in_rank_order() -> None:
    parts = [torch.randn(CHUNK_NUMEL * 2 + 5) for _ in range(3)]
    out = torch.empty_like(parts[0])
    sum_into(parts, 3.0, out, accumulate=False)
    assert torch.equal(out, (parts[0] + parts[1] + parts[2]) / 3)


# ---------------------------------------------------------------------- small messages over a tree


def collect_and_spread(control: Collectives) -> None:
    """Collect messages of many lengths, at every root, and spread them."""
    rank, size = control.rank, control.world_size

    def merge(own: bytes, other: bytes) -> bytes:
        return json.dumps(json.loads(own) + json.loads(other)).encode()

    for root in range(size):
        for length in (1, FIRST_NBYTES - 12, FIRST_NBYTES - 11, 1000 * (rank + 1), 200_000):
            own = json.dumps([f"{rank}".ljust(length)]).encode()
            found = collect(control, own, merge, "messages", root)
            assert (found is None) == (rank != root)
            everyone = json.loads(spread(control, found, root))
            assert sorted(int(one) for one in everyone) == list(range(size))
            assert max(map(len, everyone)) >= length
        assert spread(control, b"" if rank == root else None, root) == b""
        assert spread(control, None, root) == b""


@pytest.mark.ranks("size")
@pytest.mark.quick(4)
@pytest.mark.parametrize("transport", ["shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_root_and_length(rank: int, size: int, transport: str) -> None:
    collectives = create_collectives(None, CPU)
    control = collectives.control()
    collect_and_spread(control)
    before = control.sent.copy()
    collect(control, b"short", lambda own, other: own + other, "messages")
    messages = (control.sent["transfer"] - before["transfer"]) // FIRST_NBYTES
    assert messages == (rank > 0), "one to the parent"
    control.close()
    collectives.close()


@pytest.mark.ranks(4)
def test_the_ranks_of_a_mesh(rank: int, transport: str) -> None:
    """In which global ranks are in another order than places."""
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dimensions = [
            create_collectives(mesh[name].get_group(), CPU) if size > 1 else Alone()
            for name, size in zip(("dp", "tp"), shape, strict=True)
        ]
        everyone = Everyone(*dimensions)
        control = everyone.control()
        assert control.rank == rank
        collect_and_spread(control)
        control.close()
        everyone.close()


# ---------------------------------------------------------------------- who is missing


def enter_unsharded(sharded: zeroshard.Sharded) -> None:
    with zeroshard.unsharded(sharded.model):
        pass


def leave_unsharded(sharded: zeroshard.Sharded) -> None:
    """Under stage 2 nothing is waited for but at the end, for what rank 0 wrote."""
    with zeroshard.unsharded(sharded.model, modifier_rank=0):
        pass


def freed(sharded: zeroshard.Sharded) -> None:
    """The parameters of a block are frozen, which lays it out anew."""
    nn.Module.requires_grad_(sharded.model.blocks[0], False)  # type: ignore[index]
    sharded.update_trainable()


Call = Callable[[zeroshard.Sharded, Path], object]
OPERATIONS: dict[str, tuple[int, Call | None, str]] = {
    "save": (2, lambda sharded, folder: sharded.save(folder, "x"), 'save "x"'),
    "asynchronous": (2, lambda sharded, folder: sharded.save(folder, "x", asynchronous=True), 'save "x"'),
    "load": (2, lambda sharded, folder: sharded.load(folder, "x"), 'load "x"'),
    "latest": (2, lambda sharded, folder: sharded.load(folder), "load of"),
    "export": (2, lambda sharded, folder: sharded.export(folder), "export to"),
    "unsharded": (3, lambda sharded, folder: enter_unsharded(sharded), "unsharded"),
    "modified": (2, lambda sharded, folder: leave_unsharded(sharded), "the end of unsharded"),
    "update": (3, lambda sharded, folder: freed(sharded), "update_trainable"),
    "sum": (2, lambda sharded, folder: sharded.sum_over_ranks(torch.ones(1)), "a sum over ranks"),
    "shard": (2, None, "shard()"),
}
"""The stage, the call (None: it makes the engine), and the words of messages that name it."""
GROUPS = {"2": (2, None), "3": (3, None), "subgroup": (3, [1, 2])}


def prepared(name: str, group: dist.ProcessGroup | None, folder: Path) -> Callable[[], object]:
    """Return the call of an operation, all of whose conditions are met."""
    stage, call, _ = OPERATIONS[name]
    if call is None:
        return partial(build, stage, group=group)
    _, sharded = build(stage, group=group)
    if name == "load":
        sharded.save(folder, "x")
    return partial(call, sharded, folder)


def all_missing(message: str, missing: list[int]) -> bool:
    return f"{spell(missing)} {'were' if len(missing) > 1 else 'was'} not waiting for any rank" in message


@pytest.mark.quick(2)
@pytest.mark.parametrize("where", GROUPS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_that_one_rank_alone_enters(impatient: None, tmp_path: Path, name: str, where: str) -> None:
    """`if rank == 0: sharded.save(...)`: told after the notice, and a named error at the timeout."""
    text = OPERATIONS[name][2]
    count, ranks = GROUPS[where]
    over = ranks or list(range(count))

    def body(rank: int) -> None:
        group = dist.new_group(ranks, timeout=timedelta(seconds=2.5)) if ranks else None
        said = Lines()
        is_alone = rank == over[0]
        call = prepared(name, group, tmp_path) if rank in over and (is_alone or name != "shard") else None
        if call is None or not is_alone:
            until(tmp_path / "done")  # in other code
            assert not said.lines
            return
        try:
            with pytest.raises(CollectiveError) as caught:
                call()
        finally:
            (tmp_path / "done").touch()
        message, missing = str(caught.value), over[1:]
        assert f"rank {rank} waited for {text}" in message
        assert all_missing(message, missing)
        assert len(said.lines) == 1
        assert said.lines[0].startswith(f"rank {rank} has waited ")
        assert text in said.lines[0]
        assert f"{spell(missing)} {'are' if len(missing) > 1 else 'is'} not waiting for any rank" in said.lines[0]

    run_ranks(body, count, collective_timeout=2.5)


GATHER = "(all-gather of the root module [bucket 0]), at test_collectives.py:"
OTHER_THAN_A_FORWARD: dict[str, tuple[Call, str]] = {
    "save": (lambda sharded, folder: sharded.save(folder, "x"), 'save "x"'),
    "state_dict": (lambda sharded, folder: sharded.model.state_dict(), f"state_dict() {GATHER}"),
    "unsharded": (lambda sharded, folder: enter_unsharded(sharded), f"unsharded {GATHER}"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OTHER_THAN_A_FORWARD)
def test_an_operation_never_pairs_with_a_forward(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some gather the same units in the same order. What each rank is in is told, with its line, and what to do first."""
    # Long before two ranks of one host find out that each waits for the other: that takes a second.
    monkeypatch.setenv(NOTICE_VARIABLE, "0.3")
    call, text = OTHER_THAN_A_FORWARD[name]

    def body(rank: int) -> tuple[str, list[str]]:
        said = Lines()
        _, sharded = build(3)
        with pytest.raises(CollectiveError) as caught:
            if rank == 0:
                call(sharded, tmp_path)
            sharded.model(*tokens(rank, 0))
        return str(caught.value), said.lines

    results = run_ranks(body, 2, collective_timeout=2.5)
    for message, _ in results:
        assert f"rank 0 waited for {text}" in message
        assert "rank 1 waited for all-gather of the root module [bucket 0], at test_collectives.py:" in message
        assert f"the same calls: call {text.partition(' (')[0]} on every rank or on none" in message
        assert "leaf" not in message
    if transport == "shared memory":
        (line,) = [line for _, lines in results for line in lines]
        assert text.partition(" (")[0] in line
        assert "all-gather of" in line


def test_of_many_that_wait_one_speaks(impatient: None, tmp_path: Path) -> None:
    """Three ranks wait, one does not: one line in all, and everyone's error names it."""

    def body(rank: int) -> list[str]:
        said = Lines()
        _, sharded = build(2)
        dist.barrier()  # they begin to wait together
        if rank == 1:
            for other in (0, 2, 3):
                until(tmp_path / f"done{other}")
            return said.lines
        try:
            with pytest.raises(CollectiveError) as caught:
                sharded.save(tmp_path, "x")
        finally:
            (tmp_path / f"done{rank}").touch()
        for other in (0, 2, 3):
            assert f"rank {other} waited for save" in str(caught.value)
        assert all_missing(str(caught.value), [1])
        return said.lines

    lines = [line for lines in run_ranks(body, 4, collective_timeout=4) for line in lines]
    assert len(lines) == 1
    # The lowest speaks, of three, unless a busy machine held it or another up for most of a second.
    waiting, silent = r"ranks? [02-3, -]+ ha(s|ve) waited \d+ s", r"ranks? [1-3, -]+ (is|are) not waiting for any rank"
    assert re.fullmatch(rf'{waiting} for save "x".*; {silent} \(still in other code\?\)', lines[0])


@pytest.mark.full
def test_a_rank_that_is_late_is_waited_for(impatient: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The line goes to stderr where nothing else is arranged; the save goes on, and nothing of it is left behind."""

    def note(record: logging.LogRecord) -> bool:  # a handler would arrange something else
        if "waited" in record.getMessage():
            (tmp_path / "said").touch()
        return True

    def body(rank: int) -> None:
        logging.getLogger().handlers.clear()  # pytest's
        logging.getLogger("zeroshard").addFilter(note)
        _, sharded = build(2)
        if rank == 1:
            until(tmp_path / "said")
        sharded.save(tmp_path, "x")
        watch = transport_of(sharded).watch  # type: ignore[attr-defined]
        while is_posted(watch):
            time.sleep(0.02)
        dist.barrier()
        assert read_others(watch) == {} if rank == 0 else True
        sharded.load(tmp_path)
        sharded.remove()

    run_ranks(body, 2)
    error = capfd.readouterr().err
    assert error.count("rank 1 is not waiting for any rank") == 1
    assert re.search(r'rank 0 has waited \d+ s for save "x"', error)


def test_seconds_of_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.notice_seconds() == 30.0
    monkeypatch.setenv(NOTICE_VARIABLE, "inf")
    assert launch.notice_seconds() == float("inf")
    for bad in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv(NOTICE_VARIABLE, bad)
        with pytest.raises(UsageError, match=NOTICE_VARIABLE):
            launch.notice_seconds()


def test_a_limit_on_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(UsageError, match=r"can't start new thread. Raise the limit .*ulimit -u"):
        watching.Watch(dist.HashStore(), [0], 0, 1.0)


def test_words() -> None:
    assert spell([3]) == "rank 3"
    assert spell([5, 0, 2, 3, 4]) == "ranks 0, 2-5"
    others = {2: Told("a forward", True, place="train.py:12"), 1: Told("a save", False)}
    why = RuntimeError("why\nwhere")
    mine = Told('save "x"', True, 'save "x"', "train.py:20")
    message = describe_failure(0, range(6), mine, others, [1, 2], timedelta(seconds=3), why)
    assert 'rank 0 waited for save "x", at train.py:20' in message
    assert "rank 2 waited for a forward, at train.py:12" in message
    assert 'call save "x"' in message
    assert "if rank == 0:" in message
    assert "leaf" not in message
    assert "rank 1 closed the connection" in message
    assert "Read the output of rank 1 first" in message
    assert "ranks 3-5 were not waiting" in message
    assert message.endswith("The backend reported: why")
    message = describe_failure(0, range(2), mine, {}, [], timedelta(seconds=3), why, awaited=1, reaches_store=False)
    assert "\nCheck that the host of rank 1 runs, and that this one reaches it. Every rank must" in message
    mine = Told("all-gather of one", True)
    for other, is_leaf in ((Told("all-gather of one", True), False), (Told("all-gather of two", True), True)):
        message = describe_failure(0, range(2), mine, {1: other}, [], timedelta(seconds=3), why)
        assert "the same number of batches" in message
        assert "Read the output" not in message
        assert ("leaf" in message) is is_leaf


# ---------------------------------------------------------------------- who died, and what does not answer


def die_at(number: int) -> None:
    """This rank is killed at its n-th message from now on."""
    original, seen = Neighbours.send, 0

    def send(self: Neighbours, *arguments: object) -> object:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *arguments)  # type: ignore[arg-type]

    Neighbours.send = send  # type: ignore[method-assign, assignment]


@pytest.mark.quick(2)
@pytest.mark.parametrize("victim", ["first", "last"])
@pytest.mark.parametrize("where", GROUPS)
@pytest.mark.parametrize("name", ["load", "unsharded", "update", "sum", "export", "save", "shard"])
def test_a_rank_that_dies_is_named(impatient: None, tmp_path: Path, name: str, where: str, victim: str) -> None:
    """Whichever rank it is, also the one whose process holds the store: at once, and not at the timeout."""
    text = OPERATIONS[name][2]
    count, ranks = GROUPS[where]
    over = ranks or list(range(count))
    dead = over[0] if victim == "first" else over[-1]

    def body(rank: int) -> None:
        group = dist.new_group(ranks, timeout=timedelta(seconds=60)) if ranks else None
        if rank not in over:
            until(tmp_path / "done")
            os._exit(0)
        call = prepared(name, group, tmp_path)
        for number in (1, 3) if name in ("save", "load", "export") else (1,):
            if number == 1 and name in ("save", "export"):
                call()  # connections are there
            if rank == dead:
                die_at(number)
            try:
                call()
            except CollectiveError as error:
                (tmp_path / f"error.{rank}").write_text(str(error))
                (tmp_path / "done").touch()
                os._exit(0)

    with pytest.raises(RankError, match="1 of"):
        run_ranks(body, count, collective_timeout=60, timeout=40)
    for rank in over:
        if rank != dead:
            message = (tmp_path / f"error.{rank}").read_text()
            assert f"rank {rank} waited for {text}" in message
            # The store is gone with rank 0: before connections exist, others may not have learned whom they wait for.
            if (name, dead) != ("shard", 0):
                assert f"rank {dead}" in message
            assert f"rank {dead} waited" not in message


@pytest.mark.ranks(2, fresh=True, collective_timeout=3, timeout=40)
@pytest.mark.full
def test_a_store_that_does_not_answer_keeps_nobody(rank: int, impatient: None, tmp_path: Path) -> None:
    """The process that holds the store stands still: a failed wait ends in our error all the same."""
    collectives = create_collectives(None, CPU)
    (holder, _) = collectives.exchange_json(os.getpid(), "process ids")
    if rank == 0:
        until(tmp_path / "done")
        return
    os.kill(holder, signal.SIGSTOP)
    try:
        with pytest.raises(CollectiveError, match="no answer from rank 0 or from the store"):
            collectives.exchange(b"x", "an answer")
        collectives.close()
    finally:
        os.kill(holder, signal.SIGCONT)
        (tmp_path / "done").touch()
