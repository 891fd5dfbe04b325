"""Owns 1-D tensors whose memory can be freed and allocated again while every view of them stays valid.

[Note: freed storage]
Autograd saves views of parameters. When a sharded unit is resharded, the *memory* of its flat buffer
is freed. Before the backward, memory is allocated again under the same views, and filled. Until then nothing may read the
views, because a read of freed memory is a segmentation fault, not an error. So a parameter at rest shows a placeholder
instead of this memory (see `unit.py`). Memory is kept as long as other code uses it: a view that a module returned, an
alias that the user keeps, a tensor that autograd saved without our hooks.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from zeroshard.core.storage.transfers import LANDED, Transfer
from zeroshard.errors import StorageError
from zeroshard.torch_private import storage_users


class FlatBuffer:
    """A 1-D tensor [numel] with memory until `free`. `label` is for warnings.

    Attributes:
        kept_count: the number of calls of `free` that freed nothing, since other code used the memory.
        has_address: whether its memory is real. A dry run only counts memory.
    """

    has_address: ClassVar[bool] = True

    def __init__(self, label: str, tensor: Tensor) -> None:
        self.label = label
        self.tensor = tensor
        self.kept_count = 0
        self._nbytes = tensor.untyped_storage().nbytes()
        self._own_uses = 0
        self._is_borrowed = False
        self._taken_on = self._stream

    def view(self, start: int, shape: torch.Size) -> Tensor:
        """Return the elements from `start` on as a view of this shape."""
        return self.tensor[start : start + shape.numel()].view(shape)

    def count_uses(self) -> None:
        """Record the present users of the memory as the owner's: `free` keeps memory that has more users."""
        self._own_uses = storage_users(self.tensor)

    def free(self) -> None:
        """Free the memory, if no other code uses it. See [Note: freed storage]."""
        if not self._own_uses:  # no other code has it yet
            self.count_uses()
        if not self.nbytes:
            return
        if storage_users(self.tensor) <= self._own_uses:
            self._give_back()
        else:
            self.kept_count += 1

    def allocate(self) -> None:
        """Take memory again; its content is undefined. If there is none, torch raises an error."""
        if not self.nbytes:
            self._take()
            self.count_uses()

    def _give_back(self) -> None:
        storage = self.tensor.untyped_storage()
        if storage.resizable():
            if (stream := self._stream) != self._taken_on:
                self.tensor.record_stream(stream)  # `stream` may still read; the memory returns to `_taken_on`
            storage.resize_(0)
        elif not self._is_borrowed:
            self._is_borrowed = True
            warnings.warn(
                f"a numpy array was made of {self.label}: torch can free their memory no more, so they stay whole, and "
                "the array shows whatever comes there. Make arrays of copies: parameter.detach().clone().numpy().",
                stacklevel=2,
            )

    def _take(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)
        self._taken_on = self._stream

    @property
    def _stream(self) -> Any:
        """The current stream; None on a CPU, where memory belongs to no stream."""
        device = self.tensor.device
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)

    @property
    def nbytes(self) -> int:
        """The number of bytes of live memory now."""
        return self.tensor.untyped_storage().nbytes()


class BufferPool:
    """A pool of 1-D scratch tensors.

    If no free buffer is large enough for a request, a new one replaces one of them. So, while `spare_nbytes` is 0, the pool
    holds at most as many buffers as were ever acquired at once, each at most as large as the largest request.

    Args:
        allocate: allocates a tensor of that many bytes, given as (numel, dtype); default: `torch.empty` on `device`.

    Attributes:
        spare_nbytes: the maximum number of bytes that wait for copies to CPU memory while the computation continues in
            other buffers. With 0, the computation waits for the copies. A host that is ahead of its device cannot see which
            copies are over, so each counts until its buffer is used again.
    """

    def __init__(self, device: torch.device, allocate: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._device = device
        self._allocate = allocate or (lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device))
        self._free: list[tuple[Tensor, Transfer]] = []
        """The free tensors, each with the transfer that must end first, in the order of their release."""
        self._out: dict[int, tuple[Tensor, Tensor]] = {}
        """By `id`, the tensors that were lent, each with the buffer that it is a part of."""
        self._last: dict[int, Tensor] = {}
        """By the `id` of a buffer, the tensor that was lent of it last: most requests are for the same again."""
        self.spare_nbytes = 0

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take a 1-D tensor [numel] with undefined content. Give it back with `release`."""
        nbytes = numel * dtype.itemsize
        fitting = [entry for entry in self._free if entry[0].numel() >= nbytes]
        if self.spare_nbytes:
            idle = [entry for entry in fitting if entry[1] is LANDED]
            copied_nbytes = sum(buffer.numel() for buffer, after in self._free if after is not LANDED)
            if idle:
                fitting = idle
            elif copied_nbytes + nbytes <= self.spare_nbytes:
                fitting = []
            else:
                fitting = fitting[:1]  # the oldest
        if fitting:
            entry = fitting[0]
            if len(fitting) > 1:
                entry = min(fitting, key=lambda entry: (not entry[1].is_done, entry[0].numel()))
            buffer, after = entry
            self._drop(entry)
            with suppress(StorageError):  # a reader of the values gets this error, which names their place
                after.wait(self._device)
        else:
            replaced = [entry for entry in self._free if not self.spare_nbytes or entry[1] is LANDED]
            if replaced:
                largest = max(replaced, key=lambda entry: entry[0].numel())
                self._drop(largest)
                self._last.pop(id(largest[0]), None)
            buffer = self._allocate(nbytes, torch.uint8)
        scratch = self._last.get(id(buffer))
        if scratch is None or scratch.numel() != numel or scratch.dtype != dtype:
            scratch = self._last[id(buffer)] = buffer[:nbytes].view(dtype)
        self._out[id(scratch)] = scratch, buffer
        return scratch

    def release(self, scratch: Tensor, after: Transfer | None = None) -> None:
        """Take back a tensor that `acquire` returned; it is used again once `after` is over."""
        _, buffer = self._out.pop(id(scratch))
        self._free.append((buffer, after or LANDED))

    def clear(self) -> None:
        """Free the tensors that are not in use."""
        for buffer, _ in self._free:
            self._last.pop(id(buffer), None)
        self._free.clear()

    def _drop(self, entry: tuple[Tensor, Transfer]) -> None:
        self._free = [other for other in self._free if other is not entry]

    @property
    def nbytes(self) -> int:
        """The number of bytes of live storage, acquired or not."""
        return sum(buffer.numel() for buffer, _ in self._free) + sum(buffer.numel() for _, buffer in self._out.values())


def in_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous view, in a storage that ends where the view ends.

    The tensor keeps the memory. The safetensors library treats tensors that share a storage as tied, and `torch.save`
    writes whole storages.
    """
    user = view.detach()  # a further tensor, which `storage_users` of the memory counts until the returned one is gone
    try:
        alone: Tensor = torch.from_dlpack(torch.utils.dlpack.to_dlpack(user))  # type: ignore[attr-defined]
    except (BufferError, RuntimeError):  # torch has no DLPack for tensors of this device: they share the storage
        return view
    return alone


def memory_of(flat: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, to be read from or written to.

    The result is created from the address, since a storage with a view from `Tensor.numpy` can never be freed and
    refilled again.
    """
    if flat.numel() == 0:
        return memoryview(b"")
    array: Any = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    array.owner = flat  # the array lives as long as the view
    return memoryview(array).cast("B")
