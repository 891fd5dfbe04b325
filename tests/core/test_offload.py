"""The promise: the place of model states (accelerator, CPU memory, disk) never changes the result, to the last bit."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from insides import around_requests
from models import two_groups, workload
from twin import CPU, DISK, PRECISIONS, SMALL_BUCKETS, build, refusal, steps

from zeroshard import Offload, Place, Policy, Sharded, ZeroshardError
from zeroshard.core.storage import storages
from zeroshard.core.storage.disk import DirectFile, DiskStorage
from zeroshard.core.storage.transfers import Copies, Staging, aligned_bytes
from zeroshard.errors import StorageError
from zeroshard.testing import train
from zeroshard.testing.parity import adamw


def keep_places_apart() -> None:
    """CPU memory beside the accelerator's, as where there is one: what rests there is copied, not used in place."""
    storages.is_cpu_memory = lambda device: False


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", [CPU, DISK])
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
def test_parked_states_come_back(
    rank: int, apart: bool, place: Place, precision: str, stage: int, tmp_path: Path
) -> None:
    work = workload("tied", param_groups=two_groups, steps=4, microbatches=2)
    expected = train(rank, work, Policy.stage(stage), precision=PRECISIONS[precision], bucket_numel=SMALL_BUCKETS)
    if apart:
        keep_places_apart()

    def park(sharded: Sharded) -> None:
        before = sharded.memory_report()
        freed = sharded.offload_states(place=place, offload=Offload(str(tmp_path)))
        during = sharded.memory_report()
        at_rest = before["parameters"] + before["gradients"] + before["optimizer"]
        if place is CPU and not apart:
            assert freed == 0  # it is there already
        else:
            assert 0.9 * at_rest < freed
            assert during["parameters"] + during["gradients"] + during["optimizer"] < 0.1 * at_rest
            for use in (
                lambda: next(sharded.model.parameters()).isnan(),
                lambda: sharded.model(*work.make_batch(rank, 0)), sharded.optimizer.step, lambda: sharded.states,
                lambda: sharded.save(tmp_path, "parked"), lambda: sharded.offload_states(place=place),
                sharded.model.state_dict, sharded.optimizer.state_dict, lambda: sharded.optimizer.load_state_dict({}),
            ):  # fmt: skip
                with pytest.raises(ZeroshardError, match="parked"):
                    use()
            sharded.optimizer.zero_grad()
        sharded.reload_states()

    run = train(
        rank, work, Policy.stage(stage), precision=PRECISIONS[precision], bucket_numel=SMALL_BUCKETS, inspect=park
    )
    assert run.equals(expected)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- what goes wrong


def stage3_on_disk(folder: Path, **options: object) -> Policy:
    how = Offload(str(folder), **{"buffer_numel": 4096, "block_nbytes": 4096, **options})
    return Policy.stage(3).offloaded(optimizer=DISK, parameters=DISK, offload=how)


def test_what_is_read_ahead_is_what_was_written_before(tmp_path: Path) -> None:
    def late(work: Callable[..., None], *arguments: Any) -> None:
        time.sleep(0.05)
        work(*arguments)

    policy = stage3_on_disk(tmp_path)
    apart = storages.Storages(policy, torch.device("cpu"))
    slot = apart.optimizer(policy).slot("a slot", 1000, torch.float32)
    with around_requests(write=late):
        for number in (1.0, 2.0):
            slot.write(torch.full((1000,), number))
            slot.prefetch()
            out = torch.zeros(1000)
            slot.read(out).wait(torch.device("cpu"))
            assert bool((out == number).all())
    apart.close()


def take_steps(sharded: Sharded, *numbers: int) -> None:
    """Take a step for each number, on rank 0's batch on every rank."""
    steps(sharded.model, sharded, 0, numbers)


def trained(policy: Policy, steps: int = 1) -> Sharded:
    _, sharded = build(policy, make_optimizer=adamw)
    take_steps(sharded, *range(steps))
    return sharded


def disk_files(folder: Path) -> list[int]:
    """Descriptors of this process's files without names in a folder."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith(f"{folder}/#"):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("{}/nowhere", ["nowhere", "No such file", "nvme_path"]),
        ("{}/file", ["Not a directory"]),
        ("/proc", ["/proc"]),
    ],
)
def test_a_folder_that_cannot_be_used(folder: str, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refusal(lambda: trained(stage3_on_disk(Path(folder.format(tmp_path)))))
    assert all(word in said for word in words), said


@pytest.mark.quick(2)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "preadv"])
def test_calls_that_fail(call: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in its turn: at the start, in the backward, in the step."""
    real, count, succeed = getattr(os, call), 0, 10**9

    def maybe(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count > succeed:
            raise OSError(error, os.strerror(error))
        return real(*arguments)

    def use() -> None:
        nonlocal count
        count = 0
        sharded = trained(stage3_on_disk(folder))
        sharded.save(tmp_path / "checkpoints", "one")
        take_steps(sharded, 1)
        sharded.sharded_step.sub_groups.settle()

    monkeypatch.setattr(os, call, maybe)
    folder = tmp_path / "nvme"
    folder.mkdir()
    use()
    total = count * 8 // 10  # the last reads, of what may be needed, depend on the moment
    for succeed in range(0, total, max(total // 12, 1)):  # noqa: B007
        said = refusal(use)
        assert os.strerror(error) in said and str(folder) in said, said


@pytest.mark.ranks(1, fresh=True)
def test_a_full_disk(rank: int, tmp_path: Path) -> None:
    """The kernel's limit on the size of files stands for a disk that is full; what is missing is missing at the start."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    said = refusal(lambda: trained(stage3_on_disk(tmp_path)))
    assert "has no room for" in said and str(tmp_path) in said, said


@pytest.mark.parametrize("change", ["flip", "cut"])
def test_a_file_that_somebody_changes(change: str, tmp_path: Path) -> None:
    sharded = trained(stage3_on_disk(tmp_path))
    sharded.sharded_step.sub_groups.settle()
    files = disk_files(tmp_path)
    assert len(files) == 2
    for file in files:
        size = os.fstat(file).st_size
        if change == "cut":
            os.ftruncate(file, size // 4096 // 2 * 4096)
        else:
            with Path(f"/proc/self/fd/{file}").open("r+b", buffering=0) as named:
                for at in range(0, size, 512):
                    byte = os.pread(named.fileno(), 1, at)
                    os.pwrite(named.fileno(), bytes([byte[0] ^ 64]), at)
    said = refusal(lambda: take_steps(sharded, 1))
    assert ("does not match its checksum" if change == "flip" else "it was truncated") in said
    assert str(tmp_path) in said


def test_a_killed_job_leaves_nothing(tmp_path: Path) -> None:
    """Files have no names, so no other job can meet them, either."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        trained(stage3_on_disk(tmp_path))
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    assert not list(tmp_path.iterdir())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not list(tmp_path.iterdir())


def test_everything_is_given_back(tmp_path: Path) -> None:
    gc.collect()
    before = set(threading.enumerate())
    sharded = trained(stage3_on_disk(tmp_path), steps=2)
    assert len(disk_files(tmp_path)) == 2 and set(threading.enumerate()) - before
    value = sharded.states.get("embedding.weight")
    sharded.remove()
    assert not disk_files(tmp_path) and not set(threading.enumerate()) - before
    assert torch.equal(sharded.model.get_parameter("embedding.weight"), value)


def test_buffers_that_are_too_small(tmp_path: Path) -> None:
    how = Offload(str(tmp_path), buffer_numel=16, buffer_count=1)
    said = refusal(lambda: trained(Policy.stage(3).offloaded(optimizer=DISK, offload=how)))
    assert "buffer_size" in said and "reduce_bucket_size" in said, said


def test_buffered_where_direct_io_is_not_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = workload("tied", steps=3)
    expected = train(0, work, stage3_on_disk(tmp_path), bucket_numel=SMALL_BUCKETS)
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.EOPNOTSUPP, "not supported")))
    assert not DirectFile(tmp_path, 4096, 1).is_direct
    assert train(0, work, stage3_on_disk(tmp_path), bucket_numel=SMALL_BUCKETS).equals(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in one transfer", "in parts"])
def test_a_write_that_fails_waits_for_the_others(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still read the caller's memory, and write to the slot's part of the file."""
    device = torch.device("cpu")
    buffers = Staging(4, 4096, partial(aligned_bytes, pin=False))
    slot = DiskStorage(DirectFile(tmp_path, 4096, 4), Copies(device), buffers).slot("values", 4096, torch.float32)
    real, calls, ended = os.pwritev, count(), []

    def fails_once(*arguments: Any) -> int:
        if next(calls) == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.1)
        ended.append(real(*arguments))
        return ended[-1]

    monkeypatch.setattr(os, "pwritev", fails_once)
    slot.write(torch.arange(4096, dtype=dtype))
    with pytest.raises(StorageError, match=r"values in .* cannot be written"):
        slot.wait()
    assert len(ended) == 3
    slot.write(torch.arange(4096, dtype=dtype))
    found = torch.empty(4096)
    slot.read(found).wait(device)
    assert torch.equal(found, torch.arange(4096.0))
