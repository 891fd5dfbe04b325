"""Owns a 1-D tensor whose storage can be given back and refilled while every view of it stays valid. Called by unit.

[Note: freed storage]
Autograd saves views of parameters. When a sharded unit is given back, the *storage* of its flat buffer shrinks to
nothing, and before the backward it is refilled at the same place: the saved views see the values again. Until then
nothing may read them: reading freed storage is a segmentation fault, not an error. So a parameter at rest does not look
at this storage at all but at a placeholder, see `unit.py`; and storage that somebody else looks at is not given back until
nobody does: a
view that a module returned, an alias that the user keeps, what autograd saved where no hook of ours saw it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


class FlatBuffer:
    """`numel` zeros of one dtype on one device. `label` is for warnings."""

    def __init__(self, label: str, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._label, self._is_borrowed = label, False
        self._own_uses: int | None = None
        self.tensor = torch.zeros(numel, dtype=dtype, device=device)
        self._nbytes = self.tensor.untyped_storage().nbytes()

    def view(self, start: int, shape: torch.Size) -> Tensor:
        """The elements from `start` on, in `shape`."""
        return self.tensor[start : start + shape.numel()].view(shape)

    def rows(self, start: int, numel: int, count: int) -> Tensor:
        """The elements from `start` on as a matrix of `count` rows."""
        return self.tensor[start : start + numel].view(count, numel // count)

    def free(self) -> None:
        """Give the storage back. See [Note: freed storage]."""
        storage = self.tensor.untyped_storage()
        uses = int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]
        if self._own_uses is None:  # nobody else has seen it yet
            self._own_uses = uses
        if uses > self._own_uses:
            return
        if storage.resizable():
            storage.resize_(0)
        elif not self._is_borrowed:
            self._is_borrowed = True
            warnings.warn(
                f"a numpy array was made of parameters of {self._label}: torch can free their memory no more, so they stay whole, "
                "and the array shows whatever comes there. Make arrays of copies: parameter.detach().clone().numpy().",
                stacklevel=2,
            )

    def allocate(self) -> None:
        """Take storage again; its content is undefined."""
        storage = self.tensor.untyped_storage()
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of live storage now."""
        return self.tensor.untyped_storage().nbytes()
