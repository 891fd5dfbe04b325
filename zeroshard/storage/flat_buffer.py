"""Owns 1-D tensors whose memory can be given back and taken again while every view of them stays valid. Called by unit and slots.

[Note: freed storage]
Autograd saves views of parameters. When a sharded unit is given back, the *memory* of its flat buffer goes, and before the backward
it comes again at the same place: the saved views see the values again. Until then nothing may read them: reading
freed memory is a segmentation fault, not an error. So a parameter at rest does not look
at this memory at all but at a placeholder, see `unit.py`; and memory that somebody else looks at is not given back until
nobody does: a
view that a module returned, an alias that the user keeps, what autograd saved where no hook of ours saw it.

Where memory is a device's, or small, its storage shrinks to nothing and grows again. Memory of a CPU that is not small stays at its
addresses and loses its pages, see pages.py: torch's way would have the kernel make each page anew.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import StorageError
from zeroshard.storage.pages import Arena, Pages, Range


class FlatBuffer(ABC):
    """`tensor` [numel], whole until it is given back. `label` is for warnings and errors."""

    def __init__(self, label: str, tensor: Tensor) -> None:
        self.label, self.tensor = label, tensor
        self._own_uses: int | None = None

    def view(self, start: int, shape: torch.Size) -> Tensor:
        """The elements from `start` on, in `shape`."""
        return self.tensor[start : start + shape.numel()].view(shape)

    def rows(self, start: int, numel: int, count: int) -> Tensor:
        """The elements from `start` on as a matrix of `count` rows."""
        return self.tensor[start : start + numel].view(count, numel // count)

    @property
    def _uses(self) -> int:
        return int(torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]

    @final
    def free(self) -> None:
        """Give the memory back, if nobody else looks at it. See [Note: freed storage]."""
        if self._own_uses is None:  # nobody else has seen it yet
            self._own_uses = self._uses
        if self.nbytes and self._uses <= self._own_uses:
            self._give_back()

    @final
    def allocate(self) -> None:
        """Take memory again; its content is undefined.

        Raises:
            StorageError: there is none.
        """
        if not self.nbytes:
            self._take()
            self._own_uses = self._uses

    @abstractmethod
    def _give_back(self) -> None: ...

    @abstractmethod
    def _take(self) -> None: ...

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of live memory now."""


@final
class ResizedBuffer(FlatBuffer):
    """Memory of torch's own."""

    def __init__(self, label: str, tensor: Tensor) -> None:
        super().__init__(label, tensor)
        self._nbytes, self._is_borrowed = tensor.untyped_storage().nbytes(), False
        self._taken_on = self._stream

    def _give_back(self) -> None:
        storage = self.tensor.untyped_storage()
        if storage.resizable():
            if (stream := self._stream) != self._taken_on:
                self.tensor.record_stream(stream)  # which may read it still; the memory goes back to the other's pool
            storage.resize_(0)
        elif not self._is_borrowed:
            self._is_borrowed = True
            warnings.warn(
                f"a numpy array was made of {self.label}: torch can free their memory no more, so they stay whole, "
                "and the array shows whatever comes there. Make arrays of copies: parameter.detach().clone().numpy().",
                stacklevel=2,
            )

    def _take(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)
        self._taken_on = self._stream

    @property
    def _stream(self) -> Any:
        """The current one, where memory belongs to one."""
        device = self.tensor.device
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


@final
class PagedBuffer(FlatBuffer):
    """Zeros in CPU memory whose pages go to the next buffer.

    Raises:
        OSError: there are no addresses.
        StorageError: there is no memory.
    """

    def __init__(self, label: str, numel: int, dtype: torch.dtype, pages: Pages) -> None:
        self._pages, self._nbytes, self._is_here = pages, numel * dtype.itemsize, False
        self._range = Range(pages, self._nbytes)
        super().__init__(label, self._range.tensor(0, numel, dtype))
        self._all = self._range.pieces(0, self._nbytes)
        self._take()
        self.tensor.zero_()

    def __del__(self) -> None:
        if self._is_here:
            self._pages.hold(-self._nbytes)

    def _give_back(self) -> None:
        self._is_here = False
        self._pages.hold(-self._nbytes)
        self._range.empty(self._all)

    def _take(self) -> None:
        try:
            self._range.fill(self._all)
        except OSError as error:
            raise _no_memory(self.label, self._nbytes, error) from error
        self._is_here = True
        self._pages.hold(self._nbytes)
        self._pages.trim()

    @property
    def nbytes(self) -> int:
        return self._nbytes if self._is_here else 0


@final
class ArenaBuffer(FlatBuffer):
    """A part of an arena in CPU memory, which shares pages with its neighbours. It begins without memory."""

    def __init__(self, label: str, numel: int, dtype: torch.dtype, arena: Arena) -> None:
        self._nbytes, self._is_here = numel * dtype.itemsize, False
        self._part = arena.part(self._nbytes)
        super().__init__(label, self._part.tensor(numel, dtype))

    def _give_back(self) -> None:
        self._is_here = False
        self._part.empty()

    def _take(self) -> None:
        try:
            self._part.fill()
        except OSError as error:
            raise _no_memory(self.label, self._nbytes, error) from error
        self._is_here = True

    @property
    def nbytes(self) -> int:
        return self._nbytes if self._is_here else 0


@final
class ShareableBuffer(FlatBuffer):
    """Memory that other ranks read: all of what `Collectives.shareable` gave, as bytes.

    Args:
        emptied: addresses of those that have no memory now; kept up to date.
    """

    def __init__(self, label: str, tensor: Tensor, collectives: Collectives, emptied: set[int]) -> None:
        super().__init__(label, tensor)
        self._collectives, self._emptied = collectives, emptied

    def _give_back(self) -> None:
        self._collectives.discard(self.tensor)
        self._emptied.add(self.tensor.data_ptr())

    def _take(self) -> None:
        self._emptied.discard(self.tensor.data_ptr())

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor.data_ptr() in self._emptied else self.tensor.nbytes


def _no_memory(label: str, nbytes: int, error: OSError) -> StorageError:
    return StorageError(f"no memory for {label} ({nbytes:,} bytes): {error}.")
