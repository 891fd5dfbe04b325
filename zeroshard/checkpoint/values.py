"""Owns the way of small state (client state, schedulers, random state) into JSON plus tensors, and back. Called by saving.

A tensor becomes {"$tensor": name} and is kept beside; what JSON does not know (tuples, keys that are no strings, numbers of
numpy, scalar tensors with their dtype) becomes an object with one key that begins with "$".
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroshard.checkpoint.safetensors_file import DTYPE_NAMES
from zeroshard.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str)


class Packer:
    """Packs values; `tensors` collects what goes beside, by name.

    Args:
        prefix: of the tensors' names.
        away: `id`s of parameters whose values are not here, and their fqns: they are refused.
    """

    def __init__(self, prefix: str = "", away: Mapping[int, str] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._prefix, self._away = prefix, away or {}

    def pack(self, value: Any, path: str) -> Any:
        """JSON for a value. `path` names it in errors, and its tensors.

        Raises:
            CheckpointError: it holds something that is neither JSON nor a tensor; names where.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, list | tuple | deque):
            items = [self.pack(item, f"{path}[{i}]") for i, item in enumerate(value)]
            if isinstance(value, deque):
                return {"$deque": [items, value.maxlen]}
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, Mapping):
            return self._pack_mapping(value, path)
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        packed = self._pack_stranger(value, path)
        if packed is not None:
            return packed
        raise CheckpointError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds JSON (numbers, strings, lists, "
            "dicts) and tensors alone. Save what it is made from."
        )

    def _pack_stranger(self, value: Any, path: str) -> Any:
        """What neither JSON nor torch has, and a state dict may hold."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"$ndarray": self.pack(torch.from_numpy(value.copy()), path)}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"$number": [str(value.dtype), value.item()]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        return {"$dtype": str(value).removeprefix("torch.")} if isinstance(value, torch.dtype) else None

    def _pack_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if isinstance(value, Counter):
            kind = "$counter"
        elif type(value) in (dict, OrderedDict) and all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {key: self.pack(item, f"{path}.{key}") for key, item in value.items()}
        else:
            kind = "$dict"
        pairs = [
            [self.pack(key, f"a key of {path}"), self.pack(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        return {kind: pairs}

    def _pack_tensor(self, value: Tensor, path: str) -> Any:
        if id(value) in self._away:
            raise CheckpointError(
                f"{path} is the parameter {self._away[id(value)]}, whose values are not here: it is in the checkpoint anyway. "
                "For a copy of your own, clone it inside `with zeroshard.unsharded(module):`."
            )
        if value.ndim == 0 and not value.is_complex() and value.dtype.itemsize <= 8:
            return {"$scalar": [str(value.dtype).removeprefix("torch."), value.item()]}
        name = f"{self._prefix}{path}#{len(self.tensors)}"  # paths may coincide: a key may hold a dot
        self.tensors[name] = storable(value, path)
        return {"$tensor": name}


def storable(tensor: Tensor, path: str) -> Tensor:
    """The tensor as a file can hold it.

    Raises:
        CheckpointError: it is sparse, or of a dtype that safetensors does not know; names it.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{path} is a tensor of {tensor.dtype} and {tensor.layout}: a checkpoint cannot hold that."
        )
    if _end(tensor) > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path} is an alias of memory that was given back, such as `parameter.data` from inside a forward: clone it there."
        )
    return tensor.detach().resolve_conj().resolve_neg()


def _end(tensor: Tensor) -> int:
    """Where its last element ends in its storage, in bytes."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + steps + 1) * tensor.itemsize) if tensor.numel() else 0


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """What was packed. `read` gives a tensor by its name."""
    if isinstance(packed, list):
        return [unpack(item, read) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1 or not next(iter(packed)).startswith("$"):
        return {key: unpack(item, read) for key, item in packed.items()}
    ((kind, content),) = packed.items()
    if kind in ("$dict", "$counter"):
        pairs = {unpack(key, read): unpack(item, read) for key, item in content}
        return Counter(pairs) if kind == "$counter" else pairs
    return _MAKERS[kind](content, read)


_MAKERS: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    "$tuple": lambda content, read: tuple(unpack(item, read) for item in content),
    "$deque": lambda content, read: deque((unpack(item, read) for item in content[0]), content[1]),
    "$tensor": lambda content, read: read(content),
    "$scalar": lambda content, _: torch.tensor(content[1], dtype=getattr(torch, content[0])),
    "$ndarray": lambda content, read: unpack(content, read).numpy(),
    "$number": lambda content, _: np.dtype(content[0]).type(content[1]),
    "$bytes": lambda content, _: base64.b64decode(content),
    "$dtype": lambda content, _: getattr(torch, content),
}
