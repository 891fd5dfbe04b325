"""Owns model states on disk: the files of a rank, and the reads ahead from them.

Threads read and write blocks of a file, with checksums. They bypass the page cache where they can. A file is unlinked before it
is used, so the operating system frees it however this process ends, and no other job can open it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from zeroshard.core.storage.base import Slot, Storage
from zeroshard.core.storage.buffers import memory_of
from zeroshard.core.storage.transfers import CPU, LANDED, Copies, Staging, Transfer, in_pages
from zeroshard.core.transport.watch import make_current
from zeroshard.errors import StorageError
from zeroshard.policy import PAGE_NBYTES

BOUNCE_NBYTES = 1 << 20
"""The number of bytes that are copied at once if direct I/O cannot use the memory itself."""


class Requests(Transfer):
    """One transfer's block reads or writes."""

    def __init__(self, futures: Sequence[Future[None]]) -> None:
        self._futures = futures

    def wait(self, device: torch.device) -> None:
        """Block until all are over, for any device: the CPU reads and writes files. Raise the `StorageError` of a failed one."""
        wait_for_all(self._futures)  # after an error too: the others still use the caller's memory
        try:
            for future in self._futures:
                future.result()
        except StorageError:
            self.has_raised = True
            raise

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self._futures)


class DirectFile:
    """A file without a name (see the module's docstring).

    Args:
        folder: the file's folder, which must exist.
        block_nbytes: the bytes of one request, with one checksum (CRC-32); a multiple of the page size.
        requests: the maximum number of requests under way at once.
        device: the device from which written data may still be on its way.
    """

    def __init__(
        self, folder: str | os.PathLike[str], block_nbytes: int, requests: int, device: torch.device = CPU
    ) -> None:
        self.folder = Path(folder)
        self._block_nbytes = block_nbytes
        self._bounce_nbytes = min(block_nbytes, BOUNCE_NBYTES)
        self.buffers_nbytes = requests * self._bounce_nbytes
        """The maximum bytes of CPU memory for data that does not begin and end at page boundaries."""
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0, prefix="zeroshard-")  # noqa: SIM115
        except OSError as error:
            raise StorageError(
                f"{self.folder}, where model states are to rest, cannot hold a file: {error.strerror}. Name a folder "
                "that exists and is writable (in a config, nvme_path)."
            ) from error
        self._descriptor = self._file.fileno()
        self.is_direct = self._go_direct()
        self._nbytes = 0
        self._released: dict[int, list[int]] = {}
        self._checksums: dict[int, int] = {}
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(
            requests, thread_name_prefix="zeroshard disk", initializer=make_current, initargs=(device,)
        )

    def _go_direct(self) -> bool:
        """Bypass the page cache, if the file system allows it. Return whether it does."""
        flag = getattr(os, "O_DIRECT", 0)
        before = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, before | flag)
            os.pwritev(self._descriptor, [mmap.mmap(-1, PAGE_NBYTES)], 0)
        except OSError as error:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, before)
            if error.errno != errno.EINVAL:
                raise StorageError(
                    f"{self.folder} cannot be written to: {error.strerror}. Name another folder (in a config, "
                    "nvme_path)."
                ) from error
            return False
        return bool(flag)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the file that are in use."""
        return self._nbytes - sum(nbytes * len(starts) for nbytes, starts in self._released.items())

    def allocate(self, nbytes: int, label: str) -> int:
        """Reserve space on the disk, if the file system can, so that no step runs out of it. Return its offset in bytes."""
        start = self._nbytes
        nbytes = in_pages(nbytes)
        if self._released.get(nbytes):
            return self._released[nbytes].pop()
        try:
            os.posix_fallocate(self._descriptor, start, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise StorageError(
                    f"{self.folder} has no room for {label} ({nbytes:,} bytes, after {start:,} in use): "
                    f"{error.strerror}. Make room, or name another folder."
                ) from error
        self._nbytes += nbytes
        return start

    def release(self, start: int, nbytes: int) -> None:
        """Release a range that `allocate` returned, for a later call with as many pages."""
        self._released.setdefault(in_pages(nbytes), []).append(start)

    def write(self, start: int, flat: Tensor, label: str, after: Transfer = LANDED) -> Transfer:
        """Start to write a contiguous CPU tensor at `start`, once `after` is over."""
        return self._start(self._write, start, flat, label, after)

    def read(self, start: int, flat: Tensor, label: str) -> Transfer:
        """Start to fill a contiguous CPU tensor from `start` and verify the checksums of its blocks."""
        return self._start(self._read, start, flat, label, LANDED)

    def _start(self, work: Any, start: int, flat: Tensor, label: str, after: Transfer) -> Requests:
        data = np.frombuffer(memory_of(flat), dtype=np.uint8)
        step = self._block_nbytes
        return Requests(
            [
                self._threads.submit(work, start + low, data[low : low + step], label, after)
                for low in range(0, len(data), step)
            ]
        )

    def _write(self, start: int, data: Any, label: str, after: Transfer) -> None:
        after.wait(CPU)
        self._checksums[start] = zlib.crc32(data)
        for low, part, pages in self._in_pages(data):
            if pages is not part:
                np.copyto(pages[: len(part)], part)
            self._transfer(os.pwritev, start + low, pages, len(part), label)

    def _read(self, start: int, data: Any, label: str, after: Transfer) -> None:
        for low, part, pages in self._in_pages(data):
            self._transfer(os.preadv, start + low, pages, len(part), label)
            if pages is not part:
                np.copyto(part, pages[: len(part)])
        if zlib.crc32(data) != self._checksums.get(start):
            raise StorageError(
                f"the file for {label} in {self.folder} does not match its checksum: bytes {start:,} to {start + len(data):,} have "
                "changed. The disk is failing, or another program writes to it. Resume from the last checkpoint."
            )

    def _in_pages(self, data: Any) -> Iterator[tuple[int, Any, Any]]:
        """Yield (offset in `data`, the part there, memory to transfer). The memory is the part, or a buffer of aligned pages."""
        whole = len(data)
        if self.is_direct:
            whole = 0 if data.ctypes.data % PAGE_NBYTES else len(data) // PAGE_NBYTES * PAGE_NBYTES
        if whole:
            yield 0, data[:whole], data[:whole]
        if whole < len(data) and not hasattr(self._own, "pages"):
            self._own.pages = np.frombuffer(mmap.mmap(-1, self._bounce_nbytes), dtype=np.uint8)
        for low in range(whole, len(data), self._bounce_nbytes):
            part = data[low : low + self._bounce_nbytes]
            yield low, part, self._own.pages[: in_pages(len(part))]

    def _transfer(self, call: Any, start: int, pages: Any, wanted: int, label: str) -> None:
        """Repeat the system call until `wanted` bytes of `pages` are transferred. The rest of the last page does not count."""
        done = 0
        while done < wanted:
            try:
                count = call(self._descriptor, [pages[done:]], start + done)
            except OSError as error:
                raise StorageError(
                    f"the file for {label} in {self.folder} cannot be {'written' if call is os.pwritev else 'read'} at "
                    f"byte {start + done:,}: {error.strerror}. Resume from the last checkpoint."
                ) from error
            if count == 0:
                raise StorageError(
                    f"the file for {label} in {self.folder} ends at byte {start + done:,}, too early: it was truncated. "
                    "Resume from the last checkpoint."
                )
            done += count

    def close(self) -> None:
        """Wait for transfers under way and give the disk its space back."""
        self._threads.shutdown()
        self._file.close()


@final
class DiskStorage(Storage):
    """A storage in one unnamed file."""

    def __init__(self, file: DirectFile, copies: Copies, staging: Staging) -> None:
        self.file = file
        self.device = CPU
        self.copies = copies
        self.staging = staging
        """The buffers for data that comes from an accelerator, goes there, or is read ahead. They hold whole blocks of the file,
        so that the parts of a larger slot begin at the start of a block."""
        self.ahead: dict[DiskSlot, tuple[Tensor, Transfer]] = {}
        """The buffer for content that is read ahead, and the read that fills it, by slot."""

    def take_buffer(self) -> Tensor:
        """Take a staging buffer. If none is left, drop the content that was read ahead first."""
        if not self.staging.has_buffer:
            next(iter(self.ahead)).forget_prefetched()
        return self.staging.take()

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
        """Reads into memory of a caller that waits later: a write in between would mix old and new values."""
        weakref.finalize(self, _release, storage.file, self._start, self.nbytes, self._writing)
        self._is_written = False

    def memory_in(self, storage: Storage) -> Tensor | None:
        return None

    def prefetch(self) -> None:
        storage = self._storage
        staging = storage.staging
        is_arriving = not all(writing.is_done for writing in self._writing)
        fits = 0 < self.nbytes <= staging.buffer_nbytes
        if self in storage.ahead or is_arriving or not self._is_written or not fits:
            return
        if staging.has_buffer:
            buffer = staging.take()
            storage.ahead[self] = buffer, storage.file.read(self._start, buffer[: self.nbytes], self.label)

    def forget_prefetched(self) -> None:
        """Release the buffer of content that was read ahead, if there is one."""
        if self in self._storage.ahead:
            self._storage.staging.release(*self._storage.ahead.pop(self))

    def read(self, out: Tensor) -> Transfer:
        storage = self._storage
        self.wait()
        if not self._is_written:
            out.zero_()
            return LANDED
        if out.device.type == "cpu" and self not in storage.ahead:
            direct = storage.file.read(self._start, out, self.label)
            self._reading = [*(other for other in self._reading if not other.is_done), direct]
            return direct
        after: Transfer = LANDED
        for start, low, high in self._parts():
            if self in storage.ahead:  # the whole content
                buffer, after = storage.ahead.pop(self)
            else:
                buffer = storage.take_buffer()
                after = storage.file.read(start, buffer[: (high - low) * self.dtype.itemsize], self.label)
            try:
                after.wait(CPU)
                content = buffer[: (high - low) * self.dtype.itemsize].view(self.dtype)
                after = storage.copies.copy(out[low:high], content)
            finally:
                storage.staging.release(buffer, after)
        return after

    def write(self, source: Tensor) -> Transfer:
        storage = self._storage
        self.version += 1
        self.forget_prefetched()
        self.wait()
        for requests in self._reading:
            with suppress(StorageError):  # the caller that needs the data gets the error
                requests.wait(CPU)
        self._reading = []
        self._is_written = True
        if source.device.type == "cpu" and source.dtype == self.dtype:
            self._writing.append(storage.file.write(self._start, source, self.label))
            return self._writing[0]
        copying: Transfer = LANDED
        for start, low, high in self._parts():
            buffer = storage.take_buffer()
            content = buffer[: (high - low) * self.dtype.itemsize]
            copying = storage.copies.copy(content.view(self.dtype), source[low:high])
            writing = storage.file.write(start, content, self.label, copying)
            storage.staging.release(buffer, writing)
            self._writing.append(writing)
        return copying

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start in the file, first element, end) of parts that each fit into a buffer."""
        step = self._storage.staging.buffer_nbytes // self.dtype.itemsize
        for low in range(0, self.numel, step):
            yield self._start + low * self.dtype.itemsize, low, min(low + step, self.numel)

    def wait(self, device: torch.device = CPU) -> None:
        failed = None
        while self._writing:
            requests = self._writing[0]
            try:
                requests.wait(CPU)
            except StorageError as error:
                failed = failed or error
            self._writing.remove(requests)
        if failed is not None:
            raise failed


def _release(file: DirectFile, start: int, nbytes: int, writing: list[Transfer]) -> None:
    """Release the range of a deleted slot, once nothing writes to it any longer."""
    for requests in writing:
        with suppress(StorageError):
            requests.wait(CPU)
    file.release(start, nbytes)
