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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.core.named_parameter import name_of, named_parameters
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.model.sharded import Sharded
from zeroshard.torch_private import tree_leaves

_TAG = "checkpoint"
_KEY = "lightning"
_EDITS = "zeroshard_state_dict"
"""The key, in Lightning's part, of what hooks changed in the state dict; absent if they changed nothing."""


@dataclass
class Edits:
    """The differences between a state dict and the one that hooks made of it.

    Entries whose tensor stayed the same object are those of the model, whatever their new names: the checkpoint keeps their
    master weights and optimizer states.

    Attributes:
        names: the new name of each entry with another one, by the old name; None for an entry that was left out.
        changed: entries with other values, by their new names.
    """

    names: dict[str, str | None] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> Edits:
        """Compare a state dict with the one that hooks made of it."""
        before = {name_of(name): value for name, value in before.items()}
        after = {name_of(name): value for name, value in after.items()}
        old_of: dict[int, list[str]] = {}
        for name, value in before.items():
            old_of.setdefault(id(value), []).append(name)
        edits = cls()
        left = dict.fromkeys(before)
        for name, value in after.items():
            names = [old for old in old_of.get(id(value), ()) if old in left]
            if not names:
                edits.changed[name] = value
                continue
            old = name if name in names else names[0]  # tied parameters have one tensor and several names
            del left[old]
            if old != name:
                edits.names[old] = name
        edits.names |= left
        return edits

    def __bool__(self) -> bool:
        return bool(self.names or self.changed)

    def name_of(self, name: str | None) -> str | None:
        """Return the new name of an entry, which may have other values; None if it was left out."""
        if name is None:
            return None
        new = self.names.get(name, name)
        return name if new is None and name in self.changed else new

    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict that hooks would make of this one."""
        kept = {name: value for old, value in state.items() if (name := self.names.get(old, old)) is not None}
        return {**kept, **self.changed}

    def refuse_missing_values(self, rest: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
        """Raise if a hook used values of sharded parameters, which have none between steps."""
        ids = {id(value) for value in shown.values() if isinstance(value, Tensor) and value.is_meta}
        without = [name for name, value in self.changed.items() if isinstance(value, Tensor) and value.is_meta]
        elsewhere = [key for key, value in rest.items() for leaf in tree_leaves(value) if id(leaf) in ids]
        if without or elsewhere:
            raise UsageError(
                f"on_save_checkpoint computed {(without or elsewhere)[0]} from the values of checkpoint['state_dict'], which at "
                "stage 3 has names, shapes and dtypes only. There, leave entries out or rename them, and change values in "
                "on_load_checkpoint; or use stage 2."
            )


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a sharded checkpoint, and not a single file."""
    return (Path(path) / _TAG / MANIFEST).is_file()


def save_sharded(
    sharded: Sharded,
    path: str | os.PathLike[str],
    rest: dict[str, Any],
    barrier: Callable[[], Any],
    edits: Edits | None = None,
) -> None:
    """Write a folder: each rank's model states, and rank 0's `rest`, as Lightning pickles it. Every rank must call it.

    Args:
        edits: the changes that hooks made to the state dict, if any.
    """
    _refuse_remote(path)
    if sharded.rank == 0 and Path(path).is_file():
        Path(path).unlink()
    barrier()
    left_out = {name for name, new in edits.names.items() if new is None} if edits else set()
    frozen = {name for name, one in named_parameters(sharded.model, all_names=True) if not one.requires_grad}
    if edits:
        rest = {**rest, _EDITS: {"names": edits.names, "changed": edits.changed}}
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    values = {_KEY: torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)}
    sharded.save(path, _TAG, values, exclude_frozen=bool(frozen) and frozen <= left_out)


def load_sharded(
    sharded: Sharded, path: str | os.PathLike[str], weights_only: bool | None = None, **wanted: Any
) -> dict[str, Any]:
    """Load a folder, saved at any world size and stage, into a model. Return the other saved values.

    Args:
        sharded: the model.
        path: the folder.
        weights_only: torch.load's argument, for the other values.
        wanted: arguments of `Sharded.load`: strict, optimizer_states, random, rename.
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


def read_rest(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """Return the other saved values of a folder, and do not load the model."""
    reader = open_checkpoint(path, _TAG)
    return _rest(reader.values(reader.manifest.values["shared"]), path, weights_only)


def edits_of(rest: Mapping[str, Any]) -> Edits:
    """Return the changes that hooks made to the state dict when it was saved."""
    return Edits(**rest.get(_EDITS, {}))


def read_state_dict(path: str | os.PathLike[str], edits: Edits) -> tuple[dict[str, Any], dict[str, torch.Size]]:
    """Return a folder's state dict, with master weights, as the hooks left it when it was saved; and shapes in the folder."""
    reader = open_checkpoint(path, _TAG)
    state = state_dict_of(path, _TAG, dtype=None, exclude_frozen=bool(reader.manifest.excluded))
    return edits.apply(state), {name: value.shape for name, value in state.items()}


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
    rest = read_rest(path, weights_only)
    edits = edits_of(rest)
    rest.pop(_EDITS, None)
    torch.save({**rest, "state_dict": read_state_dict(path, edits)[0]}, out)
