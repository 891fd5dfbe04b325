"""Checkpoints in separate folders of hosts: a host is lost, returns empty, or is behind, and no state is lost."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disks import file_size_limit
from ranks import on_ranks
from torch import Tensor
from twin import build, build_engine, engine_steps, step, whole

from zeroshard import CheckpointError, UsageError
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint import saving
from zeroshard.checkpoint.node_local import FileMove, carry
from zeroshard.core.transport import members

pytestmark = pytest.mark.full

RANKS_OF_A_HOST = 2


class Run:
    """A small model on ranks that take themselves for ranks of several hosts, each with a folder."""

    def __init__(self, rank: int, root: Path, ranks_of_a_host: int = RANKS_OF_A_HOST) -> None:
        host = rank // ranks_of_a_host
        members.host_id = lambda: str(host)  # type: ignore[assignment]
        self.rank, self.folder = rank, root / f"host{host}"
        self.model, self.sharded = build(3)

    def train(self, number: int) -> None:
        step(self.model, self.sharded, 0, number)  # the same everywhere: only roundings depend on the number of ranks

    def save(self, tag: str, **how: Any) -> None:
        values = {"tag": tag, "best": float("inf")}  # no number of JSON's
        self.sharded.save(self.folder, tag, values, node_local=True, **how)

    def load(self, tag: str | None = None, **how: Any) -> dict[str, Any]:
        return self.sharded.load(self.folder, tag, node_local=True, **how).values

    @property
    def values(self) -> Tensor:
        return torch.cat([value.reshape(-1) for value in whole(self.model).values()])


def saved(root: Path, ranks: int, ranks_of_a_host: int = RANKS_OF_A_HOST, **how: Any) -> Tensor:
    """Two checkpoints, and the values of the second."""

    def body(rank: int) -> Tensor:
        run = Run(rank, root, ranks_of_a_host)
        for number, tag in enumerate(("one", "two")):
            run.train(number)
            run.save(tag, **how)
        run.sharded.checkpoints.wait()
        return run.values

    values: Tensor = on_ranks(body, ranks)[0]
    return values


def loaded(root: Path, ranks: int, ranks_of_a_host: int = RANKS_OF_A_HOST, **how: Any) -> tuple[Tensor, str]:
    def body(rank: int) -> tuple[Tensor, str]:
        run = Run(rank, root, ranks_of_a_host)
        told = run.load(**how)
        assert told["best"] == float("inf")
        return run.values, told["tag"]

    everyone = on_ranks(body, ranks)
    assert all(torch.equal(one[0], everyone[0][0]) for one in everyone)
    found: tuple[Tensor, str] = everyone[0]
    return found


def names(root: Path, host: int, tag: str) -> set[str]:
    return {path.name.partition(".")[0] for path in (root / f"host{host}" / tag).glob("rank_*")}


@pytest.mark.parametrize(
    ("hosts", "ranks_of_a_host", "asynchronous"), [(3, 2, False), (2, 2, False), (3, 1, False), (2, 2, True)]
)
def test_the_loss_of_a_host(hosts: int, ranks_of_a_host: int, asynchronous: bool, tmp_path: Path) -> None:
    """Hosts keep two copies of each part, so the others go on alone; and when an empty one comes in its place, all do."""
    ranks = hosts * ranks_of_a_host
    values = saved(tmp_path, ranks, ranks_of_a_host, asynchronous=asynchronous, keep_last=1)
    for host in range(hosts):
        assert {path.name for path in (tmp_path / f"host{host}").iterdir()} == {"two", files.LATEST}
        assert len(names(tmp_path, host, "two")) == 2 * ranks_of_a_host
    shutil.rmtree(tmp_path / "host1")
    if hosts == 2:
        shutil.copytree(tmp_path / "host0", tmp_path / "alone" / "host0")
        assert torch.equal(loaded(tmp_path / "alone", ranks_of_a_host)[0], values)
    found, tag = loaded(tmp_path, ranks, ranks_of_a_host)
    assert torch.equal(found, values) and tag == "two"
    there = Counter(name for host in range(hosts) for name in names(tmp_path, host, "two"))
    assert there == {f"rank_{rank:05d}": 2 for rank in range(ranks)}, "as before, and no more"
    assert all(f"rank_{rank:05d}" in names(tmp_path, rank // ranks_of_a_host, "two") for rank in range(ranks))
    found, tag = loaded(tmp_path, 2, 1)  # ranks that need the files of other hosts, too
    assert torch.equal(found, values) and tag == "two"


def test_what_is_lost_is_said(tmp_path: Path) -> None:
    """Two neighbours went at once; then an older one that is whole is loaded, where that is wanted."""
    saved(tmp_path, 3, 1)
    for host in (1, 2):
        shutil.rmtree(tmp_path / f"host{host}" / "two")

    def body(rank: int) -> None:
        run = Run(rank, tmp_path, 1)
        for tag in ("two", None):
            with pytest.raises(CheckpointError, match="checkpoint two is lost: none of 3 hosts has rank_00001"):
                run.load(tag)
        with pytest.raises(CheckpointError, match=r"no host has a checkpoint in .*three"):
            run.load("three")
        assert run.load(fall_back=True)["tag"] == "one"

    on_ranks(body, 3)


@pytest.mark.parametrize("fall_back", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_damaged_copy_gives_way_to_the_other_hosts(tmp_path: Path, fall_back: bool) -> None:
    """Of each file one copy is damaged, at its own host or at the next; with both of one gone there is no such checkpoint."""
    values = saved(tmp_path, 2, 1)
    for host, rank in ((0, 0), (0, 1)):
        damage(tmp_path, host, rank)
    found, tag = loaded(tmp_path, 2, 1, fall_back=fall_back)
    assert torch.equal(found, values) and tag == "two"
    shutil.rmtree(tmp_path / "host1" / "two")  # what is left was mended
    assert torch.equal(loaded(tmp_path, 2, 1)[0], values)
    for host in (0, 1):
        damage(tmp_path, host, 1)

    def body(rank: int) -> None:
        run = Run(rank, tmp_path, 1)
        with pytest.raises(CheckpointError, match=r"rank_00001.* is damaged: its bytes"):
            run.load("two")
        assert run.load(fall_back=True)["tag"] == "one"

    on_ranks(body, 2)


def damage(root: Path, host: int, rank: int) -> None:
    (path,) = (root / f"host{host}" / "two").glob(f"rank_{rank:05}*")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def test_hosts_that_were_killed_before_their_manifests_have_their_parts(tmp_path: Path) -> None:
    """Of four, two had come to the manifest, and to remove what is old: neither they nor the others have one of both whole."""
    values = saved(tmp_path, 4, 1)
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host{host}" / "one")
    for host in (2, 3):
        (tmp_path / f"host{host}" / "two" / files.MANIFEST).unlink()
        (tmp_path / f"host{host}" / files.LATEST).write_text("one")
    found, tag = loaded(tmp_path, 4, 1)
    assert torch.equal(found, values) and tag == "two"


@pytest.mark.parametrize("what", ["cut", "unreadable", "manifest"])
def test_a_file_that_cannot_be_read_keeps_nobody_waiting(what: str, tmp_path: Path) -> None:
    saved(tmp_path, 2, 1)
    if what == "manifest":
        shutil.rmtree(tmp_path / "host0")

    def body(rank: int) -> str | None:
        run = Run(rank, tmp_path, 1)
        file, calls, read = run.folder / "file", [], Path.read_bytes
        if rank == 0 and what == "cut":
            file.write_bytes(b"12345")
        elif rank == 0 and what == "unreadable":
            file.symlink_to("/proc/self/mem")  # an I/O error at its begin

        def read_once(path: Path) -> bytes:
            calls.append(path)
            if len(calls) > 2:  # each of the two checkpoints was looked at
                raise OSError(5, "Input/output error")
            return read(path)

        with pytest.MonkeyPatch.context() as patched:
            try:
                if what != "manifest":
                    carry(run.sharded.checkpoints.control, run.folder, [FileMove(0, 1, "file", 10)])
                    return None
                if rank == 1:
                    patched.setattr(Path, "read_bytes", read_once)
                run.load()
            except (OSError, CheckpointError) as error:
                return str(error)
        return None

    told = on_ranks(body, 2)
    if what == "manifest":
        assert all("rank 1: " in one and "Input/output error" in one for one in told)
    else:
        assert told[1] is None
        assert told[0] is not None and ("ends too soon" if what == "cut" else "error") in told[0]


@pytest.mark.ranks(2)
def test_a_wrong_use_of_folders_is_told_on_every_rank(rank: int, tmp_path: Path) -> None:
    """Hosts see folders of their own without node_local, or share one with it, or ranks do not agree."""
    run = Run(rank, tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"rank 1: this rank does not see .* save with node_local=True"):
        run.sharded.save(run.folder, "one")
    for work in (run.sharded.save, run.sharded.load):
        with pytest.raises(UsageError, match="node_local is True on rank 0 and False on rank 1"):
            work(run.folder, "one", node_local=rank == 0)
    run.folder = tmp_path / "shared"
    with pytest.raises(CheckpointError, match=r"several hosts share the folder .*Save without node_local"):
        run.save("one")
    assert not list((tmp_path / "shared").rglob("rank_*"))


def test_a_disk_that_is_full_on_the_next_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has the checkpoint then, and everybody hears why; the one before is as it was."""
    values = saved(tmp_path, 2, 1)

    def body(rank: int) -> str:
        run = Run(rank, tmp_path, 1)
        run.load()
        run.train(2)
        if rank == 1:
            monkeypatch.setattr(saving, "carry", _carry_where_files_stay_small)
        with pytest.raises(CheckpointError, match=r"rank 1: .*File too large") as told:
            run.save("three")
        return str(told.value)

    assert len(set(on_ranks(body, 2))) == 1
    assert torch.equal(loaded(tmp_path, 2, 1)[0], values)
    assert not list(tmp_path.rglob("three/rank_*"))


def _carry_where_files_stay_small(*arguments: Any) -> None:
    with file_size_limit(1024):
        carry(*arguments)


@pytest.mark.ranks(2)
def test_an_engine_does_it_by_its_config(rank: int, tmp_path: Path) -> None:
    members.host_id = lambda: str(rank)  # type: ignore[assignment]
    folder = tmp_path / f"host{rank}"
    engine = build_engine(2, checkpoint={"use_node_local_storage": True})
    engine_steps(engine, 0, [0])
    engine.save_checkpoint(folder, client_state={"best": 1})
    if rank == 0:
        shutil.rmtree(folder)
    path, state = engine.load_checkpoint(folder)
    assert path == str(folder / "global_step1") and state == {"best": 1}
