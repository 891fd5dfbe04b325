"""Owns the bytes of tensors as files take and give them. Called by checkpoint and storage."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same place of the same storage. Asks for no address, which not every tensor has."""
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and one.storage_offset() * one.itemsize == other.storage_offset() * other.itemsize


def memory_of(flat: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to be read from or written to.

    Made from the address: a storage of which `Tensor.numpy` has given a view can never be freed and refilled again.
    """
    if flat.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    array.owner = flat  # which lives as long as the view
    return memoryview(array).cast("B")
