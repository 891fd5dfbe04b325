"""Unexpected conditions for checkpoints: a foreign manifest, links, a changed clock, and the end of a program."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import sharded_of, write_manifest
from twin import build, build_engine, step
from typer.testing import CliRunner

from zeroshard import CheckpointError, UsageError
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint import saving
from zeroshard.checkpoint.hugging_face import export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.integrations.transformers import whole_state_dict
from zeroshard.tools.main import app

pytestmark = pytest.mark.full


def save(folder: Path, *tags: str, **more: Any) -> None:
    model, sharded = build(2)
    for number, tag in enumerate(tags):
        step(model, sharded, 0, number)
        sharded.save(folder, tag, **more)


def change(checkpoint: Path, what: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, with a checksum that is right."""
    path = checkpoint / files.MANIFEST
    body = json.loads(path.read_text())
    del body["checksum"]
    what(body)
    write_manifest(path, body)


ELSEWHERE = ["/{}/outside/", "../outside/", "a/../../outside/", "..", "./", "a/b/", "a\\b/", "\0/", "a"]
OTHERS = [*(f"{name}config.json" for name in ELSEWHERE), "evil.json", "model.safetensors", "x/.bashrc"]


@pytest.mark.parametrize(
    ("kind", "name"), [*(("files", name) for name in OTHERS), *(("adapters", name) for name in ELSEWHERE)]
)
def test_an_export_writes_nowhere_else_and_no_other_files(kind: str, name: str, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", "one")
    name = name.format(tmp_path)
    (tmp_path / "outside").mkdir()

    def harm(body: dict[str, Any]) -> None:
        what = {"weight": next(iter(body["parameters"]))} if kind == "adapters" else {"$(command)": 1}
        body["values"]["description"][kind] = {name: what}

    change(tmp_path / "ckpt" / "one", harm)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="description of the model"):
        export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out")
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out")])
    assert done.exit_code != 0
    assert "Traceback" not in done.output
    assert sorted(tmp_path.rglob("*")) == before


def _first(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(body["parameters"].values()))
    return found


def _piece(body: dict[str, Any], place: int, value: Any) -> None:
    body["layouts"][0][0]["pieces"][0][place] = value


def _range(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["parameters"]["up.weight"]["states"]["parameters"]["ranges"][0]
    return found


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda body: body.update(version=9),
    "a file elsewhere": lambda body: body["files"][0].update(name="../../victim.safetensors"),
    "a file without checksums": lambda body: body["files"][0].update(checksums=[]),
    "a negative shape": lambda body: _first(body).update(shape=[-3, 4]),
    "a shape of too many elements": lambda body: _first(body).update(shape=[1 << 63], states={}),
    "a parameter without a name": lambda body: _first(body).update(names=[]),
    "a file without its checksum": lambda body: body["files"][0].pop("checksum"),
    "a layout that it lacks": lambda body: body["shards"][0].update(layout=1),
    "a shard in no file": lambda body: body["shards"][0].update(files=[7]),
    "a shard whose rank lists no ranges": lambda body: body["shards"][0].update(files=[None]),
    "a part of no mesh": lambda body: body["shards"][0].update(part=1),
    "a layout of no parameter": lambda body: _piece(body, 0, "none"),
    "a layout beyond a parameter": lambda body: _piece(body, 1, 1 << 20),
    "a layout beyond its bucket": lambda body: _piece(body, 2, 1 << 20),
    "a layout of other elements": lambda body: _piece(body, 1, 1),
    "a layout of fewer elements": lambda body: _piece(body, 3, 1),
    "a bucket of no elements": lambda body: body["layouts"][0][0].update(shard_numel=0),
    "a dimension of no parameter": lambda body: _first(body).update(dim=7),
    "a dtype that is none": lambda body: _first(body)["states"]["parameters"].update(dtype="save"),
    "a description that is none": lambda body: body["values"].update(description=3),
    "a description of other things": lambda body: body["values"].update(description={"files": 3}),
}


WRONG_IN_VERSION_1: dict[str, Callable[[dict[str, Any]], object]] = {
    "version 1, a file without checksums": lambda body: body["files"][0].pop("checksums"),
    "version 1, a range in no file": lambda body: _range(body).update(file=7),
    "version 1, a range beyond its file": lambda body: _range(body).update(offset=1 << 40),
    "version 1, a range beyond its parameter": lambda body: _range(body).update(stop=1 << 20),
    "version 1, a negative offset": lambda body: _range(body).update(offset=-8),
}
SAYS = {"another version": "has version 9; this zeroshard reads versions 1 to 3"} | dict.fromkeys(
    [*WRONG_IN_VERSION_1, "a file elsewhere"], r"manifest\.json is damaged"
)
NOT_INSPECTED = [
    "a shard whose rank lists no ranges", "a layout of other elements", "a layout of fewer elements", "a description that is none",
    "a description of other things",
]  # fmt: skip
"""`inspect` verifies the bytes of files. Readers notice the rest."""


@pytest.mark.parametrize("what", [*WRONG, *WRONG_IN_VERSION_1])
def test_a_manifest_that_was_changed_with_care_is_refused_by_name(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    if what in WRONG:
        save(folder, "one")
    else:
        shutil.copytree(Path(__file__).parent / "old_checkpoints" / "version_1", folder / "one")
        (folder / files.LATEST).write_text("one")
    export(open_checkpoint(folder), tmp_path / "good")
    change(folder / "one", (WRONG | WRONG_IN_VERSION_1)[what])
    with pytest.raises(CheckpointError, match=SAYS.get(what)):
        export(open_checkpoint(folder), tmp_path / "out")
    for command in (["consolidate", str(folder), str(tmp_path / "out")], ["inspect", str(folder)]):
        done = CliRunner().invoke(app, command)
        assert done.exception is None or isinstance(done.exception, SystemExit | CheckpointError), done.exception
        assert done.exit_code != 0 or (command[0] == "inspect" and what in NOT_INSPECTED)


def rewrite(
    checkpoint: Path, change_file: Callable[[dict[str, Any], dict[str, bytes]], object], shift: int = 8
) -> None:
    """Change the header and the tensors of rank 0's file, whose checksums are right again.

    Data begins at a multiple of 8 if `shift` is one.
    """

    def whole(body: dict[str, Any]) -> None:
        record = body["files"][0]
        path = checkpoint / record["name"]
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:start])
        tensors = {
            name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
            for name, entry in head.items()
            if name != "__metadata__"
        }
        change_file(head, tensors)
        position = 0
        for name, content in tensors.items():
            head.setdefault(name, {"dtype": "U8"})
            if head[name]["dtype"] == "U8":
                head[name]["shape"] = [len(content)]
            head[name]["data_offsets"] = [position, position + len(content)]
            position += len(content)
        text = json.dumps(head).encode()
        text += b" " * (shift - len(text) % 8)
        content = len(text).to_bytes(8, "little") + text + b"".join(tensors.values())
        table = struct.pack("<I", zlib.crc32(content[:-4]))  # one chunk
        path.write_bytes(content[:-4] + table)
        record.update(nbytes=len(content), checksum=zlib.crc32(content[: 8 + len(text)] + table))

    change(checkpoint, whole)


WRONG_FILES: dict[str, Callable[[dict[str, Any], dict[str, bytes]], object]] = {
    "nothing": lambda head, tensors: None,
    "data in the middle of an element": lambda head, tensors: None,
    "values that are no JSON": lambda head, tensors: tensors.update(values=b"{"),
    "values that are a list": lambda head, tensors: tensors.update(values=b"[]"),
    "buffers that are no tensors": lambda head, tensors: tensors.update(values=b'{"buffers": {"x": 3}}'),
    "tensors that it lacks": lambda head, tensors: tensors.update(values=b'{"random": {"$tensor": "none"}}'),
    "a random state of another kind": lambda head, tensors: tensors.update(values=b'{"random": {"torch": 3}}'),
    "no values": lambda head, tensors: (head.pop("values"), tensors.pop("values")),
    "values of another dtype": lambda head, tensors: (
        head["values"].update(dtype="I8", shape=[2]), tensors.update(values=b"{}")
    ),
    "a parameter of another dtype": lambda head, tensors: head[next(iter(tensors))].update(dtype="I32"),
    "no parameter": lambda head, tensors: tensors.update(other=tensors.pop(next(iter(tensors)))) or head.pop(
        next(name for name in head if name not in tensors and name != "__metadata__")
    ),
    "a shape of more elements": lambda head, tensors: head[next(iter(tensors))].update(shape=[1 << 40]),
    "a header of a list": lambda head, tensors: head.update(__metadata__=[]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_file_that_was_changed_with_care_is_refused_by_name(what: str, tmp_path: Path) -> None:
    save(tmp_path, "one")

    def order(head: dict[str, Any], tensors: dict[str, bytes]) -> None:
        WRONG_FILES[what](head, tensors)
        tensors["checksums"] = tensors.pop("checksums")  # the last one

    rewrite(tmp_path / "one", order, 9 if what == "data in the middle of an element" else 8)
    _, sharded = build(2)
    if what == "nothing":
        sharded.load(tmp_path)
        return
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        sharded.load(tmp_path)


@pytest.mark.ranks(1, fresh=True)
def test_a_folder_that_was_not_meant_is_named_in_full(rank: int, tmp_path: Path) -> None:
    """There is none, or no name; the folder above was meant; there is no such tag; or the working folder changes meanwhile."""
    os.chdir(tmp_path)
    engine = build_engine(0)
    sharded = sharded_of(engine)
    with pytest.raises(CheckpointError, match="folder to save to is empty"):
        engine.save_checkpoint("")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "there").mkdir()
    sharded.save("ckpt", "end", asynchronous=True)
    os.chdir("there")
    sharded.checkpoints.wait()
    assert not [*Path.cwd().iterdir()]
    os.chdir(tmp_path)
    (tmp_path / "ckpt" / "killed").mkdir()
    for folder, tag, says in (
        ("wrong", None, f"{tmp_path}/wrong has no file 'latest': there is no such folder"),
        ("ckpt", "other", f"{tmp_path}/ckpt/other is not a checkpoint: there is no such folder"),
        ("ckpt", "killed", r"no manifest.json, .* Load another tag .* or pass fall_back=True"),
        ("ckpt/end", None, f"name {tmp_path}/ckpt and the tag 'end'"),
    ):
        with pytest.raises(CheckpointError, match=says):
            sharded.load(folder, tag)
    with pytest.raises(CheckpointError, match="and the tag 'end'"):  # it began afresh, with a warning
        engine.load_checkpoint("ckpt/end")
    with pytest.warns(UserWarning, match=f"no checkpoint was loaded: {tmp_path}/new"):
        assert engine.load_checkpoint("new") == (None, None)


@pytest.mark.parametrize("node_local", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.ranks(2, fresh=True)
def test_a_save_whose_file_another_job_removed_has_failed(
    rank: int, node_local: bool, asynchronous: bool, tmp_path: Path
) -> None:
    """The other job begins a save to the same folder, and takes files that no manifest names for leftovers."""
    model, sharded = build(2)
    step(model, sharded, rank, 0)
    sharded.save(tmp_path, "before", node_local=node_local)
    write_part = saving.write_part

    def write_and_lose(*arguments: Any) -> Any:
        report = write_part(*arguments)
        while rank == 1 and len(list((tmp_path / "torn").iterdir())) < 2:
            time.sleep(0.01)  # rank 0 has not begun to write
        if rank == 1:
            files.clean(tmp_path)
        return report

    saving.write_part = write_and_lose
    with pytest.raises(CheckpointError, match=r"changed after this job wrote it, .* another job that saves to"):
        sharded.save(tmp_path, "torn", node_local=node_local, asynchronous=asynchronous)
        sharded.checkpoints.wait()
    saving.write_part = write_part
    assert files.tags(tmp_path) == ["before"]
    assert sharded.load(tmp_path, node_local=node_local).tag == "before"
    sharded.save(tmp_path, "torn", node_local=node_local)
    assert files.tags(tmp_path) == ["torn", "before"]


def test_links_are_nobodys_to_remove(tmp_path: Path) -> None:
    save(tmp_path / "archive", "kept")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "pinned").symlink_to(tmp_path / "archive" / "kept")
    save(tmp_path / "ckpt", "one", "two", keep_last=2)
    (tmp_path / "ckpt" / "best").symlink_to(tmp_path / "ckpt" / "two")
    save(tmp_path / "ckpt", "three", keep_last=2)
    assert files.tags(tmp_path / "ckpt") == ["three", "two"]
    assert files.is_whole(tmp_path / "archive" / "kept", files.read_manifest(tmp_path / "archive" / "kept"))


def test_a_clock_that_was_ahead_makes_no_old_checkpoint_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    for ahead in (100_000.0, 0.0, 1.0):
        with monkeypatch.context() as patched:
            patched.setattr(files.time, "time", lambda: now + ahead)  # noqa: B023
            save(tmp_path, f"at {ahead}", keep_last=2)
    assert files.tags(tmp_path) == ["at 1.0", "at 0.0"]


@pytest.mark.ranks(2, fresh=True)
def test_a_save_from_a_working_folder_that_was_removed_names_it(rank: int, tmp_path: Path) -> None:
    gone = tmp_path / f"gone{rank}"
    gone.mkdir()
    os.chdir(gone)
    _, sharded = build(2)
    if rank == 0:
        gone.rmdir()
    with pytest.raises(CheckpointError, match="ckpt is relative, and this program's working folder was removed"):
        sharded.save("ckpt", "one")
    os.chdir(tmp_path)
    sharded.save("ckpt", "one")


PROGRAM = """
import sys, torch, zeroshard
model = torch.nn.Linear(3, 4)
sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), 2)
sharded.save(sys.argv[1], "one", asynchronous=True)
print("the last line")
"""


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_program_whose_last_save_failed_says_so_at_its_end(fails: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "ckpt" if fails else tmp_path / "ckpt"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=False)
    assert "the last line" in done.stdout
    assert done.returncode == int(fails), done.stderr
    assert ("the last asynchronous save failed" in done.stderr) is fails


class Saving(torch.optim.SGD):
    """Saves in the middle of its step, as a signal's handler may."""

    save: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        self.save()
        return super().step(closure)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_a_save_in_the_middle_of_a_step_is_refused(rank: int, stage: int, tmp_path: Path) -> None:
    model, sharded = build(stage, make_optimizer=lambda p: Saving(p, lr=0.1), elementwise=True)
    step(model, sharded, rank, 0)
    sharded.save(tmp_path, "before")
    optimizer = sharded.optimizer
    optimizer.save = lambda: sharded.save(tmp_path, "within", within_step=True)
    with pytest.raises(UsageError, match=r"a save inside optimizer\.step"):
        step(model, sharded, rank, 1)
    del optimizer.save
    with pytest.raises(UsageError, match="load a checkpoint"):
        sharded.save(tmp_path, "torn", within_step=True)
    sharded.optimizer.zero_grad()
    with pytest.raises(CheckpointError):
        sharded.load(tmp_path, "absent")
    uses = {
        "a forward": partial(step, model, sharded, rank, 1), "a step": sharded.optimizer.step,
        "an export": partial(sharded.export, tmp_path / "out"), "a state dict": sharded.consolidated_state_dict,
        "a Trainer's save_model()": partial(whole_state_dict, sharded),
    }  # fmt: skip
    for use in uses.values():
        with pytest.raises(UsageError, match=r"an exception aborted optimizer\.step\(\).*Load a checkpoint"):
            use()
    sharded.load(tmp_path)
    step(model, sharded, rank, 1)
    sharded.save(tmp_path, "after")
    assert sorted(files.tags(tmp_path)) == ["after", "before"]


@pytest.mark.ranks(2)
def test_a_step_in_the_middle_of_a_save_is_refused(rank: int, tmp_path: Path) -> None:
    """As another thread takes one while a file is written: the checkpoint would have values of two steps."""
    model, sharded = build(1)
    step(model, sharded, rank, 0)
    sharded.save(tmp_path, "before")
    synchronise = os.fsync

    def late(file: int) -> None:
        os.fsync = synchronise
        step(model, sharded, rank, 1)
        synchronise(file)

    os.fsync = late
    with pytest.raises(CheckpointError, match="a step began while the save copied its values"):
        sharded.save(tmp_path, "torn")
    assert sorted(files.tags(tmp_path)) == ["before"]
    sharded.save(tmp_path, "after")
    assert sorted(files.tags(tmp_path)) == ["after", "before"]
