"""Owns the bytes of a checkpoint's files: written once, with checksums; read by ranges, verified. Called by saving, loading.

A range is read as the chunks that it lies in: each is verified as a whole, and its elements go to where they are wanted. So what is
read beyond the range is less than two chunks, and what is held is one.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.checkpoint.safetensors_file import header
from zeroshard.errors import CheckpointError
from zeroshard.observe.display import Advance, ignore
from zeroshard.storage.raw_memory import memory_of

CHUNK_NBYTES = 4 << 20
"""Bytes with one checksum (CRC-32)."""
_STAGE_NBYTES = 16 << 20
"""Bytes that are copied from an accelerator at once."""


@dataclass(frozen=True)
class Written:
    """A file that is whole: its size, the checksum of each chunk, and where each tensor begins, in bytes."""

    nbytes: int
    checksums: list[int]
    offsets: dict[str, int]


@dataclass(frozen=True)
class Task:
    """Elements of one file that go to `out` (1-D, of any dtype, on any device)."""

    offset: int
    """Where they begin, in bytes from the start of the file."""
    dtype: torch.dtype
    """What they are in the file."""
    out: Tensor

    @property
    def stop(self) -> int:
        return self.offset + self.out.numel() * self.dtype.itemsize


class Source(Protocol):
    """A tensor that is to be written, and need not be in memory before."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def opened(self) -> AbstractContextManager[Tensor]:
        """Inside, it is in memory."""
        ...


@dataclass(frozen=True)
class Lying:
    """A source that is in memory."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def opened(self) -> AbstractContextManager[Tensor]:
        """The tensor itself."""
        return nullcontext(self.tensor)


class _ChecksummedFile:
    def __init__(self, path: Path, advance: Advance) -> None:
        self._file, self._advance = path.open("xb", buffering=1 << 20), advance
        self._checksum = 0
        self.nbytes, self.checksums = 0, list[int]()

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            part = view[: CHUNK_NBYTES - self.nbytes % CHUNK_NBYTES]
            self._file.write(part)
            self._checksum = zlib.crc32(part, self._checksum)
            self.nbytes += len(part)
            if self.nbytes % CHUNK_NBYTES == 0:
                self.checksums.append(self._checksum)
                self._checksum = 0
            view = view[len(part) :]
            self._advance(len(part))

    def close(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        if self.nbytes % CHUNK_NBYTES:
            self.checksums.append(self._checksum)


def write_file(
    path: Path, tensors: Mapping[str, Source], metadata: Mapping[str, str], advance: Advance = ignore
) -> Written:
    """Write a safetensors file and flush it to the disk. The tensors are written from where they lie, one opened at a time.

    Args:
        advance: hears of bytes as they are written.

    Raises:
        CheckpointError: names the file and the cause; what was written of it is removed.
    """
    # Wide dtypes first: then every element lies at a multiple of its size, and in one chunk.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    told = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
    offsets: dict[str, int] = {}
    try:
        file = _ChecksummedFile(path, advance)
        try:
            file.write(header(told, metadata))
            for name in names:
                offsets[name] = file.nbytes
                with tensors[name].opened() as tensor:
                    for part in _on_cpu(tensor.detach().contiguous().view(-1)):
                        file.write(memory_of(part))
        finally:
            file.close()
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error
    return Written(file.nbytes, file.checksums, offsets)


def _on_cpu(flat: Tensor) -> Iterable[Tensor]:
    if flat.device.type == "cpu":
        yield flat
        return
    step = max(_STAGE_NBYTES // flat.dtype.itemsize, 1)
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu()


def read_tasks(
    path: Path, nbytes: int, checksums: Sequence[int], tasks: Iterable[Task], advance: Advance = ignore
) -> int:
    """Read elements of one file and verify every chunk that they lie in. Returns the bytes that were read.

    Args:
        advance: hears of the bytes of tasks that are carried out.

    Raises:
        CheckpointError: the file is missing, of another size, unreadable, or altered; names it and where.
    """
    by_chunk: dict[int, list[Task]] = defaultdict(list)
    for task in tasks:
        for number in range(task.offset // CHUNK_NBYTES, -(-task.stop // CHUNK_NBYTES)):
            by_chunk[number].append(task)
    if not by_chunk:
        return 0
    buffer = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
    memory, read = memory_of(buffer), 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != nbytes:
            raise CheckpointError(f"{path} has {size} bytes, and its checkpoint says {nbytes}: it was cut or replaced.")
        for number in sorted(by_chunk):
            start = number * CHUNK_NBYTES
            length = min(CHUNK_NBYTES, nbytes - start)
            _read_fully(descriptor, memory[:length], start, path)
            if zlib.crc32(memory[:length]) != checksums[number]:
                raise CheckpointError(
                    f"{path} is damaged: its bytes {start} to {start + length} have another checksum."
                )
            read += length
            for task in by_chunk[number]:
                advance(_scatter(task, buffer, start, length))
    finally:
        os.close(descriptor)
    return read


def is_whole(path: Path, nbytes: int, checksums: Sequence[int]) -> bool:
    """Whether all of a file is there, and as it was written."""
    chunk = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
    starts = range(0, nbytes, CHUNK_NBYTES)
    tasks = [Task(start, torch.uint8, chunk[: min(CHUNK_NBYTES, nbytes - start)]) for start in starts]
    try:
        read_tasks(path, nbytes, checksums, tasks)
    except CheckpointError:
        return False
    return True


def _read_fully(descriptor: int, memory: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(descriptor, [memory[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read at byte {offset + done}: {error.strerror}.") from error
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {offset + done}: it was cut while it was read.")
        done += count


def _scatter(task: Task, buffer: Tensor, start: int, length: int) -> int:
    """Copy a task's part of one chunk; returns its bytes in the file."""
    low, high = max(task.offset, start), min(task.stop, start + length)
    size = task.dtype.itemsize
    values = buffer[low - start : high - start].view(task.dtype)
    task.out[(low - task.offset) // size : (high - task.offset) // size].copy_(values)
    return high - low
