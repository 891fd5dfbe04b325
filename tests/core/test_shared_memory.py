"""Shared memory of a host's ranks: deaths, forks, slow readers, systems that forbid it, and no leaks or growth."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from insides import CONNECT, LISTENER, kept_messages, settle, transport_of
from models import Stack, Untied, tokens, workload
from ranks import on_ranks, run_until_all_end
from torch import Tensor
from twin import build, step, steps, update

import zeroshard
from zeroshard import CollectiveError, Policy
from zeroshard.core.transport import members, watch
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.shared_memory import VARIABLE, NotShared, SharedMemory, meet
from zeroshard.testing import RankError, run_ranks, train, whole_parameters

CPU = torch.device("cpu")
STAGES = pytest.mark.parametrize("stage", range(4))
NEVER = 600.0
"""Seconds until a collective gives up: longer than `run_ranks` lets ranks run, so a rank that waits for that has hung."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def shared(group: dist.ProcessGroup | None = None) -> SharedMemory:
    collectives = create_collectives(group, CPU)
    assert isinstance(collectives, SharedMemory)
    return collectives


def end(collectives: Collectives) -> None:
    """Close them when the others are done: an early close breaks connections that another rank still makes, or reads from."""
    collectives.exchange(b"\0", "the end")
    collectives.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def descriptors_within() -> int:
    """Count them without sockets of TCP.

    Of those to the store there may be more at any time: a watch makes one when it first sees a wait, and the other end is open as
    long as a child of a killed rank holds it.
    """
    within = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    count = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own is closed by now
            name = str(one.readlink())
            count += not name.startswith("socket:") or name.removeprefix("socket:[").removesuffix("]") in within
    return count


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def maps(pid: int | str = "self") -> list[str]:
    """List the inodes of files that a process shares, or looks at."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended, or is somebody else's
        return []
    return [line.split()[4] for line in lines if "memfd:zeroshard" in line]


def held_anywhere() -> set[str]:
    """List the inodes of such files of all processes: a file without a name that nobody holds is gone, with its memory."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        found |= set(maps(folder.name))
    return found


def falls(look: Callable[[], int], highest: int) -> bool:
    """Tell whether a count is so low, soon: threads end, and the store's process closes its ends, a little later."""
    for _ in range(1000):
        if look() <= highest:
            return True
        time.sleep(0.02)
    return False


def until(path: Path) -> None:
    while not path.exists():  # for ever: then this rank is reported as hung, with its stack
        time.sleep(0.005)


def write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)


# ---------------------------------------------------------------------- deaths


def dies(folder: Path, count: int, stage: int, victim: int, delay: float, *, with_child: bool = False) -> None:
    """Run a training in which a rank is killed after so many seconds, and the others hear of it without a timeout."""
    folder.mkdir()

    def body(rank: int) -> None:
        before = descriptors_within()
        model, sharded = build(stage)
        step(model, sharded, rank, 0)
        write(folder / f"maps.{rank}", " ".join(maps()))
        if rank == victim:
            if with_child and not os.fork():
                write(folder / "child", str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            if with_child:
                until(folder / "child")
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(CollectiveError, match=f"rank {victim} closed the connection"):
            steps(model, sharded, rank, range(1, 100_000))
        (folder / f"heard.{rank}").touch()
        for other in {*range(count)} - {victim}:
            until(folder / f"heard.{other}")  # one that ends before would be the death that this rank hears of
        sharded.abandon()
        transport_of(sharded).close()
        del model, sharded
        gc.collect()
        assert falls(descriptors_within, before)
        assert len(maps()) <= 1  # torch may keep its own part of a backward that was aborted
        os._exit(0)

    try:
        with pytest.raises(
            RankError, match=f"1 of {count} ranks failed\n--- rank {victim} failed:\nended with exit status -9"
        ):
            run_until_all_end(body, count, collective_timeout=NEVER)
        if with_child:
            assert Path(f"/proc/{(folder / 'child').read_text()}").exists()
    finally:
        if with_child:
            os.kill(int((folder / "child").read_text()), signal.SIGKILL)
    mapped = {inode for rank in range(count) for inode in (folder / f"maps.{rank}").read_text().split()}
    assert len(mapped) == count
    assert not mapped & held_anywhere()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing(tmp_path: Path, count: int, stage: int) -> None:
    before = sorted(one.name for one in Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else []
    dies(
        tmp_path / "one",
        count,
        stage,
        0 if stage == 1 else count - 1,
        random.Random(10 * count + stage).uniform(0, 0.2),
    )
    assert not {one.name for one in Path("/dev/shm").iterdir() if "zeroshard" in one.name} - set(before)


@pytest.mark.full
def test_forty_kills(tmp_path: Path) -> None:
    chance = random.Random(0)
    for number in range(40):
        count = chance.choice([2, 3])
        victim, delay = chance.randrange(count), chance.uniform(0, 0.3)
        dies(tmp_path / str(number), count, chance.choice([1, 2, 3]), victim, delay)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_whose_children_hold_its_sockets_is_noticed(tmp_path: Path, victim: int) -> None:
    dies(tmp_path / "one", 2, 2, victim, 0.05, with_child=True)


def test_a_sender_to_a_dead_rank_whose_children_hold_its_sockets_does_not_wait(tmp_path: Path) -> None:
    """Its sockets take messages until they are full, and no error comes of them."""

    def body(rank: int) -> None:
        collectives = shared()
        if rank == 1:
            if not os.fork():
                write(tmp_path / "child", str(os.getpid()))
                time.sleep(60)
                os._exit(0)
            until(tmp_path / "child")
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CollectiveError, match="rank 1 closed the connection"):
            collectives.exchange(bytes(8 << 20), "much")
        (tmp_path / "heard").touch()
        os._exit(0)

    try:
        with pytest.raises(RankError, match="1 of"):
            run_until_all_end(body, 2, collective_timeout=NEVER)
        assert (tmp_path / "heard").exists()
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


@pytest.mark.ranks(2, fresh=True)
def test_a_gather_that_is_given_up_writes_nothing(rank: int) -> None:
    collectives = shared()
    rows = torch.full((2, 4), float(rank))
    collectives.all_gather(rows, 0, "rows").abandon()
    assert rows.eq(rank).all()
    collectives.all_gather(rows, 0, "rows").wait()
    assert rows[:, 0].tolist() == [0, 1]
    end(collectives)


@pytest.mark.ranks(3, fresh=True)
def test_a_rank_that_leaves_disturbs_nobody_who_does_not_need_it(rank: int, tmp_path: Path) -> None:
    watch.REPORT_SECONDS = 0.5  # rank 0 has no word to say
    pair = dist.new_group([1, 2])
    everybody = shared()
    own = shared(pair) if rank else None
    tensor = torch.full((1000,), float(rank))
    everybody.broadcast(tensor, 2)
    if own is None:
        everybody.close()
        (tmp_path / "left").touch()
        until(tmp_path / "done")
        return
    until(tmp_path / "left")
    for number in range(20):
        everybody.transfer(torch.full((1000,), float(number)), 1, 2, "a transfer").wait()
        assert own.exchange(bytes([rank]), "ranks") == [b"\1", b"\2"]
    with pytest.raises(CollectiveError, match="rank 0"):
        everybody.exchange(b"x", "everybody")
    dist.barrier(pair)
    (tmp_path / "done").touch()


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_that_ends_after_its_backward_leaves_the_others_theirs(rank: int, tmp_path: Path) -> None:
    model, sharded = build(0)
    step(model, sharded, rank, 0)
    if rank == 0:
        model.embedding.weight.register_hook(lambda gradient: until(tmp_path / "left"))
    model(*tokens(rank, 1)).backward()
    if rank == 1:
        del model, sharded
        gc.collect()
        (tmp_path / "left").touch()


@pytest.mark.ranks(2, fresh=True, collective_timeout=NEVER)
def test_ranks_that_wait_for_each_other_in_vain_say_so_before_the_timeout(rank: int) -> None:
    collectives = shared()
    with pytest.raises(CollectiveError) as caught:
        if rank == 0:
            collectives.exchange(b"x", "an exchange of words")
        else:
            rows = torch.zeros(2, 10)
            collectives.reduce_scatter(rows, rows, 3, "a reduction", 2).finish(torch.empty(10), accumulate=False)
    assert "rank 0 waited for an exchange of words" in str(caught.value)
    assert "rank 1 waited for a reduction" in str(caught.value)


@pytest.mark.ranks(2, fresh=True)
def test_an_interrupted_wait_can_be_taken_up_again(rank: int, tmp_path: Path) -> None:
    """As in a notebook: the messages that came are not lost."""
    collectives = shared()
    rows = torch.zeros(2, 10)
    rows[rank] = rank + 1
    if rank == 0:
        pending = collectives.all_gather(rows, 0, "a gather")
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        (tmp_path / "go").touch()
    else:
        until(tmp_path / "go")
        pending = collectives.all_gather(rows, 0, "a gather")
    pending.wait()
    assert rows.tolist() == [[1.0] * 10, [2.0] * 10]
    assert collectives.exchange(bytes([rank]), "ranks") == [b"\0", b"\1"]


# ---------------------------------------------------------------------- nothing grows


def many_engines(number: int) -> None:
    def body(rank: int) -> None:
        def once(turn: int) -> None:
            model, sharded = build(1 + turn % 3)
            step(model, sharded, rank, 0)
            if turn % 2:
                sharded.remove()
            del model, sharded

        for turn in range(6):  # whatever is made once in a process; each stage with both ends
            once(turn)
        gc.collect()
        before = threads(), descriptors(), peak()
        for turn in range(number):
            once(turn)
        gc.collect()
        assert falls(threads, before[0])
        assert falls(descriptors, before[1])
        assert not maps()
        assert peak() - before[2] < 24 << 10

    def peak() -> int:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(fields["VmRSS"].split()[0])

    run_ranks(body, 2, timeout=60 + number)


def test_engines_that_come_and_go_leave_nothing() -> None:
    many_engines(6)


@pytest.mark.full
def test_hundreds_of_engines_leave_nothing() -> None:
    many_engines(500)


@pytest.mark.ranks("count", fresh=True)
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.full)])
def test_forwards_without_a_step_keep_no_messages(rank: int, count: int) -> None:
    model, sharded = build(3)
    collectives = transport_of(sharded)
    assert isinstance(collectives, SharedMemory)
    sizes = []
    with torch.no_grad():
        for number in range(100):
            model(*tokens(rank, 0))
            sizes.append(kept_messages(collectives))
            if number == 20:
                before, nbytes = descriptors_within(), collectives.buffers_nbytes
    assert max(sizes[20:]) <= 12 * count
    assert collectives.buffers_nbytes == nbytes
    assert descriptors_within() == before


# ---------------------------------------------------------------------- the shape of things


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 10_007])
def test_shapes_and_dtypes(rank: int, numel: int, dtype: torch.dtype) -> None:
    """No element, one, an odd number."""
    collectives = shared()
    count = collectives.world_size
    for number in range(2):
        rows = torch.zeros(count, numel, dtype=dtype)
        rows[rank] = rank + 1
        collectives.all_gather(rows, number, "a gather").wait()
        assert rows.tolist() == [[one + 1.0] * numel for one in range(count)]
        pending = collectives.reduce_scatter(rows, rows, number, "a reduction", count)
        out = torch.ones(numel, dtype=dtype)
        pending.finish(out, accumulate=True)
        assert torch.equal(out, torch.full((numel,), rank + 2.0, dtype=dtype))
        scalar = torch.tensor(float(rank), dtype=dtype)
        collectives.broadcast(scalar, 2)
        assert scalar.item() == 2
        crosswise = torch.full((3, numel), float(rank), dtype=dtype).t()
        collectives.broadcast(crosswise, 1)
        assert crosswise.eq(1).all()
    end(collectives)


@pytest.mark.ranks(3)
def test_transfers_that_a_rank_sits_out_do_not_make_it_miscount(rank: int) -> None:
    collectives = shared()
    for source in range(3):
        for target in range(3):
            value = torch.tensor([float(rank)])
            collectives.transfer(value, source, target, "a transfer").wait()
            assert value.item() == (source if rank == target else rank)
            collectives.broadcast(value, source)
            assert value.item() == source
    end(collectives)


@pytest.mark.ranks(4, fresh=True)
def test_groups_that_cross_each_other(rank: int) -> None:
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 3))}
    own = {ranks: shared(group) for ranks, group in groups.items() if rank in ranks} | {(0, 1, 2, 3): shared()}
    controls = {ranks: one.control() for ranks, one in own.items()}
    for number in range(10):
        for ranks, one in own.items():
            mine = ranks.index(rank)
            rows = torch.zeros(len(ranks), 7)
            rows[mine] = rank + number
            one.all_gather(rows, 0, "a gather").wait()
            assert rows[:, 0].tolist() == [float(other + number) for other in ranks]
            assert controls[ranks].exchange(bytes([rank]), "ranks") == [bytes([other]) for other in ranks]


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_that_closes_takes_away_nothing_that_others_still_read(rank: int, tmp_path: Path) -> None:
    collectives = shared()
    rows = torch.full((2, 1 << 18), rank + 1.0)
    pending = collectives.all_gather(rows, 0, "a gather")
    (tmp_path / f"offered.{rank}").touch()
    if rank == 0:
        until(tmp_path / "offered.1")
        collectives.close()
        del collectives, rows, pending
        gc.collect()
        torch.ones(1 << 20).sum()
        (tmp_path / "closed").touch()
        return
    until(tmp_path / "closed")
    pending.wait()
    assert rows[0].eq(1).all()


# ---------------------------------------------------------------------- slow readers


def slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this rank read late what others offer in place."""
    original = SharedMemory.lent_by

    def lent_by(self: SharedMemory, *arguments: Any) -> Tensor:
        found = original(self, *arguments)
        time.sleep(0.001)
        return found

    monkeypatch.setattr(SharedMemory, "lent_by", lent_by)


def both_ways(body: Callable[[int], dict[str, Tensor]], count: int = 2) -> None:
    """Run `body` over gloo, and over shared memory with each rank slow in turn: its results are the same."""
    on_ranks(_both_ways, count, body, range(count))


def both_ways_with_children(body: Callable[[int], dict[str, Tensor]]) -> None:
    """Do the same with ranks that have children, on fresh ranks, of which one is slow."""
    run_ranks(_both_ways, 2, body, [1], timeout=120)


def _both_ways(rank: int, body: Callable[[int], dict[str, Tensor]], slow_ranks: Iterable[int]) -> None:
    os.environ[VARIABLE] = "0"
    expected = body(rank)
    os.environ[VARIABLE] = "1"
    gc.collect()
    for slow in slow_ranks:
        with pytest.MonkeyPatch.context() as patch:
            if rank == slow:
                slow_reader(patch)
            found = body(rank)
        for fqn, value in expected.items():
            assert torch.equal(found[fqn], value), (slow, fqn)


@pytest.mark.parametrize("count", [2, 3])
@STAGES
@pytest.mark.full
def test_a_write_spares_memory_that_a_slow_rank_still_reads(stage: int, count: int, tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(stage, make_model=Untied)
        start = {fqn: value + 0.25 for fqn, value in whole_parameters(model).items()}
        sharded.save(tmp_path, f"{os.environ[VARIABLE]}")
        for number in range(2):
            model(*tokens(rank, number)).backward()
            sharded.clip_grad_norm_(1.0)
            sharded.optimizer.step()
            if stage < 3:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            sharded.optimizer.zero_grad()
            model(*tokens(rank, 10 + number)).backward()
            with zeroshard.unsharded(model, modifier_rank=0):
                if rank == 0:
                    for parameter in model.parameters():
                        parameter.data.add_(0.125)
            sharded.optimizer.zero_grad()
            model(*tokens(rank, 20 + number)).backward()
            sharded.optimizer.zero_grad()
            if number == 0:
                with zeroshard.unsharded(model, modifier_rank=0):
                    model.load_state_dict(start)
            if number == 1:
                with torch.no_grad():
                    model(*tokens(rank, 3))
                sharded.load(tmp_path, os.environ[VARIABLE])
                step(model, sharded, rank, 4)
        with torch.no_grad():
            model(*tokens(rank, 5))
        sharded.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        return {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}

    both_ways(body, count)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("broken")


class Breaking(Stack):
    breaks = False

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = Breaks.apply(x) if self.breaks else x
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2))])
def test_a_backward_that_aborts_on_all_ranks_is_forgotten(stage: int) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(stage, make_model=Breaking)
        for number in range(3):
            model.breaks = True
            with pytest.raises(ValueError, match="broken"):
                model(*tokens(rank, number)).backward()
            sharded.optimizer.zero_grad()
            model.breaks = False
            step(model, sharded, rank, number)
        found = whole_parameters(model)
        sharded.remove()
        return found

    both_ways(body)


@pytest.mark.parametrize("count", [2, 3])
def test_a_forward_that_aborts_holds_up_no_later_write(count: int, tmp_path: Path) -> None:
    """The next block was offered, and nobody has read it: writing to what rests must not wait for that."""

    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(3)
        steps(model, sharded, rank, range(2))
        sharded.save(tmp_path / os.environ[VARIABLE], "x")

        def fail(*_: object) -> None:
            raise ValueError("a mistake")

        handle = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="a mistake"):
            model(*tokens(rank, 5))
        handle.remove()
        sharded.load(tmp_path / os.environ[VARIABLE], "x")
        step(model, sharded, rank, 6)
        found = whole_parameters(model)
        sharded.remove()
        return found

    both_ways(body, count)


# ---------------------------------------------------------------------- forks


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2))])
def test_forked_children_change_nothing(stage: int) -> None:
    """They write to copies of the parameters, collect garbage, drop the model, and end as a process does."""

    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(stage)
        children = []
        for number in range(2):
            step(model, sharded, rank, number)
            settle(sharded)  # what gloo still brings, no child can wait for
            pid = os.fork()
            if not pid:
                new = torch.ones(9 << 20)  # more than malloc keeps: it is mapped where there is room
                if stage < 3:
                    for parameter in model.parameters():
                        parameter.data.fill_(7)
                if os.environ[VARIABLE] == "1":  # gloo's own object waits for threads that a child does not have
                    del model, sharded
                    gc.collect()
                code = 0 if new.eq(1).all() else 3
                if number % 2:
                    os._exit(code)
                os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", f"raise SystemExit({code})"])
            children.append(pid)
            step(model, sharded, rank, 10 + number)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * len(children)
        found = whole_parameters(model)
        sharded.remove()
        return found

    both_ways_with_children(body)


@pytest.mark.ranks(2, fresh=True)
def test_a_child_takes_no_message_of_its_parents(rank: int) -> None:
    collectives = shared()
    pid = os.fork()
    if not pid:
        try:
            collectives.exchange(b"c", "a child's")
        except zeroshard.UsageError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert collectives.exchange(bytes([rank]), "ranks") == [b"\0", b"\1"]


@pytest.mark.ranks(2, fresh=True)
def test_a_child_that_lives_on_keeps_no_memory(rank: int) -> None:
    collectives = shared()
    collectives.broadcast(torch.ones(1 << 20))
    mapped = set(maps())
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    try:
        assert not maps(pid)
        collectives.exchange(b"x", "forked")
        collectives.close()
        del collectives
        gc.collect()
        dist.barrier()
        assert not mapped & held_anywhere()
    finally:
        os.kill(pid, signal.SIGKILL)


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if os.environ[VARIABLE] == "1":  # see above
            gc.collect()
        return tokens(index, 0)[0][0]


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
def test_workers_of_a_data_loader(stage: int) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(stage)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
        for _ in range(2):
            for batch in loader:
                update(model(batch), sharded.optimizer)
        return whole_parameters(model)

    both_ways_with_children(body)


# ---------------------------------------------------------------------- systems that forbid it


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


NUMBERS = {"memfd_create": (319, 279), "pidfd_open": (434, 434), "socket": (41, 198), "connect": (42, 203)}
"""Of system calls, on x86-64 and on ARM."""


def forbid(call: str, error: int, first: int | None = None) -> None:
    """Keep this process from calling it (with this first argument)."""
    number = NUMBERS[call][os.uname().machine != "x86_64"]
    load, equal, give = 0x20, 0x15, 0x06
    checks = [(load, 0, 0, 0), (equal, 0, 1 if first is None else 3, number)]
    if first is not None:
        checks += [(load, 0, 0, 16), (equal, 0, 1, first)]
    code = b"".join(
        struct.pack("HBBI", *one) for one in [*checks, (give, 0, 0, 0x50000 | error), (give, 0, 0, 0x7FFF0000)]
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    assert not _LIBC.prctl(38, 1, 0, 0, 0)
    if _LIBC.prctl(22, 2, ctypes.byref(program), 0, 0):
        pytest.skip("no seccomp here")


def little_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))


def few_descriptors() -> None:
    """Leave room for a file, a listener and one connection."""
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    for _ in range(highest + 2 - descriptors()):
        os.open("/dev/null", os.O_RDONLY)
    highest = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    os.setegid(65534)
    os.seteuid(65534)


CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000


def without_dev_shm() -> None:
    if _LIBC.unshare(CLONE_NEWNS):
        pytest.skip("no mount namespaces for this user")
    assert not _LIBC.mount(b"none", b"/", None, 0x44000, None)  # private
    assert not _LIBC.mount(b"none", b"/dev/shm", b"tmpfs", 1, b"size=4k")  # read-only
    with pytest.raises(OSError):
        Path("/dev/shm/x").write_text("x")


class Way(NamedTuple):
    """How sharing memory is forbidden.

    Attributes:
        apply: what is done in a rank.
        reason: what its ranks agree on; None: they share memory all the same.
        is_told: rank 0 logs it.
    """

    apply: Callable[[], None]
    reason: str | None = None
    is_told: bool = True


def turn_off() -> None:
    os.environ[VARIABLE] = "0"


WAYS = {
    "turned off": Way(turn_off, f"{VARIABLE} turns it off", is_told=False),
    "memfd EPERM": Way(partial(forbid, "memfd_create", 1), "rank {} may not share memory (Operation not permitted)"),
    "memfd ENOSYS": Way(partial(forbid, "memfd_create", 38), "rank {} may not share memory (Function not implemented)"),
    "unix sockets": Way(partial(forbid, "socket", 1, 1), "rank {} may not share memory (Operation not permitted)"),
    "addresses": Way(little_address_space, "rank {} may not share memory (Cannot allocate memory)"),
    "pidfd": Way(partial(forbid, "pidfd_open", 1)),
    "another user": Way(another_user),
    "no /dev/shm": Way(without_dev_shm),
}
QUICK_WAYS = (
    ("turned off", "everywhere"),
    ("memfd EPERM", "rank 1"),
    ("unix sockets", "everywhere"),
    ("pidfd", "rank 1"),
)


def skip_if_not_permitted(way: Way) -> None:
    """Skip the test if this user or this kernel cannot forbid something in that way. A child tries it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            way.apply()
        except pytest.skip.Exception as reason:
            os.write(write, str(reason).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, encoding="utf-8") as file:
        reason = file.read()
    if reason:
        pytest.skip(reason)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what zeroshard logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)


def why_not() -> str:
    """Return why these ranks do not share memory; empty where they do."""
    assert dist.group.WORLD is not None
    try:
        met = meet(Members.of(dist.group.WORLD, CPU))
    except NotShared as error:
        return str(error)
    finally:
        dist.barrier()  # an early close would break connections that another rank still makes
    for one in (met.neighbours, met.file, *met.windows.values()):
        one.close()
    return ""


def told_and_shared() -> tuple[list[str], bool]:
    """Return what is logged when collectives are made, and whether they share memory. Gloo leaves no descriptor behind."""
    before = descriptors()
    with heard() as said:
        collectives = create_collectives(None, CPU)
    shares = isinstance(collectives, SharedMemory)
    end(collectives)
    if not shares:
        gc.collect()
        assert falls(descriptors, before)
    return said, shares


@pytest.mark.parametrize(
    ("way", "where"),
    [
        pytest.param(way, where, marks=() if (way, where) in QUICK_WAYS else pytest.mark.full)
        for way in WAYS
        for where in ("everywhere", "rank 1")
    ],
)
def test_where_it_is_forbidden_ranks_fall_back_by_themselves(way: str, where: str) -> None:
    skip_if_not_permitted(WAYS[way])

    def body(rank: int) -> tuple[str, list[str], bool, bool]:
        os.environ[VARIABLE] = "0"
        expected = train(rank, workload(steps=2), Policy.stage(2))
        os.environ[VARIABLE] = "1"
        gc.collect()
        if rank == 1 or where == "everywhere":
            WAYS[way].apply()
        reason = why_not()
        said, shares = told_and_shared()
        found = train(rank, workload(steps=2), Policy.stage(2))
        os.seteuid(os.getuid())  # the result goes to a folder of this user's
        return reason, said, shares, found.equals(expected)

    results = run_ranks(body, 2, collective_timeout=20)
    text = WAYS[way].reason
    expected = "" if text is None else text.format(0 if where == "everywhere" else 1)
    for rank, (reason, said, shares, is_same) in enumerate(results):
        assert is_same
        assert shares is (text is None)
        assert reason == expected
        if rank == 0 and expected and WAYS[way].is_told:
            assert [line.endswith(expected) for line in said] == [True]
        else:
            assert said == []


@pytest.mark.parametrize("where", [[0, 1, 2], [0], [2]])
@pytest.mark.parametrize("way", ["connect", "descriptors"])
def test_a_rank_that_cannot_connect_keeps_nobody_waiting(
    way: str, where: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may make memory, and finds out later: the others hear of it at once, and not when the timeout is over."""

    def body(rank: int) -> str:
        assert dist.group.WORLD is not None
        members = Members.of(dist.group.WORLD, CPU)
        gc.collect()  # what an earlier test left
        before = descriptors()
        if rank in where:
            if way == "descriptors":
                few_descriptors()
                before = descriptors()
            else:

                def refuse(*_: object) -> None:
                    raise PermissionError(1, "Operation not permitted")

                monkeypatch.setattr(*CONNECT, refuse)
        with pytest.raises(NotShared) as caught:
            meet(members)
        why = str(caught.value)
        del caught
        gc.collect()
        assert descriptors() == before
        assert not maps()
        return why

    reasons = run_ranks(body, 3, collective_timeout=NEVER)
    assert len(set(reasons)) == 1, reasons
    assert f"rank {where[0]} " in reasons[0]
    assert "come" not in reasons[0]


def test_strangers_that_call_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, one that says nonsense, one that is gone again; and the ranks meet as if there were none."""
    listen = getattr(*LISTENER)

    def body(_: int) -> None:
        strangers = []

        def called() -> socket.socket:
            listener = listen()
            for words in (None, b"nonsense", b'["rank", 0]', b'{"rank": 0, "secret": "guessed"}', b""):
                strangers.append(caller := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                caller.connect(listener.getsockname())
                if words:
                    caller.send(words)
                elif words is not None:
                    caller.close()
            return listener

        monkeypatch.setattr(*LISTENER, called)
        gc.collect()
        before = descriptors()
        collectives = shared()
        end(collectives)
        for stranger in strangers:
            stranger.close()
        gc.collect()
        assert falls(descriptors, before)

    run_ranks(body, 3, collective_timeout=NEVER)


@pytest.mark.ranks(2, fresh=True)
def test_lent_rows_outlive_the_collectives(rank: int) -> None:
    """A rank that drops its engine after its last step, without a word, while others still read."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    collectives = shared()
    rows = torch.zeros(2, 1000)
    rows[rank] = rank + 1
    pending = collectives.all_gather(rows, 0, "rows")
    if rank == 0:
        pending.wait()
        gone = weakref.ref(collectives)
        del collectives, pending
        gc.collect()
        assert gone() is None
        store.set("gone", "1")
    else:
        store.wait(["gone"])
        pending.wait()
    assert rows[:, 0].tolist() == [1, 2]


def test_ranks_of_two_networks_talk_over_gloo_and_say_nothing(tmp_path: Path) -> None:
    def body(rank: int) -> bool:
        os.environ[VARIABLE] = "0"
        expected = train(rank, workload(steps=2), Policy.stage(1))
        os.environ[VARIABLE] = "1"
        if rank == 1:
            host = members.host_id()
            members.host_id = lambda: host + " of another host"  # type: ignore[assignment]
        with heard() as said:
            collectives = create_collectives(None, CPU)
        assert isinstance(collectives, PointToPoint)
        assert not said
        return train(rank, workload(steps=2), Policy.stage(1)).equals(expected)

    assert run_ranks(body, 2) == [True, True]


def test_another_network_namespace_is_another_host() -> None:
    before = members.host_id()
    pid = os.fork()
    if not pid:
        if _LIBC.unshare(CLONE_NEWNET):
            os._exit(2)
        os._exit(0 if members.host_id() != before else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        pytest.skip("no network namespaces for this user")
    assert code == 0
