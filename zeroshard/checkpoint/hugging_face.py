"""Owns the export in the Hugging Face layout, with bounded memory, from a checkpoint or from a model in training.

From a checkpoint, one process writes everything. From a model, each rank writes its own ranges into the files and does
not send tensors. transformers' `from_pretrained` loads the result: `model.safetensors`, or several files and
`model.safetensors.index.json`. Tied parameters are stored once, under their first name.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.agreement import of_first
from zeroshard.checkpoint.checkpoints import Checkpoints
from zeroshard.checkpoint.conversions import ConvertedRow
from zeroshard.checkpoint.display import Advance, Display
from zeroshard.checkpoint.live_model import CONFIG, Description, describe
from zeroshard.checkpoint.loading import Reader, StoredTensor
from zeroshard.checkpoint.manifest import ANOTHER, cannot_be_written
from zeroshard.checkpoint.safetensors_file import header
from zeroshard.core.blocks import Copy, Target
from zeroshard.core.layout import Span
from zeroshard.core.storage.buffers import memory_of
from zeroshard.core.unit import refuse_undecided
from zeroshard.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
MAX_SHARD_NBYTES = 5_000_000_000
"""transformers' default `max_shard_size`."""
_BATCH_NBYTES = 32 << 20
"""The bytes of a streamed tensor that are in memory at once, in each of two dtypes."""
_OF_ADAPTERS = re.compile(rf"{re.escape(ADAPTER)}(\.tmp)?|adapter_config\.json")
_OF_MODELS = re.compile(
    rf"{_OF_ADAPTERS.pattern}|{re.escape(INDEX)}|{re.escape(SINGLE)}(\.tmp)?|model-\d{{5}}-of-\d{{5}}\.safetensors(\.tmp)?"
)
"""The files that a complete model's export replaces. An export of adapters replaces only `_OF_ADAPTERS` and keeps their base."""


@dataclass(frozen=True)
class Exported:
    """A tensor in an export: its name, shape and dtype in the file, and its name in the model.

    Attributes:
        target: the parts of the model's tensors that it consists of, if it is not one of them as a whole; `fqn` is the
            first of these tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fqn: str
    target: Target | None = None

    @classmethod
    def of(cls, fqn: str, shape: Sequence[int], saved: torch.dtype, wanted: torch.dtype | None) -> Exported:
        """Describe a tensor that keeps its name. Only a floating-point tensor gets the wanted dtype, if there is one."""
        return cls(fqn, tuple(shape), wanted if wanted is not None and saved.is_floating_point else saved, fqn)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sources(self) -> list[str]:
        """The names in the model of the tensors whose values it has."""
        return [self.fqn] if self.target is None else [block.source for block in self.target.blocks]


@dataclass(frozen=True)
class FilePlan:
    """A file of an export."""

    name: str
    tensors: list[Exported]

    @cached_property
    def header(self) -> bytes:
        return header({one.name: (one.dtype, one.shape) for one in self.tensors}, {"format": "pt"})

    @property
    def temporary(self) -> str:
        return self.name + ".tmp"

    @property
    def data_nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)


def _contents(
    description: Description, tensors: Sequence[Exported], max_shard_nbytes: float
) -> tuple[list[FilePlan], dict[str, Any]]:
    """Plan the files of weights, and the JSON files beside them; for a PEFT model, only the files of its adapters."""
    if description.problem is not None:
        raise CheckpointError(f"this model cannot be exported for other programs: {description.problem}")
    texts = dict(description.files)
    if description.adapters is not None:
        plans = []
        by_fqn = {one.fqn: one for one in tensors}
        for folder, names in description.adapters.items():
            own = []
            for name, fqn in names.items():
                if fqn not in by_fqn:
                    raise CheckpointError(
                        f"the adapter needs {fqn}, which the checkpoint leaves out. Save it again without "
                        "exclude_frozen."
                    )
                own.append(replace(by_fqn[fqn], name=name))
            plans.append(FilePlan(folder + ADAPTER, own))
        return plans, texts
    if description.weights is not None:
        tensors = list(_converted(description.weights, tensors))
    plans = spread(tensors, max_shard_nbytes, SINGLE)
    if len(plans) > 1:
        weight_map = {one.name: plan.name for plan in plans for one in plan.tensors}
        metadata = {"total_size": sum(plan.data_nbytes for plan in plans)}
        if description.total_parameters is not None:
            metadata["total_parameters"] = description.total_parameters
        texts[INDEX] = {"metadata": metadata, "weight_map": weight_map}
    floating = [one.dtype for one in tensors if one.dtype.is_floating_point]
    if CONFIG in texts and floating:
        texts[CONFIG] = dict(texts[CONFIG])
        for key in ("dtype", "torch_dtype"):
            if key in texts[CONFIG]:
                texts[CONFIG][key] = str(floating[0]).removeprefix("torch.")
    return plans, texts


def _converted(rows: Sequence[ConvertedRow], tensors: Sequence[Exported]) -> Iterator[Exported]:
    """Yield the tensors that transformers makes of a model's tensors for files."""
    by_fqn = {one.fqn: one for one in tensors}
    shapes = {one.fqn: one.shape for one in tensors}
    try:
        for row in rows:
            for target in row.targets(shapes):
                one = by_fqn[target.blocks[0].source]
                if target.is_whole:
                    yield replace(one, name=target.name)
                else:
                    yield Exported(target.name, target.shape, one.dtype, one.fqn, target)
    except ValueError as error:
        raise CheckpointError(
            f"the manifest's description of the model is damaged or malicious: {error}. {ANOTHER}"
        ) from None


def spread(tensors: Sequence[Exported], max_shard_nbytes: float, single: str) -> list[FilePlan]:
    """Divide tensors over files of at most `max_shard_nbytes`, or of one larger tensor. A single file is named `single`.

    As huggingface_hub does: a tensor that is too large does not end the file before it, and tensors of one group are
    counted, and put, as one.
    """
    groups: dict[int, list[Exported]] = {}
    for number, one in enumerate(tensors):
        groups.setdefault(-1 - number if one.target is None else one.target.group, []).append(one)
    shards: list[list[list[Exported]]] = []
    current: list[list[Exported]] = []
    filled = 0
    for group in groups.values():
        nbytes = sum(one.nbytes for one in group)
        if nbytes > max_shard_nbytes:
            shards.append([group])
            continue
        if filled + nbytes > max_shard_nbytes:
            shards.append(current)
            current, filled = [], 0
        current.append(group)
        filled += nbytes
    if current or not shards:
        shards.append(current)
    divided = [[one for group in shard for one in group] for shard in shards]
    if len(divided) == 1:
        return [FilePlan(single, divided[0])]
    stem, _, ending = single.partition(".")
    return [FilePlan(f"{stem}-{n:05d}-of-{len(divided):05d}.{ending}", one) for n, one in enumerate(divided, start=1)]


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create a folder, and, if its file system has locks, lock it against other exports."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another export is writing to {folder}. Wait until it ends, or name another folder."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `CheckpointError` that names the file: a full disk's error names none."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(cannot_be_written(path, error)) from error


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, as transformers formats it."""
    with naming(path):
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _begun(folder: Path, plans: Sequence[FilePlan]) -> Iterator[None]:
    """Claim a folder and create temporary files of full size with their headers. After the block, no such file is left."""
    with claimed(folder):
        try:
            for plan in plans:
                with naming(folder / plan.temporary):
                    (folder / plan.name).parent.mkdir(exist_ok=True)
                    with (folder / plan.temporary).open("wb") as file:
                        file.write(plan.header)
                        file.truncate(len(plan.header) + plan.data_nbytes)
            yield
        finally:
            for plan in plans:
                with suppress(OSError):
                    (folder / plan.temporary).unlink(missing_ok=True)


def _write(folder: Path, plans: Sequence[FilePlan], parts: Iterable[tuple[Span, Tensor]], advance: Advance) -> None:
    """Write spans of parameters and buffers (1-D tensors) to their places in existing files and flush the files."""
    places: dict[
        str, list[tuple[Path, FileIO, int, torch.dtype, Copy | None]]
    ] = {}  # by fqn: file, offset, dtype there
    with ExitStack() as stack:
        opened = []
        for plan in plans:
            path = folder / plan.temporary
            with naming(path):
                file = stack.enter_context(path.open("r+b", buffering=0))
            opened.append((path, file))
            offset = len(plan.header)
            for one in plan.tensors:
                if one.target is None:
                    places.setdefault(one.fqn, []).append((path, file, offset, one.dtype, None))
                else:
                    for block in one.target.blocks:
                        box = Copy.from_source(block, one.shape)
                        places.setdefault(block.source, []).append((path, file, offset, one.dtype, box))
                offset += one.nbytes
        for span, tensor in parts:
            for path, file, offset, dtype, copy in places[span.name]:
                with naming(path):
                    if copy is None:
                        _write_span(file.fileno(), offset + span.start * dtype.itemsize, dtype, tensor)
                    else:
                        _write_copy(file.fileno(), offset, dtype, span, tensor, copy)
            advance(tensor.nbytes)
        for path, file in opened:
            with naming(path):
                os.fsync(file.fileno())


def _write_span(descriptor: int, offset: int, dtype: torch.dtype, tensor: Tensor) -> None:
    for part in tensor.split(_BATCH_NBYTES // dtype.itemsize):
        data = memory_of(part.to("cpu", dtype).contiguous())
        while data:
            written = os.pwrite(descriptor, data, offset)
            data = data[written:]
            offset += written


def _write_copy(descriptor: int, offset: int, dtype: torch.dtype, span: Span, tensor: Tensor, copy: Copy) -> None:
    """Write what a span has of a box to the file's tensor at `offset`."""
    for part in copy.within(span.start, span.stop):
        for place, values in part.runs(tensor, span.start):
            _write_span(descriptor, offset + place * dtype.itemsize, dtype, values.reshape(-1))


def _finish(folder: Path, plans: Sequence[FilePlan], texts: Mapping[str, Any]) -> list[Path]:
    """Rename the written files into place, write the JSON beside them, and remove files of a previous export."""
    written = [folder / plan.name for plan in plans]
    written += [folder / name for name in texts]
    replaced = _OF_MODELS
    if any(plan.name == ADAPTER for plan in plans):
        replaced = _OF_ADAPTERS
    for plan in plans:
        with naming(folder / plan.name):
            (folder / plan.temporary).replace(folder / plan.name)
    for name, content in texts.items():
        write_json(folder / name, content)
    with naming(folder):
        for path in list(folder.iterdir()):
            if path not in written and replaced.fullmatch(path.name):
                path.unlink()
    return written


def export(
    reader: Reader, out: str | os.PathLike[str], dtype: torch.dtype | None = None, *, max_shard_nbytes: float = MAX_SHARD_NBYTES,
    exclude_frozen: bool = False, display: Display | None = None,
) -> list[Path]:  # fmt: skip
    """Write a checkpoint's model as transformers does and return the paths.

    This takes about 64 MiB of memory, whatever the size of the model.

    Args:
        reader: the checkpoint.
        out: the folder to write to; files of a previous export there are replaced.
        dtype: the dtype of floating-point tensors; None keeps the saved dtypes (master weights: fp32).
        max_shard_nbytes: the maximum size of a file; a larger model is divided over several files.
        exclude_frozen: whether to leave out frozen parameters and the config files.
        display: the display of the progress; default: none.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, the checkpoint lacks parameters, or the folder cannot be
            written.
    """
    folder = Path(out)
    manifest = reader.manifest
    description = Description()
    if not exclude_frozen:
        description = Description.of(manifest.values.get("description", {}))
    if manifest.excluded and not exclude_frozen and description.adapters is None:  # an adapter needs no base
        raise CheckpointError(
            f"{reader.folder} lacks {len(manifest.excluded)} frozen parameters (one is {manifest.excluded[0]}), so it "
            "has no whole model. Save without exclude_frozen, or export the adapter."
        )
    stored = {one.names[0]: one for one in reader.model() if one.trained or not exclude_frozen}
    tensors = [Exported.of(fqn, one.shape, one.dtype, dtype) for fqn, one in stored.items()]
    plans, texts = _contents(description, tensors, max_shard_nbytes)
    wanted = [
        stored[fqn] for fqn in dict.fromkeys(fqn for plan in plans for one in plan.tensors for fqn in one.sources)
    ]
    shown = display or Display(speaks=False)
    with _begun(folder, plans):
        try:
            with shown.task(f'writing "{folder}"', sum(one.span.numel * one.dtype.itemsize for one in wanted)) as row:
                _write(folder, plans, _stream(reader, wanted), row.advance)
        except CheckpointError as error:
            missing = [one.name for one in manifest.files if not (reader.folder / one.name).is_file()]
            if missing:
                raise CheckpointError(
                    f"{reader.folder} lacks {missing[0]} (files missing: {len(missing)}). If hosts saved to "
                    "separate folders (node_local), copy the files of all hosts into one folder first."
                ) from error
            raise
        return _finish(folder, plans, texts)


def _stream(reader: Reader, wanted: Sequence[StoredTensor]) -> Iterator[tuple[Span, Tensor]]:
    for stored in wanted:
        step = _BATCH_NBYTES // stored.dtype.itemsize
        for start in range(0, stored.span.stop, step):
            span = Span(stored.names[0], start, min(start + step, stored.span.stop))
            yield span, reader.tensor(stored, span)


def export_live(checkpoints: Checkpoints, out: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Write a model in training; see `export`. Every rank must call it.

    Each rank writes its own ranges. If any rank fails, all ranks raise its error.
    """
    live = checkpoints.live
    refuse_undecided(live.schedule.units, "an export")
    live.schedule.refuse_unseen_changes()
    checkpoints.wait_together()
    folder = Path(out)
    buffers = live.buffers
    # All ranks use rank 0's description, but a PEFT model's description needs every rank.
    described = of_first(checkpoints.control, describe(live).content())
    tensors = [
        Exported.of(entry.fqn, entry.placement.shape, unit.master_dtype, dtype) for unit, entry in live.entries()
    ]
    tensors += [Exported.of(name, buffer.shape, buffer.dtype, dtype) for name, buffer in buffers.items()]
    plans, texts = _contents(Description.of(described), tensors, MAX_SHARD_NBYTES)
    wanted = {fqn for plan in plans for one in plan.tensors for fqn in one.sources}
    mine = [held for held in live.states.held() if live.writes(held) and held.named.fqn in wanted]

    def parts() -> Iterator[tuple[Span, Tensor]]:
        for held in mine:
            with held.shard.opened():
                for start, stop, before in held.named.placement.pieces(held.span.start, held.span.stop):
                    yield Span(held.named.fqn, start, stop), held.value[before : before + stop - start]
        if live.rank == 0:
            for name, buffer in buffers.items():
                if name in wanted:
                    yield Span(name, 0, buffer.numel()), buffer.reshape(-1)

    total = sum(held.span.numel * held.dtype.itemsize for held in mine)
    with ExitStack() as stack:
        with checkpoints.together(f'the files in "{folder}"'):
            if live.rank == 0:
                stack.enter_context(_begun(folder, plans))
        with (
            checkpoints.together(f'the tensors in "{folder}"'),
            checkpoints.display.task(f'exporting to "{folder}"', total) as row,
        ):
            _write(folder, plans, parts(), row.advance)
        with checkpoints.together(f'the end of an export to "{folder}"'):
            if live.rank == 0:
                _finish(folder, plans, texts)
