"""A checkpoint is complete or does not exist: ranks are killed at any moment, disks fail at any write, files are altered."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disks import file_size_limit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from insides import list_of_host
from torch import Tensor
from twin import build, same, step, whole

from zeroshard import CheckpointError
from zeroshard.checkpoint import manifest as files
from zeroshard.testing import RankError, run_ranks


@pytest.mark.parametrize("moments", [4, pytest.param(46, marks=pytest.mark.full)])
def test_a_kill_at_any_moment_loses_nothing(moments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 times in all, one rank or both die by SIGKILL while they save, under a new tag or an old one; then a new process loads.

    What it finds is the checkpoint before, or the one that was being saved, whole, with the right numbers.
    """
    monkeypatch.setattr("zeroshard.core.transport.watch.REPORT_SECONDS", 0.2)  # how long the dead are waited for
    chance = random.Random(1)

    def plain(rank: int) -> list[dict[str, Tensor]]:
        """The parameters after so many steps, without any checkpoint."""
        model, sharded = build(2)
        found = [whole(model)]
        for number in range(3):
            step(model, sharded, rank, number)
            found.append(whole(model))
        return found

    def save_good(rank: int) -> float:
        model, sharded = build(2)
        step(model, sharded, rank, 0)
        sharded.save(tmp_path, "good", {"steps": 1})
        step(model, sharded, rank, 1)
        start = time.perf_counter()
        sharded.save(tmp_path, "again", {"steps": 2})
        return time.perf_counter() - start

    expected = run_ranks(plain, 2)[0]
    duration = max(run_ranks(save_good, 2))
    found: list[int] = []
    for moment in range(moments):
        victims = chance.choice([(0,), (1,), (0, 1)])
        # The first dies before it saves, the last after, however fast the machine is now.
        delay = chance.uniform(0, 1.3 * duration)
        early, late = moment == 0, moment == moments - 1
        tag = "again" if moment % 2 else f"new{moment}"

        def doomed(rank: int, victims: tuple[int, ...], delay: float, early: bool, late: bool, tag: str) -> None:
            model, sharded = build(2)
            steps = sharded.load(tmp_path, fall_back=False).values["steps"]
            for number in range(steps, 3):
                step(model, sharded, rank, number)
            if rank in victims and early:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank in victims and not late:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            sharded.save(tmp_path, tag, {"steps": 3})
            if rank in victims and late:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank in victims:
                signal.pause()  # until the kill comes

        with pytest.raises(RankError):
            run_ranks(doomed, 2, victims, delay, early, late, tag, timeout=30)

        model, sharded = build(3)
        loaded = sharded.load(tmp_path)  # one rank, another stage
        assert same(whole(model), expected[loaded.values["steps"]]), (moment, victims, delay)
        found.append(loaded.values["steps"])
        if found[-1] == 3:  # begin again with a good one
            run_ranks(save_good, 2)
    assert set(found) >= {2, 3}, "kills came before, and after, the checkpoint was whole"
    sharded.save(tmp_path, "last", keep_last=1)
    leftovers = [path for path in tmp_path.rglob("*") if path.suffix == ".tmp" or not path.stat().st_size]
    assert not leftovers


# ---------------------------------------------------------------------- disks that fail


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fills_at_any_byte_loses_nothing(rank: int, failing: int, tmp_path: Path) -> None:
    model, sharded = build(2)
    step(model, sharded, rank, 0)
    sharded.save(tmp_path, "good", {"steps": 1})
    before = whole(model)
    size = next((tmp_path / "good").glob(f"rank_{failing:05d}.*")).stat().st_size
    step(model, sharded, rank, 1)
    for limit in (0, 1, 7, 100, 1000, size // 2, size - 4000, size - 1):
        for tag in ("good", "other"):
            refused = pytest.raises(CheckpointError, match=f"rank {failing}: .* File too large")
            with file_size_limit(limit if rank == failing else 1 << 40), refused:
                sharded.save(tmp_path, tag, {"steps": 2})
            assert files.tags(tmp_path) == ["good"]
            assert files.latest_tag(tmp_path) == "good"
    sharded.save(tmp_path, "later", {"steps": 2})
    assert sharded.load(tmp_path, "good").values == {"steps": 1}
    assert same(whole(model), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "later", "latest"]


class Failing:
    """Lets the k-th call of any of the operating system's functions that a save uses fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.left, self._code = number, code
        monkeypatch.setattr(os, "fsync", self.wrap(os.fsync))
        monkeypatch.setattr(Path, "replace", self.wrap(Path.replace))
        monkeypatch.setattr(Path, "open", self.wrap(Path.open))
        monkeypatch.setattr(Path, "mkdir", self.wrap(Path.mkdir))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(self._code, os.strerror(self._code))
            return function(*args, **kwargs)

        return call


DISK = r"Check the folder's permissions and the space on its disk\."
LIMIT = r"Raise the limit on open files \(`ulimit -n`\)\."


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.EMFILE, LIMIT), (errno.ENOSPC, DISK), (errno.EIO, DISK), (errno.EROFS, DISK)],
    ids=["descriptors", "full", "EIO", "read-only"],
)
def test_every_call_fails_in_turn(code: int, advice: str, tmp_path: Path) -> None:
    """Each call that a save makes has failed once before one goes through; each time `latest` names a whole checkpoint."""
    model, sharded = build(2)
    step(model, sharded, 0, 0)
    sharded.save(tmp_path, "good", {"steps": 1})
    first = whole(model)
    step(model, sharded, 0, 1)
    second = whole(model)
    outcomes = []
    for number in range(1, 50):
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing = Failing(monkeypatch, number, code)
            try:
                sharded.save(tmp_path, "new", {"steps": 2})
                outcomes.append("saved")
            except CheckpointError as error:
                assert re.search(f"{os.strerror(code)}. {advice}", str(error))
                outcomes.append("failed")
        other, again = build(1)
        loaded = again.load(tmp_path)
        assert same(whole(other), {1: first, 2: second}[loaded.values["steps"]])
        again.load(tmp_path, "good")
        if failing.left > 0:
            break
    assert outcomes.count("failed") >= 6
    assert outcomes[-1] == "saved"


# ---------------------------------------------------------------------- files that were altered


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of 2 ranks, and what is in it."""
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(2)
        step(model, sharded, rank, 0)
        sharded.save(folder, "a", {"note": torch.arange(5)})
        return whole(model)

    return folder, run_ranks(body, 2)[0]


MODEL, SHARDED = build(0)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_altered_files_are_refused_by_name_or_harmless(
    saved: tuple[Path, dict[str, Tensor]], data: st.DataObject
) -> None:
    folder, expected = saved
    paths = sorted((folder / "a").iterdir()) + [folder / "latest"]
    path = data.draw(st.sampled_from(paths))
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    before, after = content[:position], content[position:]
    changes = {
        "flip": bytes([after[0] ^ data.draw(st.integers(1, 255))]) + after[1:],
        "cut": b"",
        "insert": b"0" + after,
        "zero": bytes(len(after[:64])) + after[64:],
    }
    path.write_bytes(before + changes[data.draw(st.sampled_from(sorted(changes)))])
    try:
        loaded = SHARDED.load(folder)
        assert same(whole(MODEL), expected)
        assert torch.equal(loaded.values["note"], torch.arange(5))
    except CheckpointError as error:
        assert str(folder) in str(error) or "tag" in str(error)
    finally:
        path.write_bytes(content)


@pytest.mark.ranks(2, fresh=True)
def test_a_missing_file_is_named_and_the_one_before_is_found(rank: int, tmp_path: Path) -> None:
    model, sharded = build(2)
    for number in range(3):
        step(model, sharded, rank, number)
        sharded.save(tmp_path, f"step{number}", {"steps": number})
        if number == 1:
            expected = whole(model)
    broken = sorted((tmp_path / "step2").glob("rank_00001*"))[0]
    if rank == 0:
        broken.write_bytes(broken.read_bytes()[:-100] + bytes(100))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=f"{broken.name} is damaged.*fall_back=True"):
        sharded.load(tmp_path)
    loaded = sharded.load(tmp_path, fall_back=True)
    assert loaded.tag == "step1"
    assert same(whole(model), expected)
    torch.distributed.barrier()
    if rank == 0:
        broken.unlink()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=f"{broken.name} cannot be read: No such file"):
        sharded.load(tmp_path)


def test_readers_while_the_tag_is_saved_again(tmp_path: Path) -> None:
    """One process loads again and again while another saves under the same tag: each load is one of the checkpoints, whole."""
    model, sharded = build(2)
    sharded.save(tmp_path, "same", {"round": -1})
    first = whole(model)
    pid = os.fork()
    if pid == 0:
        try:
            _, own = build(2)
            for number in range(30):
                own.save(tmp_path, "same", {"round": number})
        finally:
            os._exit(0)
    rounds = []
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        rounds.append(sharded.load(tmp_path).values["round"])
        assert same(whole(model), first)
    assert rounds == sorted(rounds)
    assert len(set(rounds)) > 1


def test_a_folder_that_cannot_be_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lost+found` on a disk of its own, which only root may read."""
    (tmp_path / "lost+found").mkdir()
    real = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        # First among its neighbours, whatever the file system's order.
        return iter(sorted(real(path), key=lambda one: one.name != "lost+found"))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    SHARDED.save(tmp_path, "a")
    SHARDED.load(tmp_path)
    assert set(list_of_host(tmp_path)["tags"]) == {"a"}
