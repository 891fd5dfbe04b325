"""Owns model states on disk, and the few buffers in CPU memory that transfers use."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import suppress
from typing import final

import torch
from torch import Tensor

from zeroshard.errors import PolicyError, StorageError
from zeroshard.policy import Offload
from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.direct_file import BlockFile, DirectFile
from zeroshard.storage.transfers import CPU, LANDED, Copies, Transfer, aligned_bytes


class Staging:
    """A pool of at most `count` buffers of at most `nbytes` in CPU memory, made when they are first needed.

    They hold whole blocks, so that the parts of a slot that is larger begin where blocks do.
    """

    def __init__(self, count: int, nbytes: int, block_nbytes: int, *, pin: bool) -> None:
        self._left = count
        self._pin = pin
        self.nbytes = -(-nbytes // block_nbytes) * block_nbytes
        self._free: deque[tuple[Tensor, Transfer]] = deque()
        self._readers: deque[DiskSlot] = deque()  # slots that hold a buffer with values that a read will need
        self.taken = 0
        """Bytes of all buffers that were made."""

    def take(self) -> Tensor:
        """Take a buffer: a free one, or one whose content another slot has read ahead."""
        if not self._free and not self._left:
            self._readers[0].forget_prefetched()
        return self._take()

    def try_to_take(self, reader: DiskSlot) -> Tensor | None:
        """Take a buffer for `reader` to read ahead, if one is free."""
        if not self._free and not self._left:
            return None
        self._readers.append(reader)
        return self._take()

    def _take(self) -> Tensor:
        if self._free:
            buffer, after = self._free.popleft()
            with suppress(StorageError):  # the slot raises it
                after.wait(CPU)
            return buffer
        self._left -= 1
        self.taken += self.nbytes
        return self._make()

    def _make(self) -> Tensor:
        return aligned_bytes(self.nbytes, pin=self._pin)

    def release(self, buffer: Tensor, after: Transfer = LANDED, reader: DiskSlot | None = None) -> None:
        """Take a buffer back; it is used again once `after` is over."""
        if reader is not None:
            self._readers.remove(reader)
        self._free.append((buffer, after))


def disk_file(offload: Offload, device: torch.device) -> DirectFile:
    """Open a file without a name in `offload.path`, for states that `device` computes with.

    Raises:
        StorageError: the folder is missing or cannot be written to.
    """
    if offload.path is None:
        raise PolicyError("states are to go to disk, and no folder is named: pass Offload(path=...).")
    return DirectFile(offload.path, offload.block_nbytes, offload.requests, device)


@final
class DiskStorage(Storage):
    """A storage in one file, without a name.

    Args:
        file: the file for the data.
        copies: to and from the accelerator.
        staging: the buffers for data that comes from an accelerator, goes there, or is read ahead.
    """

    def __init__(self, file: BlockFile, copies: Copies, staging: Staging) -> None:
        self.file = file
        self.device = CPU
        self.copies = copies
        self.staging = staging

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        return DiskSlot(self, label, numel, dtype)

    def close(self) -> None:
        self.file.close()

    @property
    def nbytes(self) -> int:
        return self.file.nbytes


@final
class DiskSlot(Slot):
    """A range of the file. It reads as zeros until it is written."""

    def __init__(self, storage: DiskStorage, label: str, numel: int, dtype: torch.dtype) -> None:
        super().__init__(label, numel, dtype)
        self._storage = storage
        self._start = storage.file.allocate(self.nbytes, label)
        self._writing: list[Transfer] = []
        self._reading: list[Transfer] = []
        """Read into memory of a caller that waits later: a write in between would mix old and new values."""
        weakref.finalize(self, _release, storage.file, self._start, self.nbytes, self._writing)
        self._is_written = False
        self._prefetched: tuple[Tensor, Transfer] | None = None

    def memory_in(self, storage: Storage) -> Tensor | None:
        return None

    def prefetch(self) -> None:
        staging = self._storage.staging
        is_arriving = not all(writing.is_done for writing in self._writing)
        if self._prefetched is not None or is_arriving or not self._is_written or self.nbytes > staging.nbytes:
            return
        buffer = staging.try_to_take(self)
        if buffer is not None:
            content = buffer[: self.nbytes]
            self._prefetched = buffer, self._storage.file.read(self._start, content, self.label)

    def forget_prefetched(self) -> None:
        """Give the buffer back unused."""
        if self._prefetched is not None:
            (buffer, reading), self._prefetched = self._prefetched, None
            self._storage.staging.release(buffer, reading, self)

    def read(self, out: Tensor) -> Transfer:
        self.wait()
        if not self._is_written:
            out.zero_()
            return LANDED
        if self._prefetched is not None:
            (buffer, reading), self._prefetched = self._prefetched, None
            copying: Transfer = reading
            try:
                reading.wait(CPU)
                copying = self._storage.copies.copy(out, buffer[: self.nbytes].view(self.dtype))
            finally:
                self._storage.staging.release(buffer, copying, self)
            return copying
        if out.device.type == "cpu":
            direct = self._storage.file.read(self._start, out, self.label)
            self._reading = [*(other for other in self._reading if not other.is_done), direct]
            return direct
        return self._read_through_buffers(out)

    def _read_through_buffers(self, out: Tensor) -> Transfer:
        copying: Transfer = LANDED
        for low, high in self._parts():
            buffer = self._storage.staging.take()
            content = buffer[: (high - low) * self.dtype.itemsize]
            self._storage.file.read(self._start + low * self.dtype.itemsize, content, self.label).wait(CPU)
            copying = self._storage.copies.copy(out[low:high], content.view(self.dtype))
            self._storage.staging.release(buffer, copying)
        return copying

    def write(self, source: Tensor) -> Transfer:
        self.version += 1
        self.forget_prefetched()
        self.wait()
        self._wait_readers()
        self._is_written = True
        if source.device.type == "cpu" and source.dtype == self.dtype:
            self._writing.append(self._storage.file.write(self._start, source, self.label))
            return self._writing[0]
        copying: Transfer = LANDED
        for low, high in self._parts():
            buffer = self._storage.staging.take()
            content = buffer[: (high - low) * self.dtype.itemsize]
            copying = self._storage.copies.copy(content.view(self.dtype), source[low:high])
            writing = self._storage.file.write(self._start + low * self.dtype.itemsize, content, self.label, copying)
            self._storage.staging.release(buffer, writing)
            self._writing.append(writing)
        return copying

    def _parts(self) -> list[tuple[int, int]]:
        """Return ranges of elements that fit into a buffer each."""
        step = self._storage.staging.nbytes // self.dtype.itemsize
        return [(low, min(low + step, self.numel)) for low in range(0, self.numel, step)]

    def _wait_readers(self) -> None:
        reading = self._reading
        self._reading = []
        for requests in reading:
            with suppress(StorageError):  # which the caller that needs it gets
                requests.wait(CPU)

    def wait(self, device: torch.device = CPU) -> None:
        writing = list(self._writing)
        self._writing.clear()
        for requests in writing:
            requests.wait(CPU)


def _release(file: BlockFile, start: int, nbytes: int, writing: list[Transfer]) -> None:
    """Release the range of a deleted slot, once nothing writes to it any longer."""
    for requests in writing:
        with suppress(StorageError):
            requests.wait(CPU)
    file.release(start, nbytes)
