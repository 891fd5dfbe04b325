"""Owns the conversion of checkpoints to complete state dicts, in memory or in `torch.save` files.

One process reads a zeroshard checkpoint, or, through the import, a DeepSpeed checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.deepspeed import import_deepspeed
from zeroshard.checkpoint.hugging_face import MAX_SHARD_NBYTES, Exported, claimed, naming, spread, write_json
from zeroshard.checkpoint.loading import Reader, open_checkpoint
from zeroshard.errors import CheckpointError


@contextmanager
def open_any(folder: str | os.PathLike[str], tag: str | None = None) -> Iterator[Reader]:
    """Open a zeroshard checkpoint, or import a DeepSpeed checkpoint to a temporary folder and open the result.

    The temporary folder is inside `folder` if possible.
    """
    source = files.folder_of(folder, tag)
    if not source.is_dir():
        raise CheckpointError(f"there is no folder {source}. Name the folder of a checkpoint.")
    if not files.is_of_deepspeed(source):
        yield open_checkpoint(source)
        return
    beside = folder if os.access(folder, os.W_OK) else None  # None: the system's temporary folder
    with tempfile.TemporaryDirectory(prefix="import-", dir=beside) as out:
        yield open_checkpoint(import_deepspeed(source, out))


def state_dict_of(
    folder: str | os.PathLike[str], tag: str | None = None, *, dtype: torch.dtype | None = torch.float32,
    exclude_frozen: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Return a checkpoint's complete model state dict, on the CPU, for `model.load_state_dict`.

    A tied parameter appears under all its names.

    Args:
        folder: the folder of all checkpoints, or of one.
        tag: default: the tag in the file `latest`.
        dtype: the dtype of floating-point parameters; None keeps the saved dtypes. Buffers keep their dtypes.
        exclude_frozen: whether to leave out frozen parameters.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it lacks frozen parameters that are not excluded.
    """
    with open_any(folder, tag) as reader:
        return _read(reader, _tensors(reader, dtype, exclude_frozen))


def write_files(
    reader: Reader, out: str | os.PathLike[str], *, dtype: torch.dtype | None = torch.float32,
    max_shard_nbytes: float = MAX_SHARD_NBYTES, exclude_frozen: bool = False,
) -> list[Path]:  # fmt: skip
    """Write `pytorch_model.bin`, or several files and their index. Return their paths.

    Only one file's tensors are in memory at a time.
    """
    folder = Path(out)
    plans = spread(_tensors(reader, dtype, exclude_frozen), max_shard_nbytes, "pytorch_model.bin")
    weight_map: dict[str, str] = {}
    with claimed(folder), ExitStack() as stack:
        for plan in plans:
            batch = _read(reader, plan.tensors)
            weight_map.update(dict.fromkeys(batch, plan.name))
            stack.enter_context(written(folder / plan.name, batch))
            batch.clear()
        paths = [folder / plan.name for plan in plans]
        if len(plans) > 1:
            index = {"metadata": {"total_size": sum(plan.data_nbytes for plan in plans)}, "weight_map": weight_map}
            paths.append(folder / "pytorch_model.bin.index.json")
            write_json(paths[-1], index)
    return paths


@contextmanager
def written(path: Path, state: Mapping[str, Any]) -> Iterator[None]:
    """Write a file with `torch.save` at the start and rename it into place after the block. After an error, remove the file."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(dict(state), file)
        yield
        with naming(path):
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _tensors(reader: Reader, dtype: torch.dtype | None, exclude_frozen: bool) -> list[Exported]:
    """List the parameters and buffers of the complete model. Buffers keep their dtypes."""
    excluded = reader.manifest.excluded
    if excluded and not exclude_frozen:
        raise CheckpointError(
            f"{reader.folder} lacks {len(excluded)} frozen parameters (one is {excluded[0]}), so it has no whole model. "
            "Read only the trained parameters (exclude_frozen)."
        )
    return [
        Exported.of(stored.names[0], stored.shape, stored.dtype, None if stored.is_buffer else dtype)
        for stored in reader.model()
        if stored.trained or not exclude_frozen
    ]


def _read(reader: Reader, tensors: Sequence[Exported]) -> dict[str, Tensor]:
    """Return tensors by name, in the export's dtypes. A tied tensor appears under all its names."""
    by_fqn = {stored.names[0]: stored for stored in reader.model()}
    state: dict[str, Tensor] = {}
    for one in tensors:
        stored = by_fqn[one.fqn]
        tensor = reader.tensor(stored, stored.span)
        state.update(dict.fromkeys(stored.names, tensor.view(one.shape).to(one.dtype)))
    return state
