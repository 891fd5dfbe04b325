"""A reader of a mutated file reads it, or raises a `ZeroshardError`, and nothing else happens.

No other exception, write outside of the target folder, or memory beyond the file's size is allowed. Each mutation changes
one file, and its seed determines the file, the change and the reader.

torch.distributed.checkpoint reads its own folders, whose `.metadata` is a pickle, and raises its own errors. zeroshard's
functions that it calls, or that use its results, must raise no other exceptions.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import resource
import shutil
import signal
import traceback
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_checkpoints import FOLDER as OF_DEEPSPEED
from insides import STAND_INS, Fragment, LossScaler, checksum, print_checkpoint, write_manifest
from models import Stack
from torch.distributed.checkpoint.api import CheckpointException
from twin import build, step

import zeroshard
from zeroshard.checkpoint import deepspeed
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.consolidated import state_dict_of, write_files
from zeroshard.checkpoint.hugging_face import INDEX, export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.errors import ZeroshardError
from zeroshard.testing import run_ranks
from zeroshard.tools import checkpoints

pytestmark = pytest.mark.full

MORE_MEMORY = 256 << 20
"""Bytes that readers may take beyond what the process has: their buffers are of fixed sizes, 64 MiB at most."""

SECONDS = 60
"""Until a reader that does not end is ended."""


def _strange(tmp_path: Path, pick: random.Random) -> Any:
    """A value that a file should not hold there."""
    deep: Any = 1
    for _ in range(pick.choice([3, 50])):
        deep = [deep]
    return pick.choice(
        [None, True, -1, 0, 1, 3, 1 << 20, 1 << 28, 1 << 40, 1 << 63, 1 << 70, -(1 << 70), 0.5, 1e300, float("nan"), float("inf"),
         "", "x", "float32", "int64", "complex64", "save", "F32", "../outside", str(tmp_path / "outside"), "a/../../outside/",
         "\0", "ü" * 300, [], {}, [[]], [1], [-1], [1 << 40], {"$tensor": "x"}, {"$scalar": ["float32", 1]}, {"$dict": [[[1], 2]]},
         {"$what": 1}, {"$dtype": "save"}, {"$bytes": "x"}, {"$deque": 1}, {"a": {"b": 1}}, deep]
    )  # fmt: skip


def _opened(node: Any) -> Any:
    """Return a dict or list that may be changed: of an object, its attributes; None of anything else."""
    if isinstance(node, dict | list):
        return node
    is_object = is_dataclass(node) or isinstance(node, LossScaler | Fragment)
    return vars(node) if is_object and not isinstance(node, type) else None


def _levels(tree: Any) -> list[list[Any]]:
    """List the dicts, lists and objects of a tree that hold something, by their depth."""
    levels = []
    level = [_opened(tree)]
    while level := [node for node in level if node]:
        levels.append(level)
        level = [_opened(one) for node in level for one in (node.values() if isinstance(node, dict) else node)]
    return levels


def _mutate_tree(tree: Any, tmp_path: Path, pick: random.Random, strange: Callable[..., Any] = _strange) -> None:
    """Change one to three places of a tree."""
    for _ in range(pick.choice([1, 1, 1, 2, 3])):
        levels = _levels(tree)
        if not levels:
            return
        node = pick.choice(pick.choice(levels))  # by depth first, so that small branches have their turn
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = pick.choice(keys)
        how = pick.randrange(6)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[pick.choice(["x", "", "[/bold]", "../outside/", "$tensor", "__metadata__", "a.b"])] = node.pop(key)
        elif how == 2:
            node[key] = node[pick.choice(keys)]
        elif how == 3 and isinstance(node[key], int) and not isinstance(node[key], bool):
            node[key] += pick.choice([-1, 1, 4, 1 << 20, 1 << 30])
        elif how == 4 and isinstance(node, list):
            node.append(node[key])
        else:
            node[key] = strange(tmp_path, pick)


def _mutate_bytes(data: bytes, pick: random.Random, depth: int = 100_000) -> bytes:
    """Cut, flip, insert or repeat some bytes; near the front as often as not. What is inserted opens up to `depth` brackets."""
    at = pick.randrange(min(len(data), pick.choice([16, len(data)])) + 1)
    how = pick.randrange(4)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([pick.randrange(256)]) + data[at + 1 :]
    if how == 2:
        return (
            data[:at]
            + pick.choice([pick.randbytes(1), pick.randbytes(100), b"[" * depth, b'{"a":' * depth])
            + data[at:]
        )
    return data[:at] + data[at // 2 :]


def _mutate_json(path: Path, tmp_path: Path, pick: random.Random) -> None:
    """Change a JSON file; of a manifest, the checksum is right again."""
    if pick.random() < 0.25:
        path.write_bytes(_mutate_bytes(path.read_bytes(), pick))
        return
    body = json.loads(path.read_text())
    is_manifest = body.pop("checksum", None) is not None
    _mutate_tree(body, tmp_path, pick)
    if is_manifest:
        body["checksum"] = checksum(body)
    path.write_text(json.dumps(body))


def _mutate_safetensors(path: Path, tmp_path: Path, pick: random.Random) -> None:
    data = path.read_bytes()
    if pick.random() < 0.3:
        path.write_bytes(_mutate_bytes(data, pick))
        return
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    _mutate_tree(header, tmp_path, pick)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _mutate_latest(path: Path, tmp_path: Path, pick: random.Random) -> None:
    names = [
        b"",
        b"..",
        b"/",
        b"one\n",
        b"one/../one",
        b"outside",
        b"\xff\xfe",
        b"\0",
        b"x" * 5000,
        str(tmp_path).encode(),
    ]
    path.write_bytes(pick.choice([*names, _mutate_bytes(path.read_bytes(), pick)]))


def _strange_tensor(tmp_path: Path, pick: random.Random) -> Any:
    """A tensor, or another value, that a pickle should not hold there."""
    small = torch.ones(3)
    return pick.choice(
        [small, torch.tensor(2.0), torch.zeros(0), small.expand(2, 3), torch.ones(1).expand(1 << 30), torch.ones(1).expand(1 << 40),
         torch.zeros(4, device="meta"), torch.zeros(1 << 40, device="meta"), small.to_sparse(), small.bool(), small.long(),
         small.to(torch.complex64), torch.nn.Parameter(small), torch.Size([1 << 40]), torch.Size([0]), torch.float16, {1, 2},
         (1, 2), b"x", lambda: None, _strange(tmp_path, pick)]
    )  # fmt: skip


def _mutate_pickled(path: Path, tmp_path: Path, pick: random.Random) -> None:
    """Change a file of torch.save: its bytes, the bytes of its pickle, whose checksum is right again, or what it holds."""
    data = path.read_bytes()
    how = pick.random()
    depth = 1000  # torch looks through its own error, which quotes the file, in time that grows with its length squared
    if how < 0.2:
        path.write_bytes(_mutate_bytes(data, pick, depth))
    elif how < 0.4:
        with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(path, "w") as after:
            for name in before.namelist():
                content = before.read(name)
                after.writestr(name, _mutate_bytes(content, pick, depth) if name.endswith("data.pkl") else content)
    else:
        with torch.serialization.safe_globals(STAND_INS):
            content = torch.load(io.BytesIO(data), weights_only=True)
        _mutate_tree(content, tmp_path, pick, _strange_tensor)
        with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):  # what cannot be pickled
            torch.save(content, path)


def _mutate_metadata(path: Path, tmp_path: Path, pick: random.Random) -> None:
    """Change what the `.metadata` of a DCP folder holds. Its bytes stay a pickle of torch's classes: any other runs as code."""

    def strange(tmp_path: Path, pick: random.Random) -> Any:
        value = _strange_tensor(tmp_path, pick)
        return None if callable(value) else value

    content = pickle.loads(path.read_bytes())
    tree = {field.name: getattr(content, field.name) for field in fields(content)}
    _mutate_tree(tree, tmp_path, pick, strange)
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # what cannot be pickled, or misses an attribute
        path.write_bytes(pickle.dumps(type(content)(**tree)))


def _mutate_file_of_dcp(path: Path, tmp_path: Path, pick: random.Random) -> None:
    path.write_bytes(_mutate_bytes(path.read_bytes(), pick))


def _read_checkpoint(folder: Path, out: Path, sharded: Any, pick: random.Random) -> None:
    """Inspect, consolidate in one of three ways, or load."""
    how = pick.randrange(6)
    if how == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            print_checkpoint(checkpoints.describe(open_checkpoint(folder), verify=True))
    elif how == 1:
        export(open_checkpoint(folder), out, max_shard_nbytes=2000)
    elif how == 2:
        write_files(open_checkpoint(folder), out)
    elif how == 3:
        state_dict_of(folder)
    else:
        sharded.load(folder)


Read = Callable[[str, Path, random.Random], None]
Mutate = Callable[[Path, Path, random.Random], None]


def _ours(folder: Path) -> Read:
    """Write a checkpoint, one with an adapter's description, and a model in several files; return what reads them."""
    model, sharded = build(2)
    step(model, sharded, 0, 0)
    values = {"scheduler": {"step": 3}, "odd": [(1, 2), {1: b"x"}, torch.ones(2), torch.float32]}
    sharded.save(folder / "ckpt", "one", values)
    shutil.copytree(folder / "ckpt", folder / "adapter")
    path = folder / "adapter" / "one" / files.MANIFEST
    body = json.loads(path.read_text())
    del body["checksum"]
    name = next(iter(body["parameters"]))
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q"], "base_model_name_or_path": None}
    body["values"]["description"].update(
        adapters={"": {f"base.{name}": name}},
        files={"adapter_config.json": config, "config.json": {"dtype": "float32"}},
    )
    write_manifest(path, body)
    export(open_checkpoint(folder / "ckpt"), folder / "model", max_shard_nbytes=2000)
    plain = Stack()

    def read(name: str, work: Path, pick: random.Random) -> None:
        if name == "model":
            for strict in (True, False):
                zeroshard.load_pretrained(plain, work / name, strict=strict)
        else:
            _read_checkpoint(work / name, work / "out", sharded, pick)

    return read


def _deepspeeds(folder: Path) -> Read:
    for name in ("stage1", "stage3"):
        shutil.copytree(OF_DEEPSPEED / name, folder / name)

    def read(name: str, work: Path, pick: random.Random) -> None:
        imported = deepspeed.import_deepspeed(work / name, work / "out")
        checkpoints.describe(
            open_checkpoint(imported.parent), verify=True
        )  # a checkpoint that is written is a right one

    return read


def _dcps(folder: Path) -> Read:
    model, sharded = build(2)
    step(model, sharded, 0, 0)
    dcp.save({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=folder / "dcp")

    def read(name: str, work: Path, pick: random.Random) -> None:
        """Take a step with what was read. Errors of torch's own readers are torch's."""
        try:
            dcp.load({"train": zeroshard.DistributedState(sharded)}, checkpoint_id=work / name)
        except BaseException as error:
            causes = [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
            for cause in causes:
                where = traceback.extract_tb(cause.__traceback__)
                if where and "zeroshard/checkpoint" in where[-1].filename and not isinstance(cause, ZeroshardError):
                    raise cause from None
        step(model, sharded, 0, 1)

    return read


KINDS: dict[str, tuple[Callable[[Path], Read], dict[str, tuple[str, Mutate]]]] = {
    "ours": (
        _ours,
        {
            "ckpt/one/manifest.json": ("ckpt", _mutate_json),
            "adapter/one/manifest.json": ("adapter", _mutate_json),
            "ckpt/one/*.safetensors": ("ckpt", _mutate_safetensors),
            "ckpt/latest": ("ckpt", _mutate_latest),
            f"model/{INDEX}": ("model", _mutate_json),
            "model/*.safetensors": ("model", _mutate_safetensors),
        },
    ),
    "DeepSpeed's": (
        _deepspeeds,
        {"stage1/*/*.pt": ("stage1", _mutate_pickled), "stage3/*/*.pt": ("stage3", _mutate_pickled)},
    ),
    "DCP's": (_dcps, {"dcp/.metadata": ("dcp", _mutate_metadata), "dcp/*.distcp": ("dcp", _mutate_file_of_dcp)}),
}
"""What writes the files of a kind, and returns their reader; and by their names, the folder to read and the change."""


def _run(seeds: range, tmp_path: Path, kinds: dict[str, tuple[str, Mutate]], read: Read) -> dict[str, list[int]]:
    """Mutate copies of the files in `good`, and read each; return what was found, and the seeds that found it."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    found: dict[str, list[int]] = {}
    work = tmp_path / "work"
    for seed in seeds:
        pick = random.Random(seed)
        kind = list(kinds)[seed % len(kinds)]
        folder, mutate = kinds[kind]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(tmp_path / "good" / folder, work / folder)
        victim = pick.choice(sorted(work.glob(kind)))
        mutate(victim, tmp_path, pick)
        before = sorted(tmp_path.rglob("*"))
        signal.alarm(SECONDS)  # ends the process, of which `run_ranks` then says so
        try:
            read(folder, work, pick)
        except ZeroshardError as error:
            if len(str(error).splitlines()) > 3:
                found.setdefault(f"too long: {error}", []).append(seed)
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.setdefault(f"{error!r:.150} in {Path(where.filename).name}:{where.lineno}", []).append(seed)
        outside = [path for path in tmp_path.rglob("*") if work / "out" not in (path, *path.parents)]
        if sorted(outside) != before:
            found.setdefault("a write outside of the target folder", []).append(seed)
    signal.alarm(0)
    return found


FEW = {"ours": 240, "DeepSpeed's": 60, "DCP's": 40}
SEEDS = [
    *((kind, range(few)) for kind, few in FEW.items()),
    *(pytest.param(kind, range(few, 1000), marks=pytest.mark.full) for kind, few in FEW.items()),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "seeds"), SEEDS, ids=str)
def test_a_mutated_file_is_refused_or_read(kind: str, seeds: range, tmp_path: Path) -> None:
    """A model that read one, or was refused, trains on."""

    def body(rank: int) -> dict[str, list[int]]:
        warnings.simplefilter("ignore")
        make, kinds = KINDS[kind]
        read = make(tmp_path / "good")
        with torch.serialization.safe_globals([LossScaler, Fragment]):
            return _run(seeds, tmp_path, kinds, read)

    found = run_ranks(body, 1, timeout=600)[0]
    assert not found, "\n".join(f"{what} (seeds {seeds[:5]})" for what, seeds in found.items())
