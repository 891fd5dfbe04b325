"""Owns the packing of small state (client state, schedulers, random state) into JSON and tensors, and the unpacking.

A tensor becomes {"$tensor": name} and is stored beside the JSON. Values that JSON lacks (tuples, keys that are not
strings, numpy numbers, scalar tensors with their dtype) become objects with one key that begins with "$".
"""

from __future__ import annotations

import base64
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroshard.checkpoint.safetensors_file import DTYPE_NAMES
from zeroshard.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, str)


class Packer:
    """An object that packs values. It refuses `resharded` parameters (their fqns by `id`), which have no values."""

    def __init__(self, prefix: str, resharded: Mapping[int, str] | None = None) -> None:
        self.tensors: dict[str, Tensor] = {}  # to store beside the JSON, by name
        self._late: list[tuple[list[Any], Tensor]] = []  # numbers on an accelerator, with their places in the JSON
        self._prefix = prefix  # of the tensors' names
        self._resharded = resharded or {}

    def pack(self, value: Any, path: str) -> Any:
        """Return a value as JSON values. `path` is its name in errors, and in the names of its tensors.

        Numbers of 0-D tensors on an accelerator are None until the function from `start_numbers` has run.

        Raises:
            CheckpointError: the value contains an object of another type, a resharded parameter, or a tensor that no file can hold.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, list | tuple | deque):
            items: Any = [self.pack(item, f"{path}[{i}]") for i, item in enumerate(value)]
            if isinstance(value, deque):
                items = {"$deque": [items, value.maxlen]}
            elif isinstance(value, tuple):
                items = {"$tuple": items}
            return items
        if isinstance(value, Mapping):
            return self._pack_mapping(value, path)
        if isinstance(value, Tensor):
            return self._pack_tensor(value, path)
        return self._pack_object(value, path)

    def start_numbers(self) -> Callable[[], None]:
        """Start copying numbers from an accelerator. Return a function that waits and puts them into the packed values."""
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[list[Any], Tensor]]] = {}
        for scalar, value in self._late:
            alike.setdefault((value.device, value.dtype), []).append((scalar, value))
        copies = []
        for (device, dtype), late in alike.items():
            host = torch.empty(len(late), dtype=dtype, pin_memory=True)
            host.copy_(torch.stack([value for _, value in late]), non_blocking=True)
            event = torch.accelerator.current_stream(device).record_event()
            copies.append((event, host, [scalar for scalar, _ in late]))
        self._late = []

        def put() -> None:
            for event, host, scalars in copies:
                event.synchronize()
                for scalar, number in zip(scalars, host.tolist(), strict=True):
                    scalar[1] = number

        return put

    def _pack_object(self, value: Any, path: str) -> Any:
        """Pack an object of another library or refuse it."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            native = value.astype(value.dtype.newbyteorder("="))  # a copy, which torch can read
            return {"$ndarray": self.pack(torch.from_numpy(native), path)}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"$number": [str(value.dtype), value.item()]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        raise CheckpointError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint holds JSON (numbers, "
            "strings, lists, dicts) and tensors only. Save the values that it is made from."
        )

    def _pack_mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if are_plain(value) and type(value) in (dict, OrderedDict):
            return {key: self.pack(item, f"{path}.{key}") for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            pairs.append([self.pack(key, f"a key of {path}"), self.pack(item, f"{path}[{key!r}]")])
        if isinstance(value, Counter):
            return {"$counter": pairs}
        return {"$dict": pairs}

    def _pack_tensor(self, value: Tensor, path: str) -> Any:
        if id(value) in self._resharded:
            raise CheckpointError(
                f"{path} is the parameter {self._resharded[id(value)]}, whose values are sharded. The checkpoint has "
                "it anyway. For a separate copy, clone it inside `with zeroshard.unsharded(module):`."
            )
        if value.ndim == 0 and not value.is_complex() and value.dtype.itemsize <= 8:
            scalar: list[Any] = [str(value.dtype).removeprefix("torch."), None]
            if value.device.type == "cpu":
                scalar[1] = value.item()
            else:
                self._late.append((scalar, value.detach()))
            return {"$scalar": scalar}
        name = f"{self._prefix}{path}#{len(self.tensors)}"  # paths may coincide: a key may contain a dot
        self.tensors[name] = storable(value, path)
        return {"$tensor": name}


def storable(tensor: Tensor, path: str) -> Tensor:
    """Return a tensor in a form that a file can hold.

    Raises:
        CheckpointError: the tensor is sparse, safetensors lacks its dtype, or its memory was freed.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{path} is a tensor of {tensor.dtype} and {tensor.layout}, which a checkpoint cannot hold. Convert it to "
            "a dense tensor of a usual dtype."
        )
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + steps + 1) * tensor.itemsize  # of the last element, in bytes of the storage
    if tensor.numel() and end > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{path} is an alias of freed memory, such as `parameter.data` from inside a forward: clone it there."
        )
    return tensor.detach().resolve_conj().resolve_neg()


def are_plain(keys: Iterable[Any]) -> bool:
    """Return whether all keys are strings and none begins with `$`, the mark of a packed value."""
    return all(isinstance(key, str) and not key.startswith("$") for key in keys)


def unpack(packed: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the value that was packed. `read` returns a tensor by its name."""
    if isinstance(packed, list):
        return [unpack(item, read) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if len(packed) != 1 or not next(iter(packed)).startswith("$"):
        return {key: unpack(item, read) for key, item in packed.items()}
    ((kind, content),) = packed.items()
    return _MAKERS[kind](content, read)


def _dict(content: Any, read: Callable[[str], Tensor]) -> dict[Any, Any]:
    return {unpack(key, read): unpack(item, read) for key, item in content}


_MAKERS: dict[str, Callable[[Any, Callable[[str], Tensor]], Any]] = {
    "$dict": _dict,
    "$counter": lambda content, read: Counter(_dict(content, read)),
    "$tuple": lambda content, read: tuple(unpack(content, read)),
    "$deque": lambda content, read: deque(unpack(content[0], read), content[1]),
    "$tensor": lambda content, read: read(content),
    "$scalar": lambda content, _: torch.tensor(content[1], dtype=getattr(torch, content[0])),
    "$ndarray": lambda content, read: unpack(content, read).numpy(),
    "$number": lambda content, _: np.dtype(content[0]).type(content[1]),
    "$bytes": lambda content, _: base64.b64decode(content),
    "$dtype": lambda content, _: getattr(torch, content),
}


def random_state() -> dict[str, Any]:
    """Return the states of the global random generators of torch (CPU and current accelerator), numpy and Python."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.accelerator.is_available():
        state["accelerator"] = torch.get_device_module(torch.accelerator.current_accelerator()).get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the generators to the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if torch.accelerator.is_available() and "accelerator" in state:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state["accelerator"])
