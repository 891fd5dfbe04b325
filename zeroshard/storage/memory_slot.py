"""Owns a slot that is memory, of an accelerator or of the CPU. Called by the storages of those places."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch import Tensor

from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.flat_buffer import FlatBuffer
from zeroshard.storage.transfers import CPU, Copies, InFlight, Transfer


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
        self._memory, self._storage, self._copies, self._buffer = memory, storage, copies, buffer
        self._before_write: Callable[[], None] = before_write if whole is None else whole._before_write
        self._in_flight: InFlight = InFlight() if whole is None else whole._in_flight
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
            self._buffer.free()  # copies that are under way keep the memory until they are over
            self._is_empty = True

    def fill(self) -> None:
        if self._buffer is not None:
            self._buffer.allocate()
            self._is_empty = False

    def read(self, out: Tensor) -> Transfer:
        self.refuse_empty()
        return self._in_flight.add(self._copies.copy(out, self._memory, self._in_flight))

    def write(self, source: Tensor) -> Transfer:
        self.version += 1
        self.before_write()
        self.fill()
        written = self._in_flight.add(self._copies.copy(self._memory, source, self._in_flight))
        if self._memory.device.type != "cpu":
            written.wait(self._memory.device)  # whatever the accelerator does next may look at it
        return written

    def before_write(self) -> None:
        self._before_write()

    def prefetch(self) -> None:
        return

    def wait(self) -> None:
        self._in_flight.wait(CPU)
