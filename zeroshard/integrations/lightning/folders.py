"""Owns the format of a sharded Lightning checkpoint: a folder with the name that Lightning chose.

epoch=0-step=100.ckpt/
    latest
    checkpoint/            see docs/checkpoints.md: model states, and Lightning's own part as one value
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.formats.consolidated import state_dict_of
from zeroshard.sharding.sharded import Sharded

_TAG = "checkpoint"
_KEY = "lightning"


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a sharded checkpoint, and not a single file."""
    return (Path(path) / _TAG / MANIFEST).is_file()


def save_sharded(
    sharded: Sharded, path: str | os.PathLike[str], rest: dict[str, Any], barrier: Callable[[], Any]
) -> None:
    """Write a folder: each rank's model states, and rank 0's `rest`, as Lightning pickles it. Every rank must call it."""
    _refuse_remote(path)
    if sharded.rank == 0 and Path(path).is_file():
        Path(path).unlink()
    barrier()
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    sharded.save(path, _TAG, {_KEY: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)})


def load_sharded(
    sharded: Sharded, path: str | os.PathLike[str], weights_only: bool | None = None, **wanted: bool
) -> dict[str, Any]:
    """Load a folder, saved at any world size and stage, into a model. Return the other saved values.

    Args:
        sharded: the model.
        path: the folder.
        weights_only: torch.load's argument, for the other values.
        wanted: arguments of `Sharded.load`: strict, optimizer_states, random.
    """
    return _rest(sharded.load(path, _TAG, **wanted).values, path, weights_only)


def _rest(values: dict[str, Any], path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
    if _KEY not in values:
        raise CheckpointError(f"{path} was not saved by Lightning: load it with zeroshard's own `load`.")
    buffer = io.BytesIO(values[_KEY].numpy().tobytes())
    try:
        rest: dict[str, Any] = torch.load(buffer, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        found = re.sub(r".*?GLOBAL (\S+).*", r"\1", str(error), flags=re.DOTALL).splitlines()[0]
        raise CheckpointError(
            f"{path}: Lightning's part (hyperparameters, callbacks) names a class that torch.load does not construct: "
            f"{found}. Allow it with torch.serialization.add_safe_globals, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
        ) from None
    return rest


def refuse_what_is_none(path: str | os.PathLike[str]) -> None:
    """Raise if a path is neither a file nor a sharded checkpoint."""
    _refuse_remote(path)
    if Path(path).is_dir():
        raise CheckpointError(
            f"{path} is a folder, but not a sharded checkpoint: it has no {_TAG}/{MANIFEST}. Name the folder that "
            "Lightning saved to."
        )
    if not Path(path).exists():
        raise CheckpointError(f"there is no checkpoint at {path}. Check the path.")


def _refuse_remote(path: str | os.PathLike[str]) -> None:
    if "://" in os.fspath(path):
        raise UsageError(f"{path} is not a local folder. Name one that all ranks see.")


def write_single_file(
    path: str | os.PathLike[str], out: str | os.PathLike[str], weights_only: bool | None = None
) -> None:
    """Convert a sharded Lightning checkpoint to one ordinary file, with the master weights and the hyperparameters.

    `Module.load_from_checkpoint(out)` and `torch.load(out)["state_dict"]` read it. Call it in one process, with memory
    for all weights.

    Args:
        path: the folder that Lightning saved.
        out: the file to write; an existing file is replaced.
        weights_only: torch.load's argument, for Lightning's own part; False may run code from the folder.

    Raises:
        CheckpointError: the folder does not exist or is damaged.
    """
    reader = open_checkpoint(path, _TAG)
    rest = _rest(reader.values(reader.manifest.values["shared"]), path, weights_only)
    torch.save({**rest, "state_dict": state_dict_of(path, _TAG, dtype=None)}, out)
