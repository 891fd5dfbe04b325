"""Owns whole state dicts out of checkpoints: in memory, or in files as torch.save writes them. Called by users of either.

For ours and, by way of the import, for those that DeepSpeed wrote. One process; no ranks are needed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.loading import Reader, open_checkpoint, tasks_for
from zeroshard.checkpoint.manifest import ParameterRecord, dtype_of
from zeroshard.errors import CheckpointError
from zeroshard.formats.deepspeed import import_deepspeed
from zeroshard.step.model_states import PARAMETERS

MAX_SHARD_NBYTES = 5_000_000_000


@contextmanager
def open_any(folder: str | os.PathLike[str], tag: str | None = None) -> Iterator[Reader]:
    """A checkpoint of ours; or one of DeepSpeed's, imported for the while to a folder beside it.

    Raises:
        CheckpointError: there is neither.
    """
    path = Path(folder)
    if tag is None and not (path / files.MANIFEST).is_file() and not list(path.glob("*_optim_states.pt")):
        tag = files.latest_tag(path)
    source = path / tag if tag is not None else path
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}: no checkpoint to read.")
    if not list(source.glob("*_optim_states.pt")):
        yield open_checkpoint(source)
        return
    with tempfile.TemporaryDirectory(prefix="import-", dir=_writable(path)) as out:
        yield open_checkpoint(import_deepspeed(source, out))


def _writable(path: Path) -> Path | None:
    return path if os.access(path, os.W_OK) else None


def state_dict_of(
    folder: str | os.PathLike[str],
    tag: str | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    exclude_frozen: bool = False,
) -> dict[str, Tensor]:
    """The whole model of a checkpoint, on the CPU, under all names of each parameter: for `model.load_state_dict`.

    Args:
        folder: that of all checkpoints, or of one.
        tag: default: what `latest` names.
        dtype: of what is floating-point in parameters; None is what was saved. Buffers stay as they are.
        exclude_frozen: leave out parameters that were not trained.

    Raises:
        CheckpointError: there is none, it is damaged, or frozen parameters that are wanted were left out of it.
    """
    with open_any(folder, tag) as reader:
        return {
            name: tensor for names, tensor in tensors_of(reader, dtype, exclude_frozen=exclude_frozen) for name in names
        }


def tensors_of(
    reader: Reader, dtype: torch.dtype | None, *, exclude_frozen: bool = False
) -> Iterator[tuple[list[str], Tensor]]:
    """Each parameter, and then each buffer, with all its names, one at a time."""
    manifest = reader.manifest
    if manifest.excluded and not exclude_frozen:
        raise CheckpointError(
            f"{reader.folder} leaves out {len(manifest.excluded)} frozen parameters (one is {manifest.excluded[0]}): there is no "
            "whole model in it. Ask for the trained ones alone (exclude_frozen)."
        )
    for record in manifest.parameters.values():
        if record.trained or not exclude_frozen:
            yield list(record.names), _read(reader, record, dtype)
    ranks = manifest.values.get("ranks", [])
    for name, packed in (ranks[0].get("buffers", {}) if ranks else {}).items():
        yield [name], torch.as_tensor(reader.values(packed))


def _read(reader: Reader, record: ParameterRecord, dtype: torch.dtype | None) -> Tensor:
    state = record.states.get(PARAMETERS)
    saved = dtype_of(state.dtype) if state is not None else torch.float32  # none: it has no elements
    out = torch.empty(torch.Size(record.shape).numel(), dtype=saved)
    if state is not None and out.numel():
        reader.read(list(tasks_for(state, 0, out, record.names[0])))
    return out.view(record.shape).to(dtype if dtype is not None and saved.is_floating_point else saved)


def write_files(
    reader: Reader,
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = torch.float32,
    max_shard_nbytes: float = MAX_SHARD_NBYTES,
    exclude_frozen: bool = False,
    safe: bool = False,
) -> list[Path]:
    """Write `pytorch_model.bin`, or several files and their index, one file's tensors in memory at a time. Returns their paths.

    Args:
        safe: `model.safetensors` in its place; a tied parameter under the first of its names alone.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    home, parts, total, batch, nbytes = dict[str, int](), list[Path](), 0, dict[str, Tensor](), 0
    end: list[tuple[list[str], Tensor]] = [([], torch.empty(0))]
    for names, tensor in chain(tensors_of(reader, dtype, exclude_frozen=exclude_frozen), end):
        if batch and (not names or nbytes + tensor.nbytes > max_shard_nbytes):
            parts.append(folder / f"{stem}.part-{len(parts)}.{ending}")
            _save(batch, parts[-1], safe=safe)
            home.update(dict.fromkeys(batch, len(parts) - 1))
            total, batch, nbytes = total + nbytes, {}, 0
        batch.update(dict.fromkeys(names[:1] if safe else names, tensor))
        nbytes += tensor.nbytes
    return _name(folder, parts, home, total, (stem, ending))


def _save(batch: dict[str, Tensor], path: Path, *, safe: bool) -> None:
    if safe:
        save_file({name: tensor.contiguous() for name, tensor in batch.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(batch, path)


def _name(folder: Path, parts: list[Path], home: Mapping[str, int], nbytes: int, kind: tuple[str, str]) -> list[Path]:
    """The files' final names say how many there are."""
    (stem, ending), count = kind, len(parts)
    suffixes = [f"-{number + 1:05}-of-{count:05}" if count > 1 else "" for number in range(count)]
    named = [part.replace(folder / f"{stem}{suffix}.{ending}") for part, suffix in zip(parts, suffixes, strict=True)]
    if count > 1:
        index = {
            "metadata": {"total_size": nbytes},
            "weight_map": {name: named[number].name for name, number in home.items()},
        }
        named.append(folder / f"{stem}.{ending}.index.json")
        named[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return named
