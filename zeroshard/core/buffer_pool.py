"""Owns the transient communication buffers: few, reused for ever, never a new allocation a step. Called by bucket."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Hands out 1-D scratch tensors and takes them back.

    It holds at most as many buffers as were ever out at once, each as large as the largest request: when none of the
    free ones is large enough, one of them makes room for the new one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self._out: dict[int, Tensor] = {}

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor of `numel` elements with undefined content. Give it back with `release`."""
        nbytes = numel * dtype.itemsize
        fitting = [buffer for buffer in self._free if buffer.numel() >= nbytes]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._drop(buffer)
        else:
            if self._free:
                self._drop(max(self._free, key=Tensor.numel))
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        scratch = buffer[:nbytes].view(dtype)
        self._out[id(scratch)] = buffer
        return scratch

    def release(self, scratch: Tensor) -> None:
        """Take back what `acquire` gave."""
        self._free.append(self._out.pop(id(scratch)))

    def _drop(self, buffer: Tensor) -> None:
        self._free = [other for other in self._free if other is not buffer]

    @property
    def nbytes(self) -> int:
        """Bytes of live storage, in use and waiting."""
        return sum(buffer.numel() for buffer in [*self._free, *self._out.values()])
