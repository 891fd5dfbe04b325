"""Owns the way out: the Hugging Face layout, written with bounded memory, from a checkpoint or from a model that trains.

Called by checkpoints and cli. From a checkpoint one process streams. From a model each rank writes its own ranges to where they
belong in the files, and nothing is sent. `from_pretrained` of transformers loads the result: `model.safetensors`, or several files
and `model.safetensors.index.json`; tied parameters are stored once, under the first of their names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.chunks import Task
from zeroshard.checkpoint.loading import Located, Reader, tasks_for
from zeroshard.checkpoint.manifest import Manifest, dtype_of
from zeroshard.errors import CheckpointError
from zeroshard.formats.pretrained import INDEX, SINGLE
from zeroshard.formats.safetensors_file import header
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import PARAMETERS
from zeroshard.storage.raw_memory import memory_of

MAX_SHARD_NBYTES = 5_000_000_000
"""As transformers' `max_shard_size`."""
_BATCH_NBYTES = 32 << 20
"""Bytes that are held while a tensor is streamed, in each of two dtypes."""
_EXPORTED = re.compile(
    rf"{re.escape(INDEX)}|{re.escape(SINGLE)}|model-\d{{5}}-of-\d{{5}}\.safetensors(\.tmp)?|{re.escape(SINGLE)}\.tmp"
)


@dataclass(frozen=True)
class Source:
    """One tensor of the export: where its numbers are, and what it becomes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: torch.dtype

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> Reader:
    """A checkpoint by its own folder, or by the folder of all (then the tag, or what `latest` names).

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    path = Path(folder)
    if tag is not None or not (path / files.MANIFEST).is_file():
        path = path / (tag if tag is not None else files.latest_tag(path))
    return Reader(path, files.read_manifest(path))


def export(
    reader: Reader, out: str | os.PathLike[str], dtype: torch.dtype | None = None, *, max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> list[Path]:  # fmt: skip
    """Write the model of a checkpoint as transformers does. Holds at most 64 MiB, whatever the model's size.

    Args:
        out: a folder; files of a former export there are replaced.
        dtype: of the floating-point tensors; None is that of the master weights (fp32).
        max_shard_nbytes: a larger model is spread over several files.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, or the folder cannot be written; or parameters were left out.
    """
    if reader.manifest.excluded:
        raise CheckpointError(
            f"{reader.folder} leaves out {len(reader.manifest.excluded)} frozen parameters (one is {reader.manifest.excluded[0]}): "
            "there is no whole model in it."
        )
    folder = Path(out)
    files_ = plan(list(_sources(reader.manifest, dtype)), max_shard_nbytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in files_:
            with (folder / one.temporary).open("wb") as file:
                file.write(one.header)
                for source in one.sources:
                    for part in _stream(reader, source):
                        file.write(memory_of(part))
                file.flush()
                os.fsync(file.fileno())
        return finish(folder, files_)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}.") from error


@dataclass(frozen=True)
class FilePlan:
    """A file of an export: `offsets` says where each tensor begins, in bytes."""

    name: str
    sources: tuple[Source, ...]
    header: bytes
    offsets: dict[str, int]

    @property
    def temporary(self) -> str:
        return self.name + ".tmp"

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(source.nbytes for source in self.sources)


def plan(sources: Sequence[Source], max_shard_nbytes: int) -> list[FilePlan]:
    """Which tensor goes to which file, and where."""
    shards = _spread(sources, max_shard_nbytes)
    plans = []
    for number, shard in enumerate(shards, start=1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        head = header({source.name: (source.dtype, source.shape) for source in shard}, {"format": "pt"})
        offsets, at = {}, len(head)
        for source in shard:
            offsets[source.name] = at
            at += source.nbytes
        plans.append(FilePlan(name, tuple(shard), head, offsets))
    return plans


def finish(folder: Path, plans: Sequence[FilePlan]) -> list[Path]:
    """Everything is written: give the files their names, write the index, remove a former export's files."""
    written = [folder / one.name for one in plans]
    for one in plans:
        (folder / one.temporary).replace(folder / one.name)
    if len(plans) > 1:
        weight_map = {source.name: one.name for one in plans for source in one.sources}
        total = sum(source.nbytes for one in plans for source in one.sources)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        written.append(folder / INDEX)
    for path in list(folder.iterdir()):
        if path not in written and _EXPORTED.fullmatch(path.name):
            path.unlink()
    return written


def live_sources(units: Sequence[Unit], buffers: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[Source]:
    """What a model that trains would export: the same list on every rank."""
    found = []
    for unit in units:
        for entry in unit.named:
            own = unit.master_dtype
            found.append(Source(entry.fqn, tuple(entry.shape), _target(own, dtype), own))
    for name, buffer in buffers.items():
        found.append(Source(name, tuple(buffer.shape), _target(buffer.dtype, dtype), buffer.dtype))
    return found


def write_ranges(folder: Path, plans: Sequence[FilePlan], parts: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write (name, start, 1-D tensor) to where they belong in files that are there. A tensor is asked for in its turn."""
    home = {source.name: (one, source) for one in plans for source in one.sources}
    descriptors = {one.name: os.open(folder / one.temporary, os.O_WRONLY) for one in plans}
    try:
        for name, start, tensor in parts:
            one, source = home[name]
            size = source.dtype.itemsize
            step = max(_BATCH_NBYTES // size, 1)
            for low in range(0, tensor.numel(), step):
                data = memory_of(tensor[low : low + step].to("cpu", source.dtype).contiguous())
                at, done = one.offsets[name] + (start + low) * size, 0
                while done < len(data):
                    done += os.pwrite(descriptors[one.name], data[done:], at + done)
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def begin(folder: Path, plans: Sequence[FilePlan]) -> None:
    """Make the files of their full size, with their headers."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in plans:
        with (folder / one.temporary).open("wb") as file:
            file.write(one.header)
            file.truncate(one.nbytes)


def _sources(manifest: Manifest, dtype: torch.dtype | None) -> Iterator[Source]:
    for record in manifest.parameters.values():
        state = record.states.get(PARAMETERS)
        saved = dtype_of(state.dtype) if state is not None else torch.float32  # none: it has no elements
        yield Source(record.names[0], tuple(record.shape), _target(saved, dtype), saved)
    for name, packed in _buffers(manifest).items():
        if "$scalar" in packed:
            saved = dtype_of(packed["$scalar"][0])
            yield Source(name, (), _target(saved, dtype), saved)
        else:
            tensor = manifest.tensors[packed["$tensor"]]
            saved = dtype_of(tensor.dtype)
            yield Source(name, tuple(tensor.shape), _target(saved, dtype), saved)


def _buffers(manifest: Manifest) -> Mapping[str, Any]:
    ranks = manifest.values.get("ranks", [])
    buffers: Mapping[str, Any] = ranks[0].get("buffers", {}) if ranks else {}
    return buffers


def _target(saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and saved.is_floating_point else saved


def _spread(sources: Sequence[Source], limit: int) -> list[list[Source]]:
    shards: list[list[Source]] = [[]]
    filled = 0
    for source in sources:
        if shards[-1] and filled + source.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += source.nbytes
    return shards


def _stream(reader: Reader, source: Source) -> Iterator[Tensor]:
    """The flattened tensor, piece by piece."""
    packed = _buffers(reader.manifest).get(source.name)
    if packed is not None and "$scalar" in packed:
        yield torch.tensor([packed["$scalar"][1]], dtype=source.dtype)
        return
    step = max(_BATCH_NBYTES // source.saved.itemsize, 1)
    for start in range(0, source.numel, step):
        out = torch.empty(min(step, source.numel - start), dtype=source.saved)
        reader.read(list(_tasks(reader, source, packed, start, out)))
        yield out.to(source.dtype)


def _tasks(reader: Reader, source: Source, packed: Any, start: int, out: Tensor) -> Iterator[Located]:
    if packed is None:
        record = reader.parameter([source.name])
        assert record is not None
        yield from tasks_for(record.states[PARAMETERS], start, out, source.name)
    else:
        record_ = reader.manifest.tensors[packed["$tensor"]]
        yield Located(record_.file, Task(record_.offset + start * source.saved.itemsize, source.saved, out))
