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
from ranks import on_ranks
from twin import build, step
from typer.testing import CliRunner

import zeroshard
from zeroshard import CheckpointError, UsageError
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint import saving
from zeroshard.checkpoint.hugging_face import export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.integrations.transformers import whole_state_dict
from zeroshard.tools.main import app

pytestmark = pytest.mark.full


def save(folder: Path, *tags: str, **more: Any) -> None:
    def body(rank: int) -> None:
        model, sharded = build(2)
        for number, tag in enumerate(tags):
            step(model, sharded, rank, number)
            sharded.save(folder, tag, **more)

    on_ranks(body, 1)


def change(checkpoint: Path, what: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, with a checksum that is right."""
    path = checkpoint / files.MANIFEST
    body = json.loads(path.read_text())
    del body["checksum"]
    what(body)
    write_manifest(path, body)


@pytest.mark.parametrize("is_adapter", [False, True])
@pytest.mark.parametrize(
    "name", ["/{}/outside/", "../outside/", "a/../../outside/", "..", "./", "a/b/", "a\\b/", "\0/", "a"]
)
def test_an_export_writes_nowhere_else(name: str, is_adapter: bool, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", "one")
    name = name.format(tmp_path)
    (tmp_path / "outside").mkdir()

    def harm(body: dict[str, Any]) -> None:
        description = body["values"]["description"]
        if is_adapter:
            description["adapters"] = {name: {"weight": next(iter(body["parameters"]))}}
        else:
            description["files"] = {f"{name}config.json": {"$(command)": 1}}

    change(tmp_path / "ckpt" / "one", harm)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="description of the model"):
        export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out")
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out")])
    assert done.exit_code != 0
    assert "Traceback" not in done.output
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["evil.json", "model.safetensors", "x/.bashrc"])
def test_an_export_writes_no_other_files(name: str, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", "one")
    change(tmp_path / "ckpt" / "one", lambda body: body["values"]["description"].update(files={name: {}}))
    with pytest.raises(CheckpointError, match="description of the model"):
        export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out")


def _first(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(body["parameters"].values()))
    return found


def _piece(body: dict[str, Any], place: int, value: Any) -> None:
    body["layouts"][0][0]["pieces"][0][place] = value


def _range(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["parameters"]["up.weight"]["states"]["parameters"]["ranges"][0]
    return found


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file without checksums": lambda body: body["files"][0].update(checksums=[]),
    "a negative shape": lambda body: _first(body).update(shape=[-3, 4]),
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


NOT_INSPECTED = [
    "a shard whose rank lists no ranges", "a layout of other elements", "a layout of fewer elements", "a description that is none",
    "a description of other things",
]  # fmt: skip
"""`inspect` verifies the bytes of files. Readers notice the rest."""
WRONG_IN_VERSION_1: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file without checksums": lambda body: body["files"][0].pop("checksums"),
    "a range in no file": lambda body: _range(body).update(file=7),
    "a range beyond its file": lambda body: _range(body).update(offset=1 << 40),
    "a range beyond its parameter": lambda body: _range(body).update(stop=1 << 20),
    "a negative offset": lambda body: _range(body).update(offset=-8),
}


@pytest.mark.parametrize("what", WRONG_IN_VERSION_1)
def test_an_old_manifest_that_was_changed_with_care_is_refused(what: str, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "old_checkpoints" / "version_1", tmp_path / "one")
    export(open_checkpoint(tmp_path / "one"), tmp_path / "good")
    change(tmp_path / "one", WRONG_IN_VERSION_1[what])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        export(open_checkpoint(tmp_path / "one"), tmp_path / "out")


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_that_was_changed_with_care_is_refused_by_name(what: str, tmp_path: Path) -> None:
    save(tmp_path / "ckpt", "one")
    change(tmp_path / "ckpt" / "one", WRONG[what])
    with pytest.raises(CheckpointError):
        export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out")
    for command in (
        ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out")],
        ["inspect", str(tmp_path / "ckpt")],
    ):
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

    def body(rank: int) -> None:
        sharded = build(2)[1]
        if what == "nothing":
            sharded.load(tmp_path)
            return
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            sharded.load(tmp_path)

    on_ranks(body, 1)


def test_a_folder_that_was_not_meant_is_named_in_full(tmp_path: Path) -> None:
    """There is none; the folder above was meant; or there is no such tag."""

    def body(rank: int) -> None:
        os.chdir(tmp_path)
        engine = zeroshard.initialize(
            model=torch.nn.Linear(3, 4), config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        )[0]
        sharded = sharded_of(engine)
        sharded.save("ckpt", "end")
        with pytest.raises(CheckpointError, match=f"{tmp_path}/wrong has no file 'latest': there is no such folder"):
            sharded.load("wrong")
        with pytest.raises(
            CheckpointError, match=f"{tmp_path}/ckpt/other is not a checkpoint: there is no such folder"
        ):
            sharded.load("ckpt", "other")
        Path("ckpt/killed").mkdir()
        with pytest.raises(CheckpointError, match=r"no manifest.json, .* Load another tag .* or pass fall_back=True"):
            sharded.load("ckpt", "killed")
        for load in (sharded.load, engine.load_checkpoint):  # the engine began afresh, with a warning
            with pytest.raises(CheckpointError, match=f"name {tmp_path}/ckpt and the tag 'end'"):
                load("ckpt/end")
        with pytest.warns(UserWarning, match=f"no checkpoint was loaded: {tmp_path}/new"):
            assert engine.load_checkpoint("new") == (None, None)

    zeroshard.testing.run_ranks(body, 1)


@pytest.mark.parametrize("node_local", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_whose_file_another_job_removed_has_failed(node_local: bool, asynchronous: bool, tmp_path: Path) -> None:
    """The other job begins a save to the same folder, and takes files that no manifest names for leftovers."""

    def body(rank: int) -> None:
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

    zeroshard.testing.run_ranks(body, 2)


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
    def body(rank: int, ahead: float) -> None:
        now = files.time.time()
        files.time.time = lambda: now + ahead
        model, sharded = build(2)
        step(model, sharded, rank, 0)
        sharded.save(tmp_path, f"at {ahead}", keep_last=2)

    for ahead in (100_000.0, 0.0, 1.0):
        zeroshard.testing.run_ranks(body, 1, ahead)
    assert files.tags(tmp_path) == ["at 1.0", "at 0.0"]


def test_a_save_from_a_working_folder_that_was_removed_names_it(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        gone = tmp_path / f"gone{rank}"
        gone.mkdir()
        os.chdir(gone)
        model, sharded = build(2)
        step(model, sharded, rank, 0)
        if rank == 0:
            gone.rmdir()
        with pytest.raises(CheckpointError, match="ckpt is relative, and this program's working folder was removed"):
            sharded.save("ckpt", "one")
        os.chdir(tmp_path)
        sharded.save("ckpt", "one")

    zeroshard.testing.run_ranks(body, 2)


def test_a_folder_without_a_name_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        os.chdir(tmp_path)
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        engine = zeroshard.initialize(model=torch.nn.Linear(3, 4), config=config)[0]
        with pytest.raises(CheckpointError, match="folder to save to is empty"):
            engine.save_checkpoint("")
        assert not [*tmp_path.iterdir()]

    zeroshard.testing.run_ranks(body, 1)


def test_an_empty_latest_is_named(tmp_path: Path) -> None:
    (tmp_path / files.LATEST).write_text("")
    with pytest.raises(CheckpointError, match=r"latest is empty.*fall_back=True"):
        files.latest_tag(tmp_path)


def test_a_tag_of_a_megabyte_is_a_short_error(tmp_path: Path) -> None:
    (tmp_path / files.LATEST).write_text("x" * 1_000_000)
    with pytest.raises(CheckpointError, match="cannot be a tag") as caught:
        files.latest_tag(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("tag", ["one ", " one", "\tone", "one\n", "a\0b", "a\nb"])
def test_a_tag_that_latest_would_not_find_is_refused(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be a tag"):
        files.check_tag(tag)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tag_that_is_no_text_is_refused_on_every_rank(rank: int, asynchronous: bool, tmp_path: Path) -> None:
    _, sharded = build(2)
    for tag in (5, b"five", 5.0):
        with pytest.raises(CheckpointError, match="cannot be a tag, a string: give "):
            sharded.save(tmp_path, tag, asynchronous=asynchronous)
        with pytest.raises(CheckpointError, match="cannot be a tag, a string: give "):
            sharded.load(tmp_path, tag)


def test_an_asynchronous_save_goes_to_the_folder_that_was_meant(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "there").mkdir()
        os.chdir(tmp_path / "here")
        _, sharded = build(2)
        sharded.save("ckpt", "one", asynchronous=True)
        os.chdir(tmp_path / "there")
        sharded.checkpoints.wait()
        assert (tmp_path / "here" / "ckpt" / "one").is_dir()

    zeroshard.testing.run_ranks(body, 1)


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


def test_a_step_in_the_middle_of_a_save_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread takes one while a file is written: the checkpoint would have values of two steps."""

    def body(rank: int) -> None:
        model, sharded = build(1)
        step(model, sharded, rank, 0)
        sharded.save(tmp_path, "before")
        synchronise = os.fsync

        def late(file: int) -> None:
            monkeypatch.setattr(os, "fsync", synchronise)
            step(model, sharded, rank, 1)
            synchronise(file)

        monkeypatch.setattr(os, "fsync", late)
        with pytest.raises(CheckpointError, match="a step began while the save copied its values"):
            sharded.save(tmp_path, "torn")
        assert sorted(files.tags(tmp_path)) == ["before"]
        sharded.save(tmp_path, "after")
        assert sorted(files.tags(tmp_path)) == ["after", "before"]

    on_ranks(body, 2)
