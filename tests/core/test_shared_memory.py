"""Shared memory of a host's ranks: deaths, forks, slow readers, systems that forbid it, and no leaks or growth."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import CONNECT, LISTENER, kept_messages, settle, transport_of
from models import Stack, Untied, tokens, workload
from ranks import Lines, on_ranks, run_until_all_end, until
from torch import Tensor
from twin import abort, build, same, step, steps, update, whole

import zeroshard
from zeroshard import CollectiveError, Policy, Sharded
from zeroshard.core.transport import members, watch
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.shared_memory import VARIABLE, NotShared, SharedMemory, meet
from zeroshard.testing import RankError, run_ranks, train

CPU = torch.device("cpu")
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


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


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


def leave_a_child(folder: Path) -> int:
    """Fork a child that holds this process's descriptors for a minute. Return its number, which a file has, too."""
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    (folder / "child").write_text(str(pid))
    return pid


# ---------------------------------------------------------------------- deaths


def dies(folder: Path, count: int, stage: int, victim: int, delay: float, *, with_child: bool = False) -> None:
    """Run a training in which a rank is killed after so many seconds, and the others hear of it without a timeout."""
    folder.mkdir()

    def body(rank: int) -> None:
        before = descriptors_within()
        model, sharded = build(stage)
        step(model, sharded, rank, 0)
        (folder / f"maps.{rank}").write_text(" ".join(maps()))
        if rank == victim:
            if with_child:
                leave_a_child(folder)
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


@pytest.mark.parametrize("kills", [pytest.param(40, marks=pytest.mark.full), 1])
def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing(kills: int, tmp_path: Path) -> None:
    chance = random.Random(kills)
    for number in range(kills):
        count, stage, delay = chance.choice([2, 3]), chance.choice([1, 2, 3]), chance.uniform(0, 0.3)
        dies(tmp_path / str(number), count, stage, chance.randrange(count), delay)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_whose_children_hold_its_sockets_is_noticed(victim: int, tmp_path: Path) -> None:
    dies(tmp_path / "one", 2, 2, victim, 0.05, with_child=True)


def test_a_sender_to_a_dead_rank_whose_children_hold_its_sockets_does_not_wait(tmp_path: Path) -> None:
    """Its sockets take messages until they are full, and no error comes of them."""

    def body(rank: int) -> None:
        collectives = shared()
        if rank == 1:
            leave_a_child(tmp_path)
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
@pytest.mark.quick(2)
@pytest.mark.parametrize("way", ["dropped", "closed"])
def test_lent_rows_outlive_the_collectives(rank: int, way: str, tmp_path: Path) -> None:
    """A rank drops or closes its engine after its last step, without a word, while the other still reads."""
    collectives = shared()
    rows = [torch.full((2, numel), rank + 1.0) for numel in (1000, 1 << 18)]
    gathers = [collectives.all_gather(one, number, "rows") for number, one in enumerate(rows)]
    gradients, mean = torch.full((2, 1000), rank + 1.0), torch.zeros(1000)
    reduction = collectives.reduce_scatter(gradients, gradients, 2, "gradients", 2)
    (tmp_path / f"offered.{rank}").touch()
    if rank == 1:
        until(tmp_path / "gone")
    elif way == "closed":
        until(tmp_path / "offered.1")
        collectives.close()
    if rank == 1 or way == "dropped":
        while gathers:
            gathers.pop().wait()
        reduction.finish(mean, accumulate=False)
        assert all(one[other].eq(other + 1).all() for one in rows for other in range(2))
        assert mean.eq(1.5).all()
    if rank == 0:
        gone = weakref.ref(collectives)
        del collectives, rows, gathers, reduction, gradients
        gc.collect()
        assert gone() is None
        torch.ones(1 << 20).sum()
        (tmp_path / "gone").touch()


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


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("number", [pytest.param(500, marks=pytest.mark.full), 6])
def test_engines_that_come_and_go_leave_nothing(number: int) -> None:
    """No thread, descriptor, mapping or memory, whether they are removed or dropped."""

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
        before = threads(), descriptors(), mappings(), resident()
        for turn in range(number):
            once(turn)
        gc.collect()
        assert falls(threads, before[0])
        assert falls(descriptors, before[1])
        assert not maps()
        assert mappings() <= before[2] + 60
        assert resident() - before[3] < 24 << 20

    run_ranks(body, 2, timeout=60 + number)


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
def test_rows_of_no_one_and_an_odd_number_of_elements(rank: int, numel: int, dtype: torch.dtype) -> None:
    collectives = shared()
    for number in range(2):
        rows = torch.zeros(3, numel, dtype=dtype)
        rows[rank] = rank + 1
        collectives.all_gather(rows, number, "a gather that is given up").abandon()
        assert rows[rank - 1].eq(0).all()
        collectives.all_gather(rows, number, "a gather").wait()
        assert rows.tolist() == [[one + 1.0] * numel for one in range(3)]
        out = torch.ones(numel, dtype=dtype)
        collectives.reduce_scatter(rows, rows, number, "a reduction", 3).finish(out, accumulate=True)
        assert torch.equal(out, torch.full((numel,), rank + 2.0, dtype=dtype))
    end(collectives)


@pytest.mark.ranks(4, fresh=True)
def test_any_ranks_make_groups_that_cross_in_any_order(rank: int) -> None:
    """Ranks 0 and 1 have made others before, while ranks 2 and 3 already wait."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 3))}
    if rank < 2:
        for _ in range(2):
            end(shared(groups[0, 1]))
    own = {ranks: shared(group) for ranks, group in groups.items() if rank in ranks} | {(0, 1, 2, 3): shared()}
    controls = {ranks: one.control() for ranks, one in own.items()}
    for number in range(10):
        for ranks, one in own.items():
            rows = torch.zeros(len(ranks), 7)
            rows[ranks.index(rank)] = rank + number
            one.all_gather(rows, 0, "a gather").wait()
            assert rows[:, 0].tolist() == [float(other + number) for other in ranks]
            assert controls[ranks].exchange(bytes([rank]), "ranks") == [bytes([other]) for other in ranks]


# ---------------------------------------------------------------------- slow readers


def slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this rank read late what others offer in place."""
    original = SharedMemory.lent_by

    def lent_by(self: SharedMemory, *arguments: Any) -> Tensor:
        found = original(self, *arguments)
        time.sleep(0.001)
        return found

    monkeypatch.setattr(SharedMemory, "lent_by", lent_by)


def both_ways(rank: int, body: Callable[[int], dict[str, Tensor]], slow_ranks: Iterable[int]) -> None:
    """Run `body` over gloo, and over shared memory with each of some ranks slow in turn: its results are the same."""
    os.environ[VARIABLE] = "0"
    expected = body(rank)
    os.environ[VARIABLE] = "1"
    gc.collect()
    for slow in slow_ranks:
        with pytest.MonkeyPatch.context() as patch:
            if rank == slow:
                slow_reader(patch)
            found = body(rank)
        assert same(found, expected), slow


def write_in_every_way(rank: int, model: Stack, sharded: Sharded, folder: Path) -> None:
    """In place below stage 3, as a modifier, by loads of a state dict and of a checkpoint."""
    start = {fqn: value + 0.25 for fqn, value in whole(model).items()}
    sharded.save(folder, "x")
    for number in range(2):
        model(*tokens(rank, number)).backward()
        sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        if not sharded.policy.parameters.sharded:
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
    with zeroshard.unsharded(model, modifier_rank=0):
        model.load_state_dict(start)
    with torch.no_grad():
        model(*tokens(rank, 3))
    sharded.load(folder, "x")


def abort_backwards(rank: int, model: Stack, sharded: Sharded, folder: Path) -> None:
    for number in range(3):
        abort(model(*tokens(rank, number)), model.blocks[1].norm.weight)
        sharded.optimizer.zero_grad()
        step(model, sharded, rank, number)


def abort_a_forward(rank: int, model: Stack, sharded: Sharded, folder: Path) -> None:
    """The next block was offered, and nobody has read it: writing to what rests must not wait for that."""
    steps(model, sharded, rank, range(2))
    sharded.save(folder, "x")
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(*tokens(rank, 5))
    handle.remove()
    sharded.load(folder, "x")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "use", [pytest.param(write_in_every_way, marks=pytest.mark.full), abort_backwards, abort_a_forward]
)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_a_slow_rank_reads_what_was_offered_before_later_writes(
    use: Callable[[int, Stack, Sharded, Path], None], stage: int, count: int, tmp_path: Path
) -> None:
    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(stage, make_model=Untied)
        use(rank, model, sharded, tmp_path / os.environ[VARIABLE])
        step(model, sharded, rank, 6)
        with torch.no_grad():
            model(*tokens(rank, 5))
        sharded.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        return {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}

    on_ranks(both_ways, count, body, range(count))


# ---------------------------------------------------------------------- forks


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2))])
def test_forked_children_change_nothing(stage: int) -> None:
    """They write to copies of the parameters, collect garbage, drop the model, end as a process does, or load batches."""

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
        lines: Any = [tokens(index, 0)[0][0] for index in range(6)]
        loader = torch.utils.data.DataLoader(lines, batch_size=2, num_workers=2, persistent_workers=True)
        for batch in chain(loader, loader):
            update(model(batch), sharded.optimizer)
        found = whole(model)
        sharded.remove()
        return found

    run_ranks(both_ways, 2, body, [1], timeout=120)


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
def test_a_child_that_lives_on_keeps_no_memory(rank: int, tmp_path: Path) -> None:
    collectives = shared()
    collectives.broadcast(torch.ones(1 << 20))
    mapped = set(maps())
    (tmp_path / str(rank)).mkdir()
    pid = leave_a_child(tmp_path / str(rank))
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


# ---------------------------------------------------------------------- systems that forbid it


def forbid(module: Any, name: str, error: int) -> None:
    """Let a call of this process fail, as where a seccomp filter forbids its system call."""

    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    setattr(module, name, fail)


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


def turn_off() -> None:
    os.environ[VARIABLE] = "0"


WAYS: dict[str, tuple[Callable[[], None], str | None]] = {
    "memfd ENOSYS": (
        partial(forbid, os, "memfd_create", 38),
        "rank {} may not share memory (Function not implemented)",
    ),
    "addresses": (little_address_space, "rank {} may not share memory (Cannot allocate memory)"),
    "another user": (another_user, None),
    "no /dev/shm": (without_dev_shm, None),
    "memfd EPERM": (partial(forbid, os, "memfd_create", 1), "rank {} may not share memory (Operation not permitted)"),
    "unix sockets": (partial(forbid, *LISTENER, 1), "rank {} may not share memory (Operation not permitted)"),
    "turned off": (turn_off, ""),
    "pidfd": (partial(forbid, os, "pidfd_open", 1), None),
}
"""How a rank is kept from sharing memory, and the reason that rank 0 logs. Empty: nothing is logged. None: it shares memory."""


def skip_if_not_permitted(apply: Callable[[], None]) -> None:
    """Skip the test if this user or this kernel cannot forbid something in that way. A child tries it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            apply()
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


@pytest.mark.quick(4)
@pytest.mark.parametrize("where", ["everywhere", "rank 1"])
@pytest.mark.parametrize("way", WAYS)
def test_where_it_is_forbidden_ranks_fall_back_by_themselves(way: str, where: str) -> None:
    apply, reason = WAYS[way]
    skip_if_not_permitted(apply)

    def body(rank: int) -> list[str]:
        os.environ[VARIABLE] = "0"
        expected = train(rank, workload(steps=2), Policy.stage(2))
        os.environ[VARIABLE] = "1"
        gc.collect()
        if rank == 1 or where == "everywhere":
            apply()
        before = descriptors()
        said = Lines().lines
        collectives = create_collectives(None, CPU)
        shares = isinstance(collectives, SharedMemory)
        assert shares is (reason is None)
        end(collectives)
        if not shares:
            gc.collect()
            assert falls(descriptors, before)
        told = said.copy()
        assert train(rank, workload(steps=2), Policy.stage(2)).equals(expected)
        os.seteuid(os.getuid())  # the result goes to a folder of this user's
        return told

    first, second = run_ranks(body, 2, collective_timeout=20)
    assert second == []
    expected = [reason.format(0 if where == "everywhere" else 1)] if reason else []
    assert [line[line.index("rank ") :] for line in first] == expected


@pytest.mark.parametrize("where", [[0, 1, 2], [0], [2]])
@pytest.mark.parametrize("way", ["connect", "descriptors"])
def test_a_rank_that_cannot_connect_keeps_nobody_waiting(way: str, where: list[int]) -> None:
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
                forbid(*CONNECT, 1)
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
def test_a_host_with_one_rank_uses_gloo_and_logs_nothing(rank: int) -> None:
    host = members.host_id()
    members.host_id = lambda: f"{host} {rank}"  # type: ignore[assignment]
    said = Lines()
    collectives = create_collectives(None, CPU)
    assert isinstance(collectives, PointToPoint)
    assert not said.lines
    end(collectives)


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
