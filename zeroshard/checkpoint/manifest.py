"""Owns the manifest, which lists a checkpoint's contents and their places. A checkpoint exists when its manifest does.

    folder/
        latest                              the tag of the newest checkpoint
        global_step100/
            manifest.json                   the checkpoint exists when this file does
            rank_00000.<save>.safetensors   rank 0's part
            rank_00001.<save>.safetensors

Each save gives its files new names, and its manifest replaces the previous one atomically. So a save under the same tag
leaves the old checkpoint intact until the new one is complete. docs/checkpoint_format.md describes the format for other
programs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from zeroshard.core.named_parameter import name_of
from zeroshard.core.placement import Placement, Runs
from zeroshard.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
VERSION = 3
READABLE = (1, 2, VERSION)
"""Versions 1 and 2 list every range of every rank, all checksums, and every rank's own values. Version 2 adds `mesh`."""
_LONGEST_NAME = 255
"""The maximum length of a name in a file system, in bytes."""
_OURS = re.compile(r"(rank_\d+\.[0-9a-f]+\.safetensors|manifest\.json(\.[0-9a-f]+\.tmp)?)")

# Remedies, for the ends of messages.
ANOTHER = "Load another tag (under a trainer, resume from another checkpoint), or pass fall_back=True to load()."
CHECK_DISK = "Check the disk and the file's permissions, or load another tag."


def cannot_be_written(path: object, error: OSError) -> str:
    """Return the message for a file that cannot be written, with the remedy."""
    advice = "Check the folder's permissions and the space on its disk."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "Raise the limit on open files (`ulimit -n`)."
    return f"{path} cannot be written: {error.strerror or error}. {advice}"


Count = Annotated[int, Field(ge=0)]
"""A number of bytes or elements, or a position among them."""

Name = Annotated[str, AfterValidator(name_of)]
"""The name of a parameter. Earlier releases wrote the parts that torch's `checkpoint_wrapper` inserts."""


def _named_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "names": [*map(name_of, group["names"])]} for group in groups]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Sparse(_Record):
    """A record whose JSON omits fields that only some versions have, if they are empty."""

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in serialize(self).items() if key not in _OMITTED or value not in (None, [])}


_OMITTED = {"numel", "stride", "mesh", "checksum", "checksums", "ranges", "dim", "layouts", "shards"}


class FileRecord(_Sparse):
    """A file beside the manifest. It ends with a table: the CRC-32 of each chunk of `chunk_nbytes` before the table."""

    name: str = Field(pattern=r"^rank_\d+\.[0-9a-f]+\.safetensors$")
    nbytes: Count
    checksum: int | None = None
    """The CRC-32 of the file's header, followed by the table; None in versions 1 and 2."""
    checksums: list[int] | None = None
    """The table itself, in versions 1 and 2. It covers the whole file."""

    def has_its_size(self, folder: Path) -> bool:
        """Return whether the file exists in a folder, with the right size."""
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.nbytes


class RangeRecord(_Sparse):
    """A range of elements of a flattened parameter, [start, stop), at byte `offset` of a file.

    With `stride`, the range has only the first `numel` elements of every `stride` elements.
    """

    start: Count
    stop: Count
    file: Count
    offset: Count
    numel: Annotated[int, Field(ge=1)] | None = None
    stride: Annotated[int, Field(ge=1)] | None = None

    @cached_property
    def runs(self) -> Runs:
        """The elements, as runs."""
        if self.numel is None or self.stride is None:
            return Runs(self.start, self.stop - self.start, max(self.stop - self.start, 1))
        return Runs(self.start, self.numel, self.stride, (self.stop - self.start - self.numel) // self.stride + 1)


class StateRecord(_Sparse):
    """The record of one model state of one parameter.

    `ranges` are those in files of ranks that follow no layout. Together with those of the layouts (see places.py), they are
    disjoint and cover all elements.
    """

    dtype: str
    ranges: list[RangeRecord] = []

    def over(self, runs: Runs) -> list[RangeRecord]:
        """Return the listed ranges that may have some of these elements."""
        return [one for one in self.ranges if one.start < runs.stop and runs.start < one.stop]


class BucketRecord(_Record):
    """A bucket of one shard for each rank. A piece is (parameter, its first element, the place in the bucket, elements)."""

    shard_numel: Annotated[int, Field(ge=1)]
    pieces: list[tuple[str, Count, Count, Count]]


class ShardsRecord(_Record):
    """The ranks that follow one layout, for one part of the divided parameters.

    Elements count along this part, flattened. Whole parameters are in part 0 only.
    """

    layout: Count
    part: Count = 0
    """The place of these ranks in the mesh's dimension that divides parameters."""
    files: list[Count | None]
    """The number of the file with each shard; None if its rank lists its ranges instead."""


class ParameterRecord(_Sparse):
    """The record of one parameter."""

    shape: list[Count]
    names: list[Name] = Field(min_length=1)
    """All its names; more than one if it is tied."""
    trained: bool
    """Whether the saved run updated it; False if it was frozen."""
    states: dict[str, StateRecord]
    """"parameters" (the master weights), and the optimizer's states of the same shape."""
    values: dict[str, Any] = {}
    """The optimizer's other values, packed, such as step counts."""
    dim: Count | None = None
    """The dimension that tensor- or expert-parallel ranks divided; None if the parameter was whole."""

    def placement(self, part: int, parts: int) -> Placement | None:
        """Return the place of one of the mesh's parts in the parameter, or None if that part has nothing of it."""
        if self.dim is None:
            return Placement.whole(self.shape) if part == 0 else None
        return Placement.chunk(self.shape, self.dim, part, parts)


class TensorRecord(_Record):
    """A tensor that a packed value names."""

    dtype: str
    shape: list[Count]
    file: Count
    offset: Count


class Manifest(_Sparse):
    """The contents of one checkpoint; see the module's docstring."""

    format: str = "zeroshard checkpoint"
    version: int = VERSION
    tag: str
    created: float
    """Seconds since 1970."""
    written_by: dict[str, str]
    world_size: int = Field(ge=1)
    mesh: dict[str, int] | None = None
    """The numbers of data-parallel, and of tensor- or expert-parallel ranks; None if no tensors were divided."""
    policy: dict[str, Any]
    optimizer: str | None
    chunk_nbytes: int = Field(ge=1)
    files: list[FileRecord]
    """The ranks' files, by rank."""
    layouts: list[list[BucketRecord]] = []
    shards: list[ShardsRecord] = []
    parameters: dict[Name, ParameterRecord]
    excluded: list[Name] = []
    """The frozen parameters that were left out, if `exclude_frozen` was set."""
    param_groups: Annotated[list[dict[str, Any]], AfterValidator(_named_groups)] = Field(default_factory=list)
    """Packed hyperparameters of each param group, and the names of its parameters."""
    values: dict[str, Any] = {}
    """All other values, packed; see values.py."""
    tensors: dict[str, TensorRecord] = {}
    _new_names: dict[str, str | None] = PrivateAttr(default_factory=dict)
    """The names that `renamed` gives, by the saved name."""

    @property
    def parts(self) -> int:
        """The number of parts of each divided parameter."""
        mesh = self.mesh or {}
        return max(mesh.get("tensor_parallel", 1), mesh.get("expert_parallel", 1), 1)

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Every rank's own packed values, in versions 1 and 2. Later, they are in the ranks' files."""
        found: list[dict[str, Any]] = self.values.get("ranks", [])
        return found

    @property
    def buffers(self) -> dict[str, Any]:
        """Rank 0's packed buffers, by name. Other ranks save only buffers that differ from these."""
        found: dict[str, Any] = self.values.get("buffers", {})
        return self.by_new_name(next((one.get("buffers", {}) for one in self.ranks), found))

    @property
    def ranks_with_buffers(self) -> list[int]:
        """The ranks above 0 that saved buffers."""
        found: list[int] = self.values.get("ranks_with_buffers", [])
        return found + [rank for rank, one in enumerate(self.ranks) if rank and one.get("buffers")]

    def by_new_name(self, buffers: Mapping[str, Any]) -> dict[str, Any]:
        """Return saved buffers by the names that `renamed` gives them."""
        new = {name: self._new_names.get(name_of(name), name_of(name)) for name in buffers}
        return {name: buffers[old] for old, name in new.items() if name is not None}

    def renamed(self, names: Mapping[str, str | None]) -> Manifest:
        """Return a copy with other names of parameters and buffers, by the present names; None leaves one out.

        Layouts and files keep the saved names, which stay the keys of `parameters`.
        """
        if not names:
            return self

        def new(old: Iterable[str]) -> list[str]:
            return [name for one in old if (name := names.get(one, one)) is not None]

        parameters = {
            fqn: record.model_copy(update={"names": own})
            for fqn, record in self.parameters.items()
            if (own := new(record.names))
        }
        changed = {
            "parameters": parameters,
            "excluded": new(self.excluded),
            "param_groups": [{**group, "names": new(group["names"])} for group in self.param_groups],
        }
        copy = self.model_copy(update=changed)
        copy._new_names = dict(names)
        return copy


def write_manifest(folder: Path, manifest: Manifest, save: str) -> None:
    """Write the manifest, so that the checkpoint exists. It atomically replaces an earlier manifest of this tag."""
    body = manifest.model_dump()
    text = json.dumps({**body, "checksum": _digest(body)}, separators=(",", ":"))
    replace_file(folder / MANIFEST, text.encode(), save)


def read_manifest(folder: Path) -> Manifest:
    """Read and verify a checkpoint's manifest.

    Raises:
        CheckpointError: the manifest is missing, unreadable, damaged or of an unknown version. The message has path and reason.
    """
    return parse_manifest(folder, manifest_bytes(folder))


def manifest_bytes(folder: Path) -> bytes:
    """Read the manifest's file, without verification. Raise a `CheckpointError` if it is missing or unreadable."""
    path = folder / MANIFEST
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(_why_without(MANIFEST, folder)) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {CHECK_DISK}") from error


def parse_manifest(folder: Path, data: bytes) -> Manifest:
    """Verify the bytes of a folder's manifest. Raise as `read_manifest` does."""
    path = folder / MANIFEST
    try:
        body = json.loads(data)
        if body.pop("checksum") != _digest(body):
            raise ValueError("its checksum is wrong")
        if body.get("version") not in READABLE:
            raise CheckpointError(
                f"{path} has version {body.get('version')}; this zeroshard reads versions {READABLE[0]} to {VERSION}. "
                "Install the release that wrote it, or a newer one."
            )
        manifest = Manifest.model_validate(body)
        _refuse_ranges_outside(manifest)
        _refuse_layouts_outside(manifest)
        _refuse_wrong_values(manifest)
        return manifest
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        reason = str(error).splitlines()[0]
    raise CheckpointError(f"{path} is damaged: {reason}. {ANOTHER}")


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _refuse_ranges_outside(manifest: Manifest) -> None:
    """Raise a `ValueError` if checksums do not cover a file, or a range does not fit its file or its parameter."""
    for file in manifest.files:
        chunks = -(-file.nbytes // manifest.chunk_nbytes)
        if file.checksums is None and file.checksum is None:
            raise ValueError(f"{file.name} has no checksum")
        if file.checksums is not None and len(file.checksums) != chunks:
            raise ValueError(f"{file.name} has {len(file.checksums)} checksums for {chunks} chunks")
    nbytes = [file.nbytes for file in manifest.files]

    def refuse_outside(name: str, dtype: str, file: int, offset: int, numel: int) -> None:
        itemsize = dtype_of(dtype).itemsize
        if file >= len(nbytes) or offset + numel * itemsize > nbytes[file]:
            raise ValueError(f"{name} has bytes outside of its files")
        if offset % itemsize:
            raise ValueError(f"{name} begins in the middle of an element")

    shapes = [(name, one.shape) for name, one in manifest.parameters.items()]
    for name, shape in [*shapes, *((name, one.shape) for name, one in manifest.tensors.items())]:
        if prod(max(size, 1) for size in shape) >= 1 << 63:
            raise ValueError(f"{name} has more elements than a tensor can have")
    for name, parameter in manifest.parameters.items():
        numel = prod(parameter.shape)
        for record in parameter.states.values():
            for one in record.ranges:
                if not one.start <= one.stop <= numel or one.runs.stop != one.stop or one.runs.count < 1:
                    raise ValueError(f"{name} has elements beyond its shape")
                refuse_outside(name, record.dtype, one.file, one.offset, one.runs.numel * one.runs.count)
    for name, tensor in manifest.tensors.items():
        refuse_outside(name, tensor.dtype, tensor.file, tensor.offset, prod(tensor.shape))


def _refuse_layouts_outside(manifest: Manifest) -> None:
    """Raise a `ValueError` if a layout has elements beyond a parameter or a bucket, or shards in no file."""
    for name, parameter in manifest.parameters.items():
        if parameter.dim is not None and parameter.dim >= len(parameter.shape):
            raise ValueError(f"{name} was divided along a dimension that it lacks")
    for shards in manifest.shards:
        if shards.layout >= len(manifest.layouts) or shards.part >= manifest.parts:
            raise ValueError("ranks follow a layout that it lacks")
        if any(file is not None and file >= len(manifest.files) for file in shards.files):
            raise ValueError("a shard is in none of its files")
        for bucket in manifest.layouts[shards.layout]:
            for name, first, start, numel in bucket.pieces:
                placement = manifest.parameters[name].placement(shards.part, manifest.parts)
                if placement is None:  # a whole parameter, which part 0 has
                    continue
                if first + numel > prod(placement.local_shape) or start + numel > bucket.shard_numel * len(
                    shards.files
                ):
                    raise ValueError(f"a layout has elements of {name} beyond its shape, or beyond a bucket")


def _refuse_wrong_values(manifest: Manifest) -> None:
    """Raise a `ValueError` if the shared values or a rank's buffers have wrong types. Every reader needs these."""
    ranks = manifest.values.get("ranks", [])
    numbers = manifest.values.get("ranks_with_buffers", [])
    if not isinstance(manifest.values.get("shared", {}), dict) or not isinstance(ranks, list):
        raise ValueError("its values have wrong types")
    if not isinstance(numbers, list) or not all(type(one) is int and 0 <= one < len(manifest.files) for one in numbers):
        raise ValueError("its list of ranks with buffers is wrong")
    for one in [*ranks, {"buffers": manifest.values.get("buffers", {})}]:
        if not isinstance(one, dict):
            raise ValueError("the values of a rank have wrong types")
        refuse_wrong_buffers(one, manifest.tensors)


def refuse_wrong_buffers(values: dict[str, Any], tensors: Container[str]) -> None:
    """Raise a `ValueError` if a rank's packed values have buffers that are no tensors (see values.py)."""
    if not isinstance(values.get("buffers", {}), dict):
        raise ValueError("the values of a rank have wrong types")
    for name, packed in values.get("buffers", {}).items():
        if not _is_tensor(packed, tensors):
            raise ValueError(f"the buffer {name} is not one of its tensors")


def _is_tensor(packed: Any, tensors: Container[str]) -> bool:
    """Return whether a packed value (see values.py) is a scalar, or one of these tensors."""
    match packed:
        case {"$tensor": str(name)}:
            return name in tensors
        case {"$scalar": [str(dtype), bool() | int() | float()]}:
            return isinstance(getattr(torch, dtype, None), torch.dtype)
    return False


def is_whole(folder: Path, manifest: Manifest) -> bool:
    """Return whether all files that a manifest lists exist, with the right sizes. (A load verifies checksums.)"""
    return all(record.has_its_size(folder) for record in manifest.files)


# ---------------------------------------------------------------------- tags


def is_folder_name(name: str) -> bool:
    """Return whether a name is a plain folder name, without a path."""
    encoded = name.encode(errors="ignore")
    is_text = encoded.decode() == name  # half of a surrogate pair is not a valid file name
    return name not in ("", ".", "..") and not {*"/\\\0\n"} & {*name} and len(encoded) <= _LONGEST_NAME and is_text


def check_tag(tag: str) -> str:
    """Return the tag.

    Raises:
        CheckpointError: the tag is `latest`, is not a folder name, or has a leading dot or spaces at an end.
    """
    if not isinstance(tag, str):
        raise CheckpointError(f"{tag!r} cannot be a tag, a string: give {str(tag)!r}.")
    if not is_folder_name(tag) or tag != tag.strip() or tag.startswith(".") or tag == LATEST:
        shown = repr(tag if len(tag) <= _SHOWN else f"{tag[:_SHOWN]}...")
        raise CheckpointError(
            f"{shown} cannot be a tag: a tag is a plain folder name, without spaces at its ends. Choose such a name, "
            "for example step100."
        )
    return tag


_SHOWN = 100
"""The maximum number of a tag's characters in an error."""


def whole_path(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder. A relative path starts at the current working folder.

    Raises:
        CheckpointError: the path is empty, or it is relative and the working folder was removed.
    """
    if not os.fspath(folder):
        raise CheckpointError("the name of the folder to save to is empty. Name a folder; '.' is the working folder.")
    try:
        return Path(folder).absolute()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{os.fspath(folder)} is relative, and this program's working folder was removed. Name an absolute path."
        ) from error


def latest_tag(folder: Path) -> str:
    """Return the tag in the file `latest`, or raise a `CheckpointError` if the file is missing, unreadable or without a tag."""
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        if not tag:
            raise CheckpointError(f"{folder / LATEST} is empty. Name a checkpoint's tag, or load with fall_back=True.")
        return check_tag(tag)
    except FileNotFoundError:
        raise CheckpointError(_why_without(LATEST, folder)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {error}. {CHECK_DISK}") from error


def is_of_deepspeed(folder: Path) -> bool:
    """Return whether DeepSpeed wrote a checkpoint directly into this folder."""
    try:
        return any(any(folder.glob(f"*_{kind}_states.pt")) for kind in ("model", "optim"))
    except FileNotFoundError:  # another rank or job has just removed it
        return False


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a single checkpoint, of zeroshard or DeepSpeed, and not the folder of all checkpoints."""
    return (folder / MANIFEST).is_file() or is_of_deepspeed(folder)


def folder_of(folder: str | os.PathLike[str], tag: str | None) -> Path:
    """Return a checkpoint's own folder: the folder of `tag`, `folder` itself, or the folder of the tag in the file `latest`."""
    path = Path(folder)
    if tag is not None:
        return path / tag
    if is_checkpoint(path):
        return path
    return path / latest_tag(path)


def _why_without(file: str, folder: Path) -> str:
    """Return the reason why a folder lacks `manifest.json` or `latest`, with the remedy."""
    folder = folder.absolute()
    if is_of_deepspeed(folder):
        return (
            f"{folder} is not a zeroshard checkpoint: DeepSpeed wrote it.\n"
            f"`zeroshard import-deepspeed {folder} OUT` converts it; then load from OUT."
        )
    if file == MANIFEST:
        if not folder.is_dir():
            return f"{folder} is not a checkpoint: there is no such folder. Look for the tag in {folder.parent}."
        return f"{folder} is not a checkpoint: it has no {MANIFEST}, which a save writes last. {ANOTHER}"
    if (folder / MANIFEST).is_file():
        return f"{folder} is one checkpoint, not the folder of checkpoints: name {folder.parent} and the tag {folder.name!r}."
    if not folder.is_dir():
        return f"{folder} has no file {LATEST!r}: there is no such folder. Check the path."
    return f"{folder} has no file {LATEST!r}: name a tag, or check that this is the folder of checkpoints."


def tags(folder: Path, *, whole: bool = True) -> list[str]:
    """List the tags of complete checkpoints, newest first. Without `whole`, include checkpoints that lack files on this host."""
    found = [(one.created, name) for name, one in _manifests(folder) if not whole or is_whole(folder / name, one)]
    return [name for _, name in sorted(found, reverse=True)]


def _manifests(folder: Path) -> Iterator[tuple[str, Manifest]]:
    """Yield the tags and manifests of the checkpoints in a folder."""
    for path in _folders(folder):
        with suppress(CheckpointError):
            yield path.name, read_manifest(path)


def _folders(folder: Path) -> list[Path]:
    """List the subfolders of a folder, without symbolic links: their targets are listed already, or belong to others."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def next_time(folder: Path) -> float:
    """Return a time for a new checkpoint, in seconds since 1970. It is later than all others, even if a clock was set back."""
    return max([time.time(), *(manifest.created + 1e-3 for _, manifest in _manifests(folder))])


# ---------------------------------------------------------------------- files


def replace_file(path: Path, data: bytes, save: str) -> None:
    """Write a file beside `path`, flush it, and atomically rename it to `path`."""
    temporary = path.with_name(f"{path.name}.{save}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(cannot_be_written(path, error)) from error


def clean(folder: Path) -> None:
    """Remove the leftovers of incomplete saves: files that no manifest names, and folders with only these files."""
    for path in _folders(folder):
        with suppress(OSError):  # another program's, or unreadable: leave it
            _clean_tag(path)
    for path in folder.glob(f"{LATEST}.*.tmp"):
        if re.fullmatch(rf"{LATEST}\.[0-9a-f]+\.tmp", path.name):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _clean_tag(path: Path) -> None:
    ours = [file for file in path.iterdir() if _OURS.fullmatch(file.name)]
    if not ours:
        return
    try:
        named = {MANIFEST, *(record.name for record in read_manifest(path).files)}
    except CheckpointError:
        if (path / MANIFEST).exists():
            return  # damaged: leave it for a person to check
        named = set()
    for file in ours:
        if file.name not in named:
            file.unlink(missing_ok=True)
    if not named:
        remove_if_empty(path)


def remove(folder: Path) -> None:
    """Remove one checkpoint: first its manifest, then its files."""
    files = [folder / record.name for record in read_manifest(folder).files]
    (folder / MANIFEST).unlink()
    for file in files:
        file.unlink(missing_ok=True)
    remove_if_empty(folder)


def keep_newest(folder: Path, count: int, kept: str, *, whole: bool = True) -> None:
    """Remove checkpoints except the newest `count`, `kept`, and the one in `latest`.

    Without `whole`, it also counts and removes checkpoints that lack files on this host.
    """
    stays = {kept}
    if (folder / LATEST).is_file():
        stays.add(latest_tag(folder))
    for tag in tags(folder, whole=whole)[count:]:
        if tag not in stays:
            remove(folder / tag)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    if not any(folder.iterdir()):
        folder.rmdir()


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name in a manifest, or raise a `CheckpointError` if torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"the manifest names the dtype {name!r}, which this torch lacks. Load it with a newer torch."
        )
    return dtype
