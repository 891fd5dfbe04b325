"""Owns the transient communication buffers: few, reused for ever, never a new allocation a step. Called by bucket and storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from zeroshard.errors import StorageError
from zeroshard.storage.transfers import LANDED, Transfer, aligned_bytes


class BufferPool:
    """Hands out 1-D scratch tensors and takes them back.

    It holds at most as many buffers as were ever out at once, each as large as the largest request: when none of the
    free ones is large enough, one of them makes room for the new one.

    Args:
        shareable: makes memory of a CPU's, from which other ranks may be able to read; default: ordinary memory.
    """

    def __init__(self, device: torch.device, shareable: Callable[[int, torch.dtype], Tensor] | None = None) -> None:
        self._device, self._shareable = device, shareable
        self._free: list[tuple[Tensor, Transfer]] = []
        self._out: dict[int, Tensor] = {}

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of `numel` elements with undefined content. Give it back with `release`."""
        nbytes = numel * dtype.itemsize
        fitting = [entry for entry in self._free if entry[0].numel() >= nbytes]
        if fitting:
            entry = min(fitting, key=lambda entry: (not entry[1].is_done, entry[0].numel()))
            buffer, after = entry
            self._drop(entry)
            with suppress(StorageError):  # which is told where the values were to rest
                after.wait(self._device)
        else:
            if self._free:
                self._drop(max(self._free, key=lambda entry: entry[0].numel()))
            buffer = self._make(nbytes)
        scratch = buffer[:nbytes].view(dtype)
        self._out[id(scratch)] = buffer
        return scratch

    def release(self, scratch: Tensor, after: Transfer | None = None) -> None:
        """Take back what `acquire` gave; it is used again once `after` is over."""
        self._free.append((self._out.pop(id(scratch)), after or LANDED))

    def clear(self) -> None:
        """Give back what is not out."""
        self._free.clear()

    def _make(self, nbytes: int) -> Tensor:
        if self._device.type == "cpu":
            if self._shareable is not None:
                return self._shareable(nbytes, torch.uint8)
            return aligned_bytes(nbytes, pin=False)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _drop(self, entry: tuple[Tensor, Transfer]) -> None:
        self._free = [other for other in self._free if other is not entry]

    @property
    def nbytes(self) -> int:
        """Bytes of live storage, in use and waiting."""
        return sum(buffer.numel() for buffer in [*(buffer for buffer, _ in self._free), *self._out.values()])
