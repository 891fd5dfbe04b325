"""Owns small messages that one rank collects from all, or sends to all, over a tree: a rank sends at most log2(W) of them.

    8 ranks, root 0         7 -> 6    6 -> 4    4 -> 0
                            5 -> 4    2 -> 0
                            3 -> 2
                            1 -> 0

Each rank merges the messages of the ranks below it into its own, and sends the result on. A sum therefore has the size of
one message on its whole way, and a list has the size of the ranks that it is about. Messages of one length, which all ranks need
merged, take the rounds of `rounds.py`.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.composed import Everyone
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.rounds import Merge
from zeroshard.core.transport.shared_memory import SharedMemory

FIRST_NBYTES = 256
"""The size of a first message: the length of the data, and its beginning. A short message needs no second one."""
_LENGTH_NBYTES = 8


def collect(control: Collectives, own: bytes, merge: Merge, label: str, root: int = 0) -> bytes | None:
    """Return every rank's message, merged, on rank `root`, and None on the others. Every rank must call it.

    `control` is the result of `Collectives.control`. A transport without separate messages between two ranks exchanges all.
    """
    if isinstance(control, Everyone):  # first the data-parallel ranks, then the ranks of the other dimension
        other, place = divmod(control._places[root], control._data.world_size)
        found = collect(control._data, own, merge, label, place)
        return None if found is None else collect(control._others, found, merge, label, other)
    if not isinstance(control, PointToPoint | SharedMemory):
        return _exchanged(control, own, merge, label, root)
    world_size = control.world_size
    number = (control.rank - root) % world_size
    distance = 1
    while distance < world_size:
        if number & distance:
            _send(control, own, (number - distance + root) % world_size, label)
            return None
        if number + distance < world_size:
            own = merge(own, _receive(control, (number + distance + root) % world_size, label))
        distance *= 2
    return own


def spread(control: Collectives, data: bytes | None, root: int = 0) -> bytes:
    """Return rank `root`'s data on every rank. Every rank must call it; the data of the others is ignored."""
    is_root = control.rank == root
    first = _first(data or b"") if is_root else torch.empty(FIRST_NBYTES, dtype=torch.uint8)
    control.broadcast(first, root)
    if is_root and data is not None and _rest_of(first):
        control.broadcast(_tensor(data[FIRST_NBYTES - _LENGTH_NBYTES :]), root)
    if is_root:
        return data or b""
    rest = torch.empty(_rest_of(first), dtype=torch.uint8)
    if rest.numel():
        control.broadcast(rest, root)
    return _joined(first, rest)


def _send(control: Collectives, data: bytes, target: int, label: str) -> None:
    first = _first(data)
    works = [control.transfer(first, control.rank, target, label)]
    if _rest_of(first):
        rest = _tensor(data[FIRST_NBYTES - _LENGTH_NBYTES :])
        works.append(control.transfer(rest, control.rank, target, label))
    for work in works:
        work.wait()


def _receive(control: Collectives, source: int, label: str) -> bytes:
    first = torch.empty(FIRST_NBYTES, dtype=torch.uint8)
    control.transfer(first, source, control.rank, label).wait()
    rest = torch.empty(_rest_of(first), dtype=torch.uint8)
    if rest.numel():
        control.transfer(rest, source, control.rank, label).wait()
    return _joined(first, rest)


def _exchanged(control: Collectives, own: bytes, merge: Merge, label: str, root: int) -> bytes | None:
    lengths = control.exchange(len(own).to_bytes(_LENGTH_NBYTES, "little"), f"the length of {label}")
    sizes = [int.from_bytes(length, "little") for length in lengths]
    messages = control.exchange(own.ljust(max(sizes), b"\0"), label)
    if control.rank != root:
        return None
    found = [message[:size] for message, size in zip(messages, sizes, strict=True)]
    return reduce(merge, found[root:] + found[:root])


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _first(data: bytes) -> Tensor:
    return _tensor(
        (len(data).to_bytes(_LENGTH_NBYTES, "little") + data[: FIRST_NBYTES - _LENGTH_NBYTES]).ljust(FIRST_NBYTES)
    )


def _length_of(first: Tensor) -> int:
    return int.from_bytes(first[:_LENGTH_NBYTES].numpy().tobytes(), "little")


def _rest_of(first: Tensor) -> int:
    return max(_length_of(first) - (FIRST_NBYTES - _LENGTH_NBYTES), 0)


def _joined(first: Tensor, rest: Tensor) -> bytes:
    data = first[_LENGTH_NBYTES:].numpy().tobytes() + rest.numpy().tobytes()
    return data[: _length_of(first)]
