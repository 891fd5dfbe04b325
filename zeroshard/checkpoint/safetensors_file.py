"""Owns safetensors files, read and written range by range. Called by pretrained and by whatever saves or loads.

The safetensors library reads and writes whole tensors, or slices of their first dimension; a shard is a range of the flattened
tensor, so this file speaks the format itself: 8 bytes with the header's length, the header as JSON
(name -> dtype, shape, data_offsets; "__metadata__" -> strings), and the data, without gaps.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import CheckpointError
from zeroshard.storage.raw_memory import memory_of

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes
_CHUNK_NUMEL = 1 << 22
"""Elements that are read at once where they have to be converted."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file; `offset` counts bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class SafetensorsReader:
    """One file, open for reading. Close it, or use it as a context manager.

    Attributes:
        entries: the tensors by name.
        metadata: the strings that were saved with them.

    Raises:
        CheckpointError: the file is missing, cut short, or no safetensors file; says which and where.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from None
        try:
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
            raise self._broken(f"its header would be {length} bytes long, and the file has {size}")
        try:
            header: Any = json.loads(os.pread(self._fd, length, 8))
            metadata = {str(k): str(v) for k, v in header.pop("__metadata__", {}).items()}
            entries = {name: self._entry(name, told, 8 + length) for name, told in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self._broken(f"its header is damaged ({error})") from None
        covered = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if entry.offset != covered:
                raise self._broken(f"the data of {name!r} does not begin where that before it ends")
            covered += entry.nbytes
        if covered != size:
            raise self._broken(f"it has {size} bytes, and its header speaks of {covered}")
        return entries, metadata

    def _entry(self, name: str, told: Any, base: int) -> Entry:
        start, stop = told["data_offsets"]
        shape = tuple(told["shape"])
        if told["dtype"] not in _DTYPES:
            raise ValueError(f"the dtype {told['dtype']!r} of {name!r} is unknown")
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            raise ValueError(f"shape or offsets of {name!r} are no natural numbers")
        entry = Entry(_DTYPES[told["dtype"]], shape, base + start)
        if stop - start != entry.nbytes:
            raise ValueError(f"{name!r} has {stop - start} bytes, and its shape asks for {entry.nbytes}")
        return entry

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no whole safetensors file: {what}.")

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements [start, start + out.numel()) of a flattened tensor.

        Args:
            out: contiguous, of any dtype, on any device. On the CPU and of the file's dtype it is read into directly.
        """
        entry = self.entries[name]
        if start < 0 or start + out.numel() > entry.numel:
            raise self._broken(
                f"{name!r} has {entry.numel} elements, and [{start}, {start + out.numel()}) was asked for"
            )
        flat = out.detach().view(-1)
        if flat.dtype == entry.dtype and flat.device.type == "cpu":
            self._read(entry, start, flat)
            return
        chunk = torch.empty(min(_CHUNK_NUMEL, flat.numel()), dtype=entry.dtype)
        for low in range(0, flat.numel(), _CHUNK_NUMEL):
            part = chunk[: min(_CHUNK_NUMEL, flat.numel() - low)]
            self._read(entry, start + low, part)
            flat[low : low + part.numel()].copy_(part)

    def _read(self, entry: Entry, start: int, flat: Tensor) -> None:
        target = memory_of(flat)
        offset, done = entry.offset + start * entry.dtype.itemsize, 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {offset + done}: {error.strerror}."
                ) from None
            if count == 0:
                raise self._broken(f"it ends at byte {offset + done}")
            done += count

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data of a file that holds such tensors, one after another."""
    told: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * dtype.itemsize
        told[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text
