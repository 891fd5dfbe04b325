"""Owns the manifest: what a checkpoint holds and where, and the rule by which it exists. Called by saving, loading, export.

    folder/
        latest                              the tag of the newest
        global_step100/
            manifest.json                   the checkpoint exists when this does
            rank_00000.<save>.safetensors   what each rank wrote
            rank_00001.<save>.safetensors

Files have names that were never used before, and the manifest replaces its predecessor in one step: saving again under a tag
leaves the old checkpoint whole until the new one is. docs/checkpoint_format.md tells other programs how to read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroshard.errors import CheckpointError

MANIFEST, LATEST, VERSION = "manifest.json", "latest", 1
_OURS = re.compile(r"(rank_\d+\.[0-9a-f]+\.safetensors|manifest\.json(\.[0-9a-f]+\.tmp)?)")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileRecord(_Record):
    """A file beside the manifest."""

    name: str = Field(pattern=r"^rank_\d+\.[0-9a-f]+\.safetensors$")
    nbytes: int
    checksums: list[int]
    """CRC-32 of each chunk of `chunk_nbytes`; the last may be shorter."""


class RangeRecord(_Record):
    """Elements [start, stop) of a flattened parameter; `offset` counts bytes from the start of the file."""

    start: int
    stop: int
    file: int
    offset: int


class StateRecord(_Record):
    """One model state of one parameter. Its ranges are disjoint, in order, and cover all elements."""

    dtype: str
    ranges: list[RangeRecord]


class ParameterRecord(_Record):
    """One parameter."""

    shape: list[int]
    names: list[str]
    """All its names; more than one where it is tied."""
    trained: bool
    states: dict[str, StateRecord]
    """"parameters" (the master weights), and what the optimizer keeps along it."""
    values: dict[str, Any] = {}
    """What else the optimizer keeps, packed: step counts."""


class TensorRecord(_Record):
    """A tensor that a packed value names."""

    dtype: str
    shape: list[int]
    file: int
    offset: int


class Manifest(_Record):
    """See the module's docstring."""

    format: str = "zeroshard checkpoint"
    version: int = VERSION
    tag: str
    created: float
    """Seconds since 1970."""
    written_by: dict[str, str]
    world_size: int
    policy: dict[str, Any]
    optimizer: str | None
    chunk_nbytes: int
    files: list[FileRecord]
    parameters: dict[str, ParameterRecord]
    excluded: list[str] = []
    """Parameters that were left out: frozen ones, where that was asked for."""
    param_groups: list[dict[str, Any]] = Field(default_factory=list)
    """Packed hyperparameters of each param group, and the names of its parameters."""
    values: dict[str, Any] = {}
    """Everything else, packed, see values.py."""
    tensors: dict[str, TensorRecord] = {}


def write_manifest(folder: Path, manifest: Manifest, save: str) -> None:
    """Let the checkpoint exist: in one step, in place of what had the tag before."""
    body = manifest.model_dump()
    text = json.dumps({**body, "checksum": _digest(body)}, separators=(",", ":"))
    replace_file(folder / MANIFEST, text.encode(), save)


def read_manifest(folder: Path) -> Manifest:
    """Raises `CheckpointError` where there is no whole manifest; says which file and why."""
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        checksum = body.pop("checksum")
        if checksum != _digest(body):
            raise CheckpointError(f"{path} is damaged: its checksum is another.")
        if body.get("version") != VERSION:
            raise CheckpointError(f"{path} has version {body.get('version')}; this zeroshard reads version {VERSION}.")
        return Manifest.model_validate(body)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}.") from None


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether the files are there, with their sizes. (Checksums are for the load.)"""
    sizes = [(folder / record.name, record.nbytes) for record in manifest.files]
    return all(path.is_file() and path.stat().st_size == nbytes for path, nbytes in sizes)


# ---------------------------------------------------------------------- tags


def check_tag(tag: str) -> str:
    """A tag is the name of a folder."""
    if not tag or tag in (".", "..") or "/" in tag or "\\" in tag or tag.startswith(".") or tag == LATEST:
        raise CheckpointError(f"{tag!r} cannot be a tag: a tag is the plain name of a folder.")
    return tag


def latest_tag(folder: Path) -> str:
    """What `latest` names."""
    try:
        return check_tag((folder / LATEST).read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no file {LATEST!r}: name a tag, or look whether this is the folder."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {error}.") from error


def tags(folder: Path, *, whole: bool = True) -> list[str]:
    """The tags whose checkpoints are whole, the newest first; or all, of which other hosts may have other files."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            manifest = read_manifest(path) if path.is_dir() else None
        except CheckpointError:
            continue
        if manifest is not None and (not whole or is_whole(path, manifest)):
            found.append((manifest.created, path.name))
    return [name for _, name in sorted(found, reverse=True)]


# ---------------------------------------------------------------------- files


def replace_file(path: Path, data: bytes, save: str) -> None:
    """Write a file beside, flush it, and put it in the place of `path` in one step."""
    temporary = path.with_name(f"{path.name}.{save}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error


def flush_folder(path: Path) -> None:
    """Names of files reach the disk with their folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clean(folder: Path) -> None:
    """Remove what saves that never ended left behind: files that no manifest names, and folders of nothing else."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        with suppress(OSError):  # another program's, or unreadable: not ours to look after
            if path.is_dir():
                _clean_tag(path)
            elif re.fullmatch(rf"{LATEST}\.[0-9a-f]+\.tmp", path.name):
                path.unlink(missing_ok=True)


def _clean_tag(path: Path) -> None:
    ours = [file for file in path.iterdir() if _OURS.fullmatch(file.name)]
    if not ours:
        return
    try:
        named = {MANIFEST, *(record.name for record in read_manifest(path).files)}
    except CheckpointError:
        if (path / MANIFEST).exists():
            return  # damaged, and for a person to look at
        named = set()
    for file in ours:
        if file.name not in named:
            file.unlink(missing_ok=True)
    if not named:
        remove_if_empty(path)


def remove(folder: Path) -> None:
    """Remove one checkpoint; it ceases to exist before its files do."""
    files = [folder / record.name for record in read_manifest(folder).files]
    (folder / MANIFEST).unlink()
    for file in files:
        file.unlink(missing_ok=True)
    remove_if_empty(folder)


def keep_newest(folder: Path, count: int, kept: str, *, whole: bool = True) -> None:
    """Remove whole checkpoints (or all) but the newest `count`, that called `kept`, and that which `latest` names."""
    named = latest_tag(folder) if (folder / LATEST).is_file() else kept
    for tag in tags(folder, whole=whole)[max(count, 1) :]:
        if tag not in (kept, named):
            remove(folder / tag)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds nothing."""
    if not any(folder.iterdir()):
        folder.rmdir()


def dtype_of(name: str) -> torch.dtype:
    """A dtype by the name that a manifest gives it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the manifest speaks of a dtype {name!r}, which torch does not know.")
    return dtype
