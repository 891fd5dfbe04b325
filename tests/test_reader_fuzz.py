"""Readers of files that anybody may have written: a mutated file is refused by a `ZeroshardError`, or read; nothing else happens.

Nothing else is another exception, a write outside of the target folder, or memory that the files do not account for. Each
mutation is of one file, and its seed says which one, how, and which reader sees it.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack
from twin import build, step

import zeroshard
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.cli import checkpoints
from zeroshard.errors import ZeroshardError
from zeroshard.formats.consolidated import state_dict_of, write_files
from zeroshard.formats.hugging_face import INDEX, export
from zeroshard.testing import run_ranks

MORE_MEMORY = 256 << 20
"""Bytes that readers may take beyond what the process has: their buffers are of fixed sizes, 64 MiB at most."""


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


def _containers(tree: Any) -> list[Any]:
    """List the dicts and lists of a JSON tree that hold something."""
    found = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list) and node:
            found.append(node)
            waiting += list(node.values()) if isinstance(node, dict) else node
    return found


def _place(tree: Any, pick: random.Random) -> Any:
    """Pick a dict or list of a JSON tree: one of all, or by a random way down, so that small branches have their turn."""
    containers = _containers(tree)
    if not containers or pick.random() < 0.4:
        return pick.choice(containers) if containers else None
    node = tree
    while pick.random() < 0.85:
        below = [
            one for one in (node.values() if isinstance(node, dict) else node) if isinstance(one, dict | list) and one
        ]
        if not below:
            break
        node = pick.choice(below)
    return node


def _mutate_tree(tree: Any, tmp_path: Path, pick: random.Random) -> None:
    """Change one to three places of a JSON tree."""
    for _ in range(pick.choice([1, 1, 1, 2, 3])):
        node = _place(tree, pick)
        if not node:
            return
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
            node[key] = _strange(tmp_path, pick)


def _mutate_bytes(data: bytes, pick: random.Random) -> bytes:
    """Cut, flip, insert or repeat some bytes; near the front as often as not."""
    at = pick.randrange(min(len(data), pick.choice([16, len(data)])) + 1)
    how = pick.randrange(4)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes([pick.randrange(256)]) + data[at + 1 :]
    if how == 2:
        return (
            data[:at]
            + pick.choice([pick.randbytes(1), pick.randbytes(100), b"[" * 100_000, b'{"a":' * 100_000])
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
        body["checksum"] = files._digest(body)
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


def _read_checkpoint(folder: Path, out: Path, sharded: Any, pick: random.Random) -> None:
    """Inspect, consolidate in one of three ways, or load."""
    how = pick.randrange(6)
    if how == 0:
        with contextlib.redirect_stdout(io.StringIO()):
            checkpoints._print(checkpoints.describe(open_checkpoint(folder), verify=True))
    elif how == 1:
        export(open_checkpoint(folder), out, max_shard_nbytes=2000)
    elif how == 2:
        write_files(open_checkpoint(folder), out)
    elif how == 3:
        state_dict_of(folder)
    else:
        sharded.load(folder)


def _read_model(folder: Path, model: torch.nn.Module) -> None:
    for strict in (True, False):
        zeroshard.load_pretrained(model, folder, strict=strict)


def _good_files(folder: Path) -> tuple[Any, torch.nn.Module]:
    """Write a checkpoint, one with an adapter's description, and a model in several files; return what may load them."""
    model, sharded = build(2)
    step(model, sharded, 0, 0)
    sharded.save(
        folder / "ckpt", "one", {"scheduler": {"step": 3}, "odd": [(1, 2), {1: b"x"}, torch.ones(2), torch.float32]}
    )
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
    path.write_text(json.dumps({**body, "checksum": files._digest(body)}))
    export(open_checkpoint(folder / "ckpt"), folder / "model", max_shard_nbytes=2000)
    return sharded, Stack()


KINDS: dict[str, tuple[str, Callable[[Path, Path, random.Random], None]]] = {
    "ckpt/one/manifest.json": ("ckpt", _mutate_json),
    "adapter/one/manifest.json": ("adapter", _mutate_json),
    "ckpt/one/*.safetensors": ("ckpt", _mutate_safetensors),
    "ckpt/latest": ("ckpt", _mutate_latest),
    f"model/{INDEX}": ("model", _mutate_json),
    "model/*.safetensors": ("model", _mutate_safetensors),
}
SEEDS = [range(240), pytest.param(range(240, 2000), marks=pytest.mark.full)]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{len(seeds)} mutations")
def test_a_mutated_file_is_refused_or_read(seeds: range, tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, list[int]]:
        good = tmp_path / "good"
        sharded, plain = _good_files(good)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        found: dict[str, list[int]] = {}
        work = tmp_path / "work"
        for seed in seeds:
            pick = random.Random(seed)
            kind = list(KINDS)[seed % len(KINDS)]
            folder, mutate = KINDS[kind]
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(good / folder, work / folder)
            victim = pick.choice(sorted(work.glob(kind)))
            mutate(victim, tmp_path, pick)
            before = sorted(tmp_path.rglob("*"))
            try:
                if folder == "model":
                    _read_model(work / folder, plain)
                else:
                    _read_checkpoint(work / folder, work / "out", sharded, pick)
            except ZeroshardError as error:
                if len(str(error).splitlines()) > 3:
                    found.setdefault(f"too long: {error}", []).append(seed)
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                found.setdefault(f"{error!r:.150} in {Path(where.filename).name}:{where.lineno}", []).append(seed)
            outside = [path for path in tmp_path.rglob("*") if work / "out" not in (path, *path.parents)]
            if sorted(outside) != before:
                found.setdefault("a write outside of the target folder", []).append(seed)
        return found

    (found,) = run_ranks(body, 1, timeout=600)
    assert not found, "\n".join(f"{what} (seeds {seeds[:5]})" for what, seeds in found.items())
