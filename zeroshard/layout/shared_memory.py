"""Finds parameters that share memory without being one parameter.

A sharded model copies its parameters into flat buffers. Two parameters in one memory, or a buffer in a parameter's memory, would
become separate there; in plain PyTorch a write to one shows in the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.torch_private import is_distributed, local_of, past_torch_function, storage_id


class _Extent(NamedTuple):
    """A tensor with the bytes of its storage between its first element and its last."""

    start: int
    stop: int
    name: str
    tensor: Tensor
    is_parameter: bool


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise where a parameter and another parameter, or a buffer, have elements in the same memory.

    Raises:
        UsageError: names both and the remedy.
    """
    by_storage: dict[int, list[_Extent]] = defaultdict(list)
    with past_torch_function():  # of a parameter that was born sharded, this looks at the placeholder
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
                is_parameter = isinstance(tensor, nn.Parameter)
                here = local_of(tensor) if is_distributed(tensor) else tensor
                by_storage[storage_id(here)].append(_extent(name, here, is_parameter=is_parameter))
        for extents in by_storage.values():
            for one, other in _candidates(extents):
                if _overlap(one, other):
                    _refuse(one, other)


def _extent(name: str, tensor: Tensor, *, is_parameter: bool) -> _Extent:
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _Extent(start, start + (last + 1) * tensor.itemsize, name, tensor, is_parameter)


def _candidates(extents: list[_Extent]) -> Iterator[tuple[_Extent, _Extent]]:
    """Yield the pairs, with a parameter among them, whose extents meet."""
    in_order = sorted(extents, key=lambda extent: extent.start)
    for number, one in enumerate(in_order):
        for other in in_order[number + 1 :]:
            if other.start >= one.stop:
                break
            if one.is_parameter or other.is_parameter:
                yield one, other


def _overlap(one: _Extent, other: _Extent) -> bool:
    """Return whether two tensors whose extents meet have an element in common: columns of one matrix have none."""
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    if one.tensor.itemsize != other.tensor.itemsize:
        return True
    taken = torch.zeros((max(one.stop, other.stop) - one.start) // one.tensor.itemsize, dtype=torch.bool, device="cpu")
    offset = (other.start - one.start) // one.tensor.itemsize
    taken.as_strided(one.tensor.shape, one.tensor.stride()).fill_(True)
    return bool(taken.as_strided(other.tensor.shape, other.tensor.stride(), offset).any())


def _refuse(one: _Extent, other: _Extent) -> None:
    buffers = [extent.name for extent in (one, other) if not extent.is_parameter]
    if not buffers:
        raise UsageError(
            f"parameters {one.name} and {other.name} lie over the same memory and are two Parameters (tied through `.data`?): they "
            "would part. Assign one Parameter to both modules (`b.weight = a.weight`), or give one a copy: `.data.clone()`."
        )
    names = [one.name, other.name]
    names.remove(buffers[0])
    raise UsageError(
        f"buffer {buffers[0]} lies over the memory of parameter {names[0]}: they would part. Read the parameter "
        "instead, or give the buffer a copy: `.clone()`."
    )
