"""Owns safetensors files: reads of ranges, and, for checkpoints, writes with checksums, and reads that verify them.

The safetensors library writes whole tensors and reads whole tensors or slices of dimensions. A shard is a range of the
flattened tensor, so this file implements the format itself: 8 bytes with the header's length, the header as JSON (name
-> dtype, shape, data_offsets; "__metadata__" -> strings), and the data, without gaps.
https://github.com/huggingface/safetensors#format

A file of a checkpoint ends with the checksums of its chunks, and its manifest has one checksum of the header and of these.
`read_verified` reads all chunks of a range. It verifies each chunk and then copies the requested elements, so it reads
less than two chunks beyond the range and needs memory for one chunk.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.display import Advance, ignore
from zeroshard.checkpoint.manifest import ANOTHER, CHECK_DISK, FileRecord, cannot_be_written
from zeroshard.core.storage.buffers import memory_of
from zeroshard.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_NBYTES = 8
"""The bytes at the start of a file that hold the length of its header."""
_LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_CONVERTED_NUMEL = 1 << 22
"""The maximum number of elements that are read at once, if they must be converted."""
CHUNK_NBYTES = 4 << 20
"""The number of bytes that one checksum (CRC-32) covers."""
_STAGE_NBYTES = 16 << 20
"""The bytes that are copied from an accelerator at once."""


@dataclass(frozen=True)
class HeaderEntry:
    """The entry of one tensor in a file; `offset` counts bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SafetensorsReader(AbstractContextManager["SafetensorsReader"]):
    """A safetensors file with its entries by name, open for reading. Close it or use it as a context manager.

    Raises:
        CheckpointError: the file is missing, truncated, or not a safetensors file. The message has the path and the
            cause.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with _reading(self.path):
            self._fd = os.open(self.path, os.O_RDONLY)
            try:
                self.entries = self._read_header()
            except BaseException:
                self.close()
                raise

    def _read_header(self) -> dict[str, HeaderEntry]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, _LENGTH_NBYTES, 0), "little")
        if size < _LENGTH_NBYTES or not 2 <= length <= min(_LONGEST_HEADER, size - _LENGTH_NBYTES):
            raise _broken(self.path, f"its header would be {length} bytes long, and the file has {size}")
        return entries_of(self.path, os.pread(self._fd, length, _LENGTH_NBYTES), size)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements [start, start + out.numel()) of a flattened tensor.

        Args:
            name: the tensor's name.
            start: its first element to read.
            out: the memory to read into: contiguous, of any shape, dtype and device.

        Raises:
            CheckpointError: the tensor has too few elements, or the file cannot be read.
        """
        entry = self.entries[name]
        if start < 0 or start + out.numel() > entry.numel:
            raise _broken(
                self.path, f"{name!r} has {entry.numel} elements, and [{start}, {start + out.numel()}) was requested"
            )
        flat = out.detach().view(-1)
        offset = entry.offset + start * entry.dtype.itemsize
        if flat.dtype == entry.dtype and flat.device.type == "cpu":  # without a copy
            _read_fully(self._fd, memory_of(flat), offset, self.path)
            return
        chunk = torch.empty(min(_CONVERTED_NUMEL, flat.numel()), dtype=entry.dtype)
        for part in flat.split(_CONVERTED_NUMEL):
            values = chunk[: part.numel()]
            _read_fully(self._fd, memory_of(values), offset, self.path)
            part.copy_(values)
            offset += values.nbytes

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __exit__(self, *_: object) -> None:
        self.close()


def entries_of(path: Path, text: bytes, size: int) -> dict[str, HeaderEntry]:
    """Return the entries of a file of `size` bytes, by name, from its header's text, or raise a `CheckpointError`."""
    covered = _LENGTH_NBYTES + len(text)
    try:
        header: Any = json.loads(text)
        if not isinstance(header.pop("__metadata__", {}), dict):
            raise TypeError("its __metadata__ is not a dict")
        entries: dict[str, HeaderEntry] = {}
        for name, described in header.items():
            start, stop = described["data_offsets"]
            shape = tuple(described["shape"])
            if described["dtype"] not in _DTYPES:
                raise ValueError(f"the dtype {described['dtype']!r} of {name!r} is unknown")
            if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
                raise ValueError(f"the shape or the offsets of {name!r} are not natural numbers")
            entries[name] = HeaderEntry(_DTYPES[described["dtype"]], shape, covered + start)
            if stop - start != entries[name].nbytes:
                raise ValueError(f"{name!r} has {stop - start} bytes, and its shape needs {entries[name].nbytes}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _broken(path, f"its header is damaged ({error})") from None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != covered:
            raise _broken(path, f"the data of {name!r} does not follow the data before it")
        covered += entry.nbytes
    if covered != size:
        raise _broken(path, f"it has {size} bytes, and its header describes {covered}")
    return entries


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a complete safetensors file: {what}. Copy it again, or save it again.")


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes before the data of a file that holds these tensors, one after another."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


# ---------------------------------------------------------------------- files of checkpoints, with checksums

TABLE = "checksums"
"""The last tensor of a file: the CRC-32 of each chunk before it, as bytes, in little-endian order."""
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Contents:
    """A file's verified tables: the CRC-32 of each chunk before byte `nbytes`, and the file's tensors by name."""

    nbytes: int
    checksums: Sequence[int]
    entries: Mapping[str, HeaderEntry] = field(
        default_factory=dict
    )  # empty for versions 1 and 2, whose manifest has them


def contents_of(folder: Path, record: FileRecord) -> Contents:
    """Read and verify the tables of a file: its header, and its checksums.

    Raises:
        CheckpointError: the file is missing, unreadable, altered, or of a different size.
    """
    if record.checksums is not None:
        return Contents(record.nbytes, record.checksums)
    path = folder / record.name
    with _opened(path, record) as descriptor:
        nbytes = _nbytes_before_table(record.nbytes)
        first = _read(path, descriptor, 0, _LENGTH_NBYTES)
        stop = min(_LENGTH_NBYTES + min(int.from_bytes(first, "little"), _LONGEST_HEADER), nbytes)
        head = _read(path, descriptor, 0, stop)
        table = _read(path, descriptor, nbytes, record.nbytes)
    if zlib.crc32(table, zlib.crc32(head)) != record.checksum:
        raise CheckpointError(
            f"{path} is damaged: its bytes 0 to {stop} (header) and {nbytes} to {record.nbytes} (checksums) have a wrong "
            f"checksum. {ANOTHER}"
        )
    entries = entries_of(path, head[_LENGTH_NBYTES:], record.nbytes)
    for name, entry in entries.items():
        if entry.offset % entry.dtype.itemsize:  # an element could be in two chunks
            raise _broken(path, f"{name!r} does not begin at a multiple of its elements' size")
    return Contents(nbytes, [one for (one,) in _CRC.iter_unpack(table)], entries)


def _nbytes_before_table(nbytes: int) -> int:
    """Return the bytes before the table of checksums, in a file of `nbytes` bytes."""
    return max(nbytes - -(-nbytes // (CHUNK_NBYTES + _CRC.size)) * _CRC.size, 0)


def _read(path: Path, descriptor: int, start: int, stop: int) -> bytes:
    data = bytearray(max(stop - start, 0))
    _read_fully(descriptor, memoryview(data), start, path)
    return bytes(data)


@dataclass(frozen=True)
class Source:
    """A tensor to be written. It needs to be in memory only inside `opened()`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    opened: Callable[[], AbstractContextManager[Tensor]]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """Create a source from a tensor that is in memory."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: nullcontext(tensor))


@dataclass(frozen=True)
class ReadRequest:
    """A request to read elements of one file, in equal rows."""

    file: int  # its number in the manifest
    offset: int  # of the first element, in bytes from the start of the file
    dtype: torch.dtype  # in the file
    out: Tensor  # the memory to read into, [rows, n], of any dtype and device
    stride: int  # elements of the file between the starts of two rows, at least n

    @property
    def stop(self) -> int:
        rows, numel = self.out.shape
        return self.offset + ((rows - 1) * self.stride + numel) * self.dtype.itemsize

    def take(self, chunk: Tensor, start: int) -> int:
        """Copy the requested elements of a chunk that starts at byte `start`. Return the number of bytes copied."""
        size = self.dtype.itemsize
        low = max(self.offset, start)
        high = min(self.stop, start + chunk.numel())
        values = chunk[low - start : high - start].view(self.dtype)
        first, last = (low - self.offset) // size, (high - self.offset) // size
        taken = 0
        rows, numel = self.out.shape
        row = first // self.stride
        while row < rows and row * self.stride < last:
            begin = row * self.stride
            begins = max(first - begin, 0)
            ends = min(last - begin, numel)
            count = 1
            if ends - begins == numel:  # copy all whole rows at once; a row on an edge of the chunk is copied alone
                count = min((last - begin - numel) // self.stride + 1, rows - row)
            if begins < ends:
                place = values.storage_offset() + begin + begins - first
                part = values.as_strided((count, ends - begins), (self.stride, 1), place)
                self.out[row : row + count, begins:ends].copy_(part)
                taken += part.numel()
            row += count
        return taken * size


class _ChecksummedFile:
    def __init__(self, path: Path, advance: Advance) -> None:
        self._file = path.open("xb", buffering=1 << 20)
        self._advance = advance
        self.nbytes = 0
        self.checksums: list[int] = []  # of all chunks; the last one may still grow

    def write_table(self) -> bytes:
        """Write the checksums of everything before."""
        table = b"".join(map(_CRC.pack, self.checksums))
        self._file.write(table)
        self.nbytes += len(table)
        return table

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while view:
            if self.nbytes % CHUNK_NBYTES == 0:
                self.checksums.append(0)
            part = view[: CHUNK_NBYTES - self.nbytes % CHUNK_NBYTES]
            self._file.write(part)
            self.checksums[-1] = zlib.crc32(part, self.checksums[-1])
            self.nbytes += len(part)
            view = view[len(part) :]
            self._advance(len(part))

    def close(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_file(
    path: Path, sources: Mapping[str, Source], metadata: Mapping[str, str], advance: Advance
) -> tuple[FileRecord, dict[str, int]]:
    """Write a safetensors file, one source at a time, then its checksums, and flush it. If a write fails, no file is left.

    `metadata` has strings for the header. `advance` is called with the number of bytes written.

    Returns:
        The file's record, and the offset of each tensor in the file, in bytes.

    Raises:
        CheckpointError: the file cannot be written. The message has the path and the cause.
    """
    # Wide dtypes first: then every element is at a multiple of its size, and in one chunk.
    names = sorted(sources, key=lambda name: -sources[name].dtype.itemsize)
    offsets: dict[str, int] = {}
    try:
        with closing(_ChecksummedFile(path, advance)) as file:
            head = _header_with_table({name: (sources[name].dtype, sources[name].shape) for name in names}, metadata)
            file.write(head)
            for name in names:
                offsets[name] = file.nbytes
                with sources[name].opened() as tensor:
                    for part in tensor.detach().contiguous().view(-1).split(_STAGE_NBYTES // tensor.itemsize):
                        file.write(memory_of(part.cpu()))
            table = file.write_table()
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise CheckpointError(cannot_be_written(path, error)) from error
    return FileRecord(name=path.name, nbytes=file.nbytes, checksum=zlib.crc32(table, zlib.crc32(head))), offsets


def _header_with_table(tensors: dict[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors and, at its end, the checksums of the header and of the tensors."""
    data = sum(dtype.itemsize * prod(shape) for dtype, shape in tensors.values())
    chunks = 0
    while True:  # the header counts its own chunks
        head = header({**tensors, TABLE: (torch.uint8, [chunks * _CRC.size])}, metadata)
        needed = -(-(len(head) + data) // CHUNK_NBYTES)
        if needed == chunks:
            return head
        chunks = needed


def read_verified(
    folder: Path, record: FileRecord, contents: Contents, requests: Iterable[ReadRequest], advance: Advance
) -> int:
    """Read elements of one file and verify every chunk that contains them. Return the number of bytes read.

    `advance` is called with the number of requested bytes that were read.

    Raises:
        CheckpointError: the file is missing, unreadable, altered, or of a different size.
    """
    by_chunk: dict[int, list[ReadRequest]] = defaultdict(list)
    for request in requests:
        if request.stop > contents.nbytes:
            raise CheckpointError(f"{folder / record.name} lacks bytes that its manifest names. {ANOTHER}")
        for number in range(request.offset // CHUNK_NBYTES, -(-request.stop // CHUNK_NBYTES)):
            by_chunk[number].append(request)
    read = 0
    for number, chunk in _verified_chunks(folder / record.name, record, contents, sorted(by_chunk)):
        read += chunk.numel()
        for request in by_chunk[number]:
            advance(request.take(chunk, number * CHUNK_NBYTES))
    return read


def damage_of(folder: Path, record: FileRecord, *, verify: bool = True, advance: Advance = ignore) -> str | None:
    """Return a description of the damage to a file, or None if it is intact. Without `verify`, only its size is checked."""
    path = folder / record.name
    try:
        if not verify:
            with _opened(path, record):
                return None
        contents = contents_of(folder, record)
        for _, chunk in _verified_chunks(path, record, contents, range(len(contents.checksums))):
            advance(chunk.numel())
    except CheckpointError as error:
        return str(error)
    return None


def _verified_chunks(
    path: Path, record: FileRecord, contents: Contents, numbers: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """Check a file's size. Yield (number, bytes) of each chunk once its checksum is verified. All chunks share one buffer.

    Raises:
        CheckpointError: as `read_verified`.
    """
    with _opened(path, record) as descriptor:
        buffer = torch.empty(CHUNK_NBYTES, dtype=torch.uint8)
        for number in numbers:
            start = number * CHUNK_NBYTES
            chunk = buffer[: min(CHUNK_NBYTES, contents.nbytes - start)]
            memory = memory_of(chunk)
            _read_fully(descriptor, memory, start, path)
            if zlib.crc32(memory) != contents.checksums[number]:
                raise CheckpointError(
                    f"{path} is damaged: its bytes {start} to {start + len(memory)} have a wrong checksum. {ANOTHER}"
                )
            yield number, chunk


@contextmanager
def _opened(path: Path, record: FileRecord) -> Iterator[int]:
    """Open a file for reading and check its size. Yield its descriptor."""
    with _reading(path):
        descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if size != record.nbytes:
            raise CheckpointError(
                f"{path} has {size} bytes, not {record.nbytes}: it was truncated or replaced. {ANOTHER}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an error from opening a file, or reading its header, into a `CheckpointError` that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {CHECK_DISK}") from None
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not a valid file name: {error}. Name another file.") from None


def _read_fully(descriptor: int, memory: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(descriptor, [memory[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read at byte {offset + done}: {error.strerror}. {CHECK_DISK}"
            ) from error
        if count == 0:
            raise CheckpointError(f"{path} ends at byte {offset + done}: it was truncated while it was read. {ANOTHER}")
        done += count
