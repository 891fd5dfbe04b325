"""Owns the interface of a storage: a place where flat tensors rest, read and written asynchronously.

    slot = storage.slot("master weights of h.0", numel, torch.float32)
    slot.write(source)                     starts; the source stays as it is until the transfer is over
    slot.read(out).wait(out.device)        into any tensor of that many elements, wherever that lies
    slot.memory_in(storage)                the content itself, where it is memory of that storage

Nobody but `Storages` knows which of the three storages a slot is of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.storage.buffers import BufferPool, FlatBuffer
from zeroshard.storage.transfers import CPU, Copies, InFlight, Transfer, aligned_bytes


class Slot(ABC):
    """`numel` elements of one dtype that rest in a storage. `label` is for errors."""

    def __init__(self, label: str, numel: int, dtype: torch.dtype) -> None:
        self.label = label
        self.numel = numel
        self.dtype = dtype
        self.version = 0
        """Counts writes: what was read at an earlier one is stale."""

    @property
    def nbytes(self) -> int:
        """The bytes of the content."""
        return self.numel * self.dtype.itemsize

    @abstractmethod
    def memory_in(self, storage: Storage) -> Tensor | None:
        """The content itself, [numel], where it is memory of `storage`: to be used in place, after `wait`.

        Where the slot `is_empty`, nobody may read or write there.
        """

    @abstractmethod
    def read(self, out: Tensor) -> Transfer:
        """Start to copy the content into `out` [numel], of the slot's dtype, on any device. Memory is rounded to other dtypes."""

    @abstractmethod
    def write(self, source: Tensor) -> Transfer:
        """Start to replace the content by `source` [numel], of any dtype, on any device. A read after it sees it."""

    def before_write(self) -> None:
        """The content in `memory_in` is about to change: block until nobody else reads it."""
        return

    @abstractmethod
    def prefetch(self) -> None:
        """The next `read` is near: make it quick, if that costs no other."""

    @abstractmethod
    def wait(self, device: torch.device = CPU) -> None:
        """Make `device` do what comes from now on after every write that was started. A CPU blocks, and raises what went wrong."""

    # ------------------------------------------------------------------ content that is not always wanted

    @property
    def is_empty(self) -> bool:
        """Whether there is no content, and nothing is kept for it."""
        return False

    @property
    def buffer(self) -> FlatBuffer | None:
        """Its memory, where that can be given back while the slot stays."""
        return None

    def empty(self) -> None:
        """The content is not wanted any longer. Where its memory can be given back, that is done, and a `read` raises until
        the next `write` or `fill`; views of it stay valid, and look at nothing meanwhile. What somebody else looks at stays."""
        return

    def fill(self) -> None:
        """The end of `empty`, with undefined content."""
        return

    def refuse_empty(self) -> None:
        """Raise where there is no content."""
        if self.is_empty:
            raise UsageError(
                f"{self.label} are not there: ask for them between the last backward of a step and zero_grad()."
            )

    @contextmanager
    def borrowed(
        self, storage: Storage, pool: BufferPool, *, read: bool = True, write: bool = False
    ) -> Iterator[Tensor]:
        """The content as memory of `storage`: in place, or in scratch from `pool`.

        Args:
            read: what is there is wanted; else the tensor's content is undefined.
            write: what the tensor holds on leaving becomes the content.
        """
        memory = self.memory_in(storage)
        if read:
            self.refuse_empty()
        else:
            self.fill()
        if memory is not None:
            if write:
                self.before_write()
            yield memory
            self.version += write
            return
        scratch = pool.acquire(self.numel, self.dtype)
        after: Transfer | None = None
        try:
            if read:
                self.read(scratch).wait(scratch.device)
            yield scratch
            if write:
                after = self.write(scratch)
        finally:
            pool.release(scratch, after)


class Storage(ABC):
    """A place where model states rest. What rests here is computed with on `device`."""

    device: torch.device
    pin = False
    """Its CPU memory is pinned."""

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of `device` [numel] with undefined content, of which direct I/O takes any page."""
        if self.device.type == "cpu":
            return aligned_bytes(numel * dtype.itemsize, pin=self.pin).view(dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    @abstractmethod
    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        """Space for `numel` elements.

        Raises:
            StorageError: there is no space; names the place.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back. What was in flight is waited for."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes at rest."""


class MemoryStorage(Storage):
    """A storage that is memory: values go with their tensors, and `_nbytes` counts them."""

    _nbytes: int

    def close(self) -> None:
        return

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @abstractmethod
    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        """A slot for memory that is there, and may be a part of that of another."""


class DeviceStorage(MemoryStorage):
    """The memory of the device that computes."""

    @abstractmethod
    def taking(self, label: str, memory: Tensor, before_write: Callable[[], None]) -> Slot:
        """A slot in memory that was made for it."""

    @abstractmethod
    def transient_slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        """A slot whose memory is given back while it has no content, see `Slot.empty`."""

    @abstractmethod
    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype, *, comes_and_goes: bool) -> FlatBuffer:
        """Zeros [numel], whose memory can be given back; one that `comes_and_goes` often does it at little cost."""

    def park_at_most(self, nbytes: int) -> None:
        """Memory that flat buffers gave back waits for the next, as long as both together are at most so much."""
        return

    @property
    def parked_nbytes(self) -> int:
        """The number of bytes that wait in this way."""
        return 0

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more was free whenever this process took the most: for what is quicker, and can be done without.

        False where nothing is copied between the device and CPU memory.
        """
        return False


@final
class MemorySlot(Slot):
    """`memory` [numel] of `storage`.

    Args:
        whole: a slot of which the memory is a part: what is on its way to or from one concerns the other, and so do readers.
        before_write: called before the content changes, but not for what is done to `memory_in`.
        buffer: of the memory, where it can be given back.
    """

    def __init__(
        self, label: str, memory: Tensor, storage: Storage, copies: Copies, whole: MemorySlot | None = None,
        before_write: Callable[[], None] = lambda: None, buffer: FlatBuffer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(label, memory.numel(), memory.dtype)
        self._memory = memory
        self._storage = storage
        self._copies = copies
        self._buffer = buffer
        self._before_write: Callable[[], None] = before_write if whole is None else whole._before_write
        self._in_flight: InFlight = InFlight() if whole is None else whole._in_flight
        self._writes: InFlight = InFlight() if whole is None else whole._writes
        self._is_empty = buffer is not None and not buffer.nbytes

    def memory_in(self, storage: Storage) -> Tensor | None:
        return self._memory if storage is self._storage else None

    @property
    def is_empty(self) -> bool:
        return self._is_empty

    @property
    def buffer(self) -> FlatBuffer | None:
        return self._buffer

    def empty(self) -> None:
        if self._buffer is not None:
            if self._memory.device.type != "cpu":
                # no test can miss this wait: whoever reads gradients waits for the copy before the step ends. Without it, memory
                # that a late copy still reads would go to its next user.
                self._in_flight.wait(self._memory.device)
            self._buffer.free()
            self._is_empty = True

    def fill(self) -> None:
        if self._buffer is not None:
            self._buffer.allocate()
            self._is_empty = False

    def read(self, out: Tensor) -> Transfer:
        self.refuse_empty()
        if out.dtype != self.dtype and self._memory.device.type == "cpu":
            self._writes.wait(CPU)  # the host casts, and would not wait for a copy of the device's
        return self._in_flight.add(self._copies.copy(out, self._memory, self._in_flight))

    def write(self, source: Tensor) -> Transfer:
        self.version += 1
        self.before_write()
        self.fill()
        written = self._in_flight.add(self._copies.copy(self._memory, source, self._in_flight))
        self._writes.add(written)
        if self._memory.device.type != "cpu":
            written.wait(self._memory.device)  # whatever the accelerator does next may look at it
        return written

    def before_write(self) -> None:
        self._before_write()

    def prefetch(self) -> None:
        return

    def wait(self, device: torch.device = CPU) -> None:
        self._in_flight.wait(device)
