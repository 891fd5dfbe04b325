"""Owns the interface of a storage, and the storages that are memory.

A storage is a place where flat tensors rest, read and written asynchronously:

    slot = storage.slot("master weights of h.0", numel, torch.float32)
    slot.write(source)                     starts; leave the source unchanged until the transfer is over
    slot.read(out).wait(out.device)        into any tensor of that many elements, in any place
    slot.memory_in(storage)                the content itself, if it is memory of that storage

Only `Storages` depends on the kinds of storages.

Pinned slots are cut from slabs, since torch rounds pinned memory up to a power of two. No pool or ring can lend slots, because a
slot keeps its memory as long as the storage exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from zeroshard.core.storage.buffers import BufferPool, FlatBuffer
from zeroshard.core.storage.transfers import CPU, Copies, InFlight, Transfer, aligned_bytes, in_pages
from zeroshard.errors import UsageError

FREE_SHARE = 1 / 16
"""The share of an accelerator's memory that optional scratch leaves free, for a longer sequence later."""

SLAB_NBYTES = 256 << 20
"""The minimum size of a slab of pinned memory."""
_LEFT = 1 / 16
"""The share of a slab, cut into slots of one size, that may be left over for smaller ones."""


class Slot(ABC):
    """A flat tensor in a storage: `numel` elements of one dtype. `label` is for errors."""

    def __init__(self, label: str, numel: int, dtype: torch.dtype) -> None:
        self.label = label
        self.numel = numel
        self.dtype = dtype
        self.version = 0
        """The number of writes: data that was read at an earlier number is stale."""

    @property
    def nbytes(self) -> int:
        """The number of bytes of the content."""
        return self.numel * self.dtype.itemsize

    @abstractmethod
    def memory_in(self, storage: Storage) -> Tensor | None:
        """Return the content itself, [numel], to use in place after `wait`; None if it is not memory of `storage`.

        While the slot `is_empty`, do not read or write there.
        """

    @abstractmethod
    def read(self, out: Tensor) -> Transfer:
        """Start to copy the content into `out` [numel], of the slot's dtype, on any device.

        A slot in memory also converts to other dtypes.
        """

    @abstractmethod
    def write(self, source: Tensor) -> Transfer:
        """Start to replace the content with `source` [numel], of any dtype, on any device. Later reads return this content."""

    def prefetch(self) -> None:
        """Prepare the `read` that comes next, if that delays no other transfer."""

    @abstractmethod
    def wait(self, device: torch.device = CPU) -> None:
        """Order the later work of `device` after every write that was started. A CPU blocks and raises a write's error."""

    # ------------------------------------------------------------------ content that is not always wanted

    is_empty = False
    """Whether the slot has no content, and no memory for it."""
    buffer: FlatBuffer | None = None
    """The memory under the slot, if it can be freed while the slot stays."""

    def empty(self) -> None:
        """Drop the content and free its memory, if the slot can take memory again. Other slots do nothing.

        A `read` then raises until the next `write` or `fill`. Views of the memory stay valid, but must not be read until
        then. Memory that other code uses stays.
        """

    def fill(self) -> None:
        """Take memory again after `empty`, with undefined content."""

    def refuse_empty(self) -> None:
        """Raise if there is no content."""
        if self.is_empty:
            raise UsageError(
                f"{self.label} are not there: ask for them between the last backward of a step and zero_grad()."
            )

    @contextmanager
    def borrowed(
        self, storage: Storage, pool: BufferPool, *, read: bool = True, write: bool = False
    ) -> Iterator[Tensor]:
        """Lend the content as memory of `storage`: in place, or in scratch from `pool`.

        Without `read`, its values are undefined. With `write`, they replace the content when the context ends.
        """
        memory = self.memory_in(storage)
        if read:
            self.refuse_empty()
        else:
            self.fill()
        if memory is not None:
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
    """A place where model states rest. `device` computes with them."""

    device: torch.device
    pin = False
    """Whether its CPU memory is pinned."""

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory of `device` [numel] with undefined content. CPU memory begins at a page boundary, for direct I/O."""
        if self.device.type == "cpu":
            return aligned_bytes(numel * dtype.itemsize, pin=self.pin).view(dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    @abstractmethod
    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        """Take space for `numel` elements. If the disk has no space, raise a StorageError that names the folder."""

    def close(self) -> None:
        """Wait for transfers in flight and release everything. Memory is freed with its tensors."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The number of bytes at rest."""


class MemoryStorage(Storage):
    """A storage whose slots are tensors in memory."""

    nbytes = 0

    def __init__(self, device: torch.device, copies: Copies) -> None:
        self.device = device
        self._copies = copies

    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        """Create a slot around existing memory, which may be a part of the memory of the slot `whole`."""
        assert whole is None or isinstance(whole, MemorySlot)
        return MemorySlot(label, memory, self, self._copies, whole)


@final
class MemorySlot(Slot):
    """A slot in memory: `memory` [numel] of `storage`.

    Args:
        whole: the slot of which this memory is a part. Transfers of one also count for the other.
    """

    def __init__(
        self, label: str, memory: Tensor, storage: Storage, copies: Copies, whole: MemorySlot | None = None,
        buffer: FlatBuffer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(label, memory.numel(), memory.dtype)
        self._memory = memory
        self._storage = storage
        self._copies = copies
        self.buffer = buffer
        self._in_flight: InFlight = InFlight() if whole is None else whole._in_flight
        self._writes: InFlight = InFlight() if whole is None else whole._writes
        self.is_empty = buffer is not None and not buffer.nbytes

    def memory_in(self, storage: Storage) -> Tensor | None:
        return self._memory if storage is self._storage else None

    def empty(self) -> None:
        if self.buffer is not None:
            if self._memory.device.type != "cpu":
                # no test needs this wait: every reader of gradients waits for the copy before the step ends. Without
                # it, memory that a late copy still reads would go to its next user.
                self._in_flight.wait(self._memory.device)
            self.buffer.free()
            self.is_empty = True

    def fill(self) -> None:
        if self.buffer is not None:
            self.buffer.allocate()
            self.is_empty = False

    def read(self, out: Tensor) -> Transfer:
        self.refuse_empty()
        if out.dtype != self.dtype and self._memory.device.type == "cpu":
            self._writes.wait(CPU)  # the CPU converts, and would not wait for a copy on a stream
        return self._in_flight.add(self._copies.copy(out, self._memory, self._in_flight))

    def write(self, source: Tensor) -> Transfer:
        self.version += 1
        self.fill()
        written = self._in_flight.add(self._copies.copy(self._memory, source, self._in_flight))
        self._writes.add(written)
        if self._memory.device.type != "cpu":
            written.wait(self._memory.device)  # the accelerator's next work may use it
        return written

    def wait(self, device: torch.device = CPU) -> None:
        self._in_flight.wait(device)


# ---------------------------------------------------------------------- the device that computes


class AcceleratorStorage(MemoryStorage):
    """The memory of the device that computes, which may be the CPU."""

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self.nbytes += numel * dtype.itemsize
        return self.around(label, torch.zeros(numel, dtype=dtype, device=self.device))

    def transient_slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        """Create a slot whose memory is freed while it has no content (see `Slot.empty`)."""
        self.nbytes += numel * dtype.itemsize
        # It lives until the slot is first emptied: the optimizer needs views, and torch makes none of a freed storage.
        buffer = self.flat_buffer(label, numel, dtype)
        return MemorySlot(label, buffer.tensor, self, self._copies, buffer=buffer)

    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype) -> FlatBuffer:
        """Create a buffer of zeros [numel]."""
        return FlatBuffer(label, torch.zeros(numel, dtype=dtype, device=self.device))

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more, and FREE_SHARE of an accelerator's memory, were free at this process's peak.

        Callers ask before they take optional scratch. On a CPU, the result is False.
        """
        if self.device.type == "cpu":
            return False
        free, total = torch.accelerator.get_memory_info(self.device)
        ours = free + torch.accelerator.memory_reserved(self.device)
        return nbytes + total * FREE_SHARE <= ours - torch.accelerator.max_memory_allocated(self.device)


# ---------------------------------------------------------------------- CPU memory beside an accelerator


@final
class CpuStorage(MemoryStorage):
    """CPU memory that is allocated once and kept; pinned if `pin` is True."""

    def __init__(self, copies: Copies, *, pin: bool) -> None:
        super().__init__(CPU, copies)
        self.pin = pin
        self._rests: list[Tensor] = []
        """The parts of slabs that no slot has taken."""

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        nbytes = numel * dtype.itemsize
        whole = in_pages(nbytes)
        fitting = [rest for rest in self._rests if rest.numel() >= whole]
        if not self.pin:
            slab = aligned_bytes(whole, pin=False)
        elif fitting:
            slab = min(fitting, key=Tensor.numel)
            self._rests = [rest for rest in self._rests if rest is not slab]
        else:
            slab = aligned_bytes(slab_nbytes(whole, self.nbytes), pin=True)
        if slab.numel() > whole:
            self._rests.append(slab[whole:])
        self.nbytes += nbytes
        return self.around(label, slab[:nbytes].view(dtype).zero_())


def slab_nbytes(nbytes: int, taken: int) -> int:
    """Return the size of a slab for a slot of `nbytes`, and others like it, if `taken` bytes were taken before.

    It is a power of two of which little is left over. Beyond the smallest possible size, it is at most `taken`, since further
    slots may never come.
    """
    sizes = [max(SLAB_NBYTES, 1 << (nbytes - 1).bit_length())]
    while sizes[-1] * 2 <= taken:
        sizes.append(sizes[-1] * 2)
    left = {size: size % nbytes / size for size in sizes}
    return next((size for size in sizes if left[size] <= _LEFT), min(sizes, key=left.__getitem__))
