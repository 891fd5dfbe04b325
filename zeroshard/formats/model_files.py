"""Owns the files of a model as transformers lays them out: which tensor goes where, written by ranges. Called by hugging_face.

`model.safetensors`, or several files and `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.safetensors_file import header
from zeroshard.observe.display import Advance, ignore
from zeroshard.storage.raw_memory import memory_of

INDEX, SINGLE, ADAPTER = "model.safetensors.index.json", "model.safetensors", "adapter_model.safetensors"
MAX_SHARD_NBYTES = 5_000_000_000
"""As transformers' `max_shard_size`."""
BATCH_NBYTES = 32 << 20
"""Bytes that are held while a tensor is streamed, in each of two dtypes."""
_EXPORTED = re.compile(
    rf"{re.escape(ADAPTER)}(\.tmp)?|adapter_config\.json|{re.escape(INDEX)}|{re.escape(SINGLE)}|model-\d{{5}}-of-\d{{5}}\.safetensors(\.tmp)?|{re.escape(SINGLE)}\.tmp"
)


@dataclass(frozen=True)
class Source:
    """One tensor of the export: where its numbers are, and what it becomes.

    Attributes:
        name: in the file.
        dtype: in the file.
        saved: the dtype that it has.
        fqn: the parameter or buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: torch.dtype
    fqn: str

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


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


def plan(sources: Sequence[Source], max_shard_nbytes: float, single: str = SINGLE) -> list[FilePlan]:
    """Which tensor goes to which file, and where. `single` is the file's name where there is one alone."""
    shards = _spread(sources, max_shard_nbytes)
    plans = []
    for number, shard in enumerate(shards, start=1):
        name = single if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        head = header({source.name: (source.dtype, source.shape) for source in shard}, {"format": "pt"})
        offsets, at = {}, len(head)
        for source in shard:
            offsets[source.name] = at
            at += source.nbytes
        plans.append(FilePlan(name, tuple(shard), head, offsets))
    return plans


def index_of(plans: Sequence[FilePlan]) -> dict[str, Any]:
    """What says which of several files holds a tensor."""
    weight_map = {source.name: one.name for one in plans for source in one.sources}
    total = sum(source.nbytes for one in plans for source in one.sources)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def finish(folder: Path, plans: Sequence[FilePlan], texts: Mapping[str, Any]) -> list[Path]:
    """Everything is written: give the files their names, write the JSON beside, remove a former export's files."""
    written = [folder / name for name in (*(one.name for one in plans), *texts)]
    for one in plans:
        (folder / one.temporary).replace(folder / one.name)
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in list(folder.iterdir()):
        if path not in written and _EXPORTED.fullmatch(path.name):
            path.unlink()
    return written


def write_ranges(
    folder: Path, plans: Sequence[FilePlan], parts: Iterable[tuple[str, int, Tensor]], advance: Advance = ignore
) -> None:
    """Write (fqn, start, 1-D tensor) to where they belong in files that are there. A tensor is asked for in its turn.

    Args:
        advance: hears of bytes, as they were in memory.
    """
    homes: dict[str, list[tuple[FilePlan, Source]]] = {}
    for one in plans:
        for source in one.sources:
            homes.setdefault(source.fqn, []).append((one, source))
    descriptors = {one.name: os.open(folder / one.temporary, os.O_WRONLY) for one in plans}
    try:
        for fqn, start, tensor in parts:
            for one, source in homes[fqn]:
                _write_range(descriptors[one.name], tensor, source.dtype, one.offsets[source.name], start)
                advance(tensor.nbytes)
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _write_range(descriptor: int, tensor: Tensor, dtype: torch.dtype, offset: int, start: int) -> None:
    step = max(BATCH_NBYTES // dtype.itemsize, 1)
    for low in range(0, tensor.numel(), step):
        data = memory_of(tensor[low : low + step].to("cpu", dtype).contiguous())
        at, done = offset + (start + low) * dtype.itemsize, 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], at + done)


def make_folders(folder: Path, plans: Sequence[FilePlan]) -> None:
    """For the files to lie in."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in plans:
        (folder / one.name).parent.mkdir(exist_ok=True)


def begin(folder: Path, plans: Sequence[FilePlan]) -> None:
    """Make the files of their full size, with their headers."""
    make_folders(folder, plans)
    for one in plans:
        with (folder / one.temporary).open("wb") as file:
            file.write(one.header)
            file.truncate(one.nbytes)


def _spread(sources: Sequence[Source], limit: float) -> list[list[Source]]:
    shards: list[list[Source]] = [[]]
    filled = 0
    for source in sources:
        if shards[-1] and filled + source.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(source)
        filled += source.nbytes
    return shards
