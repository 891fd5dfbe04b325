"""Owns the collectives of ranks that share a host: each rank reads the others' data in place, in memory that all of them map.

An operation takes two messages for each reader of a rank's data: the place of the data, and the report that it was read. Data
that a rank offers must be in its file (`buffer`); other data is copied there first. Offered data must not change before the
others have read it, so a wait for an operation is also a wait for its readers. There are two exceptions, whose owners wait when
they need to: rows of a reduction (`Reduction.wait_released`), and parameters that stay from step to step
(`all_gather(own=...)`, `wait_released`). Sums are computed in the order of ranks, so they are bit-identical to sums over gloo.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Done, SummedRows, Work, nothing
from zeroshard.collectives.grouped import CLOSED, Grouped
from zeroshard.collectives.meeting import Met, NotShared, meet
from zeroshard.collectives.members import Members
from zeroshard.collectives.neighbours import READ, Lost
from zeroshard.collectives.shared_file import SharedFile
from zeroshard.collectives.watch import Watch
from zeroshard.errors import CollectiveError, UsageError

_GATHER, _REDUCE, _EXCHANGE, _MOVE = range(4)
_SEQUENCE_BITS = 20
_OPERATION_SHIFT = 56
_OFFER = struct.Struct("<QQ")
_MESSAGE_NBYTES = 32 << 10
_PIECE_NBYTES = 4 << 20
"""The bytes of a long transfer that pass through the file at once."""


class Lent(NamedTuple):
    """The memory that this rank lets others of its host read in one operation."""

    tag: int
    label: str
    readers: set[int]
    """The ranks that have not read it."""
    tensor: Tensor
    offset: int
    """The offset of its first element in this rank's file, in bytes."""
    room: Tensor | None
    """The buffer with the copy, if the tensor is a copy; it will be reused."""

    @property
    def is_in_place(self) -> bool:
        """Whether a rank may still read the sender's own tensor, which must not change before that rank has read it."""
        return self.room is None and bool(self.readers)

    def was_read_by(self, reader: int) -> bool:
        """Return whether a rank has read it."""
        return reader not in self.readers


class Lending:
    """The memory that this rank lends, until all have read it: tensors in its file, and copies of other tensors."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._lent: dict[int, Lent] = {}
        """The memory that is lent now, by tag."""
        self._rooms: list[Tensor] = []
        """Free buffers for copies, as bytes."""

    def lend(self, tensor: Tensor, tag: int, readers: Iterable[int], label: str) -> Lent:
        """Keep a contiguous tensor until these ranks have read it. If it is not in the file, keep a copy that is."""
        offset = self._file.offset_of(tensor) if tensor.numel() else 0
        room = None
        if offset is None:
            room = self._room(tensor.nbytes)
            tensor = room[: tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            offset = self._file.offset_of(tensor)
            assert offset is not None
        lent = Lent(tag, label, set(readers), tensor, offset, room)
        self._lent[tag] = lent
        return lent

    def _room(self, nbytes: int) -> Tensor:
        self._rooms.sort(key=Tensor.numel)
        for number, room in enumerate(self._rooms):
            if room.numel() >= nbytes:
                return self._rooms.pop(number)
        if self._rooms:  # all are too small: free the largest
            self._rooms.pop()
        return self._file.empty(nbytes, torch.uint8)

    @property
    def copies_nbytes(self) -> int:
        """The bytes of memory for copies, in use and free."""
        used = [lent.room for lent in self._lent.values() if lent.room is not None]
        return sum(room.numel() for room in [*used, *self._rooms])

    def was_read(self, tag: int, reader: int) -> None:
        """Record that a rank has read the memory that is lent under a tag."""
        lent = self._lent.get(tag)
        if lent is None:
            return
        lent.readers.discard(reader)
        if not lent.readers:
            del self._lent[tag]
            if lent.room is not None:
                self._rooms.append(lent.room)

    def in_place(self) -> list[Lent]:
        """Return all memory that others may still read in place."""
        return [lent for lent in self._lent.values() if lent.is_in_place]

    def clear(self) -> None:
        """Forget the readers, whose messages can no longer arrive."""
        for lent in self._lent.values():
            lent.readers.clear()
        self._lent.clear()
        self._rooms.clear()


class SharedMemory(Grouped):
    """A transport through shared memory (see the module's docstring).

    Raises:
        NotShared: these ranks cannot share memory.
    """

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__(members, device, watch)
        self._process = os.getpid()
        met = self._made(lambda: meet(members))
        self._met: Met | None = met
        # If these are dropped without `close`, data that others have not read yet stays.
        weakref.finalize(self, met.file.close).atexit = False
        self._lending = Lending(met.file)
        met.neighbours.was_read = self._lending.was_read
        self._sequence: Counter[int] = Counter()
        self._unread: weakref.WeakKeyDictionary[SharedGather, Tensor] = weakref.WeakKeyDictionary()
        """The gathers of rows at rest, and this rank's row."""
        self.on_failure = [met.neighbours.tell_failure]

    @property
    def _here(self) -> Met:
        if self._met is None:
            raise UsageError(CLOSED)
        if os.getpid() != self._process:  # it would take the messages that are for its parent
            raise UsageError(
                "a forked process used a model that its parent trains: only ranks can use it. Pass it a copy of the "
                "values, or make the call in the parent."
            )
        return self._met

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._here.file.empty(numel, dtype)

    resting_memory = buffer

    def is_lent_by_system(self, tensor: Tensor) -> bool:
        return self._met is not None and self._met.file.offset_of(tensor) is not None

    sends_in_place = is_lent_by_system

    def numel_in_flight(self, units: Sequence[int]) -> int:
        return super().numel_in_flight(units) // 2  # nothing progresses during computation

    def control(self) -> Collectives:
        # Existing connections report a dead rank at once; for new ones there is only the timeout.
        self.exchange(b"\0", "connections for small messages")
        try:
            return SharedMemory(self.members, torch.device("cpu"), self.watch)
        except NotShared as error:
            raise CollectiveError(
                f"the ranks have no connections for small messages: {error}. It was permitted when the model was "
                "sharded: look for a limit of memory, descriptors or files that was set since."
            ) from error

    def discard(self, memory: Tensor) -> None:
        for lent in self._lending.in_place():
            self.wait_read(lent)
        self._here.file.discard(memory)

    @property
    def buffers_nbytes(self) -> int:
        return self._lending.copies_nbytes

    def close(self) -> None:
        if self._met is not None:
            self._met.neighbours.close()
            self._met.file.close()
            for window in self._met.windows.values():
                window.close()
        self._met = None
        self._lending.clear()
        super().close()

    # ------------------------------------------------------------------ memory that is lent

    def tag(self, bucket: int, kind: int) -> int:
        """Return the next tag of an operation on a bucket, the same on every rank."""
        channel = bucket * 4 + kind
        self._sequence[channel] += 1
        number = channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)
        return self.watch.operation_code << _OPERATION_SHIFT | number

    def lend(self, tensor: Tensor, tag: int, readers: Iterable[int], label: str) -> Lent:
        """Let these ranks read a contiguous tensor. If the result `is_in_place`, call `wait_read` before writing to the tensor."""
        neighbours = self._here.neighbours
        lent = self._lending.lend(tensor, tag, readers, label)
        for peer in sorted(lent.readers):
            with self.guarded(label, peer):
                if not neighbours.send_if_there(peer, tag, _OFFER.pack(lent.offset, tensor.nbytes)):
                    self._lending.was_read(tag, peer)
        return lent

    def wait_read(self, lent: Lent) -> None:
        """Block until all peers have read the lent memory."""
        label = f"the readers of {lent.label}"
        for peer in sorted(lent.readers):  # while one is waited for, others end
            with self.guarded(label, peer):
                self._here.neighbours.block(peer, partial(lent.was_read_by, peer), label)

    def wait_released(self, memory: Tensor | None = None) -> None:
        # Other ranks may be waiting in the same way for this rank to read their data.
        for gather, own in [*self._unread.items()]:
            if memory is None or _overlap(own, memory):
                gather.read_early()
        for lent in self._lending.in_place():
            # Not the rows of reductions: a peer may read those only after this rank's next operation.
            is_gather = lent.tag >> _SEQUENCE_BITS & 3 == _GATHER
            if is_gather and (memory is None or _overlap(lent.tensor, memory)):
                self.wait_read(lent)

    def lent_by(self, peer: int, tag: int, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Wait until a rank lends this many elements, and return them. They must be read, and not written, before `release`."""
        expected = numel * dtype.itemsize
        with self.guarded(label, peer):
            offset, nbytes = _OFFER.unpack(self._here.neighbours.receive(peer, tag, label))
            if nbytes != expected:
                raise RuntimeError(f"rank {peer} offers {nbytes} bytes, but this rank expects {expected}")
        return self._here.windows[peer].view(offset, numel, dtype)

    def release(self, peer: int, tag: int, label: str) -> None:
        """Report to a rank, which may have ended, that the memory that it lent was read."""
        with self.guarded(label, peer), suppress(Lost):
            self._here.neighbours.send(peer, tag | READ)

    # ------------------------------------------------------------------ operations

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        # The others read this rank's stored values, so the rows need no memory before they are waited for.
        if own is None:
            prepare()
            prepare = nothing
        offered = rows[self.rank] if own is None else own
        self.sent["all_gather"] += offered.nbytes * len(self.peers)
        lent = self.lend(offered, self.tag(bucket, _GATHER), self.peers, label)
        gather = SharedGather(self, lent, rows, own, prepare)
        if own is not None:
            self._unread[gather] = own
        return gather

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> SummedRows:
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.peers)
        return SharedRows(self, self.lend(rows, self.tag(bucket, _REDUCE), self.peers, label), rows, divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        label = f"a broadcast of rank {self.members.ranks[source]}"
        self._move(tensor, source, [peer for peer in range(self.world_size) if peer != source], "broadcast", label)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        if source != target:
            self._move(tensor, source, [target], "transfer", label)
        return Done()

    def _move(self, tensor: Tensor, source: int, targets: Sequence[int], kind: str, label: str) -> None:
        """Copy one rank's tensor to others, piece by piece, and wait until it has arrived."""
        if tensor.numel() == 0 or (self.rank != source and self.rank not in targets):
            return
        # Ranks that take no part in a transfer do not count it, so a broadcast has a channel of its own.
        channel = source * self.world_size + (targets[0] if kind == "transfer" else source)
        if self.rank == source:
            self.sent[kind] += tensor.nbytes
        flat = tensor.detach().reshape(-1)
        last = None
        for piece in flat.split(max(_PIECE_NBYTES // flat.dtype.itemsize, 1)):
            tag = self.tag(channel, _MOVE)
            if self.rank == source:
                lent = self.lend(piece, tag, targets, label)
                if last is not None:  # so that at most two pieces are in the file
                    self.wait_read(last)
                last = lent
            else:
                with self.measure(kind):
                    found = self.lent_by(source, tag, piece.numel(), piece.dtype, label)
                piece.copy_(found)
                self.release(source, tag, label)
        if last is not None:
            self.wait_read(last)
        if self.rank != source and not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        tag = self.tag(0, _EXCHANGE)
        self.sent["exchange"] += len(data) * len(self.peers)
        pieces = [data[at : at + _MESSAGE_NBYTES] for at in range(0, max(len(data), 1), _MESSAGE_NBYTES)]
        for peer in self.peers:
            with self.guarded(label, peer):
                for piece in pieces:
                    self._here.neighbours.send(peer, tag, piece)
        found = {self.rank: data}
        for peer in self.peers:
            with self.guarded(label, peer), self.measure("exchange"):
                found[peer] = b"".join(self._here.neighbours.receive(peer, tag, label) for _ in pieces)
                if len(found[peer]) != len(data):
                    raise RuntimeError(f"rank {peer} sent {len(found[peer])} bytes, but this rank expects {len(data)}")
        return [found[rank] for rank in range(self.world_size)]


# ---------------------------------------------------------------- operations in flight


@dataclass(eq=False)
class SharedGather(Work):
    """An all-gather that copies each row from its owner's memory."""

    _collectives: SharedMemory
    _lent: Lent
    _rows: Tensor
    _own: Tensor | None
    _prepare: Callable[[], None]
    _failed: CollectiveError | None = None

    def __post_init__(self) -> None:
        self._early: dict[int, Tensor] = {}
        self._left = list(self._collectives.peers)

    def wait(self) -> None:
        if self._failed is not None:  # the missing data has not arrived since then
            raise self._failed
        try:
            prepare = self._prepare
            self._prepare = nothing
            prepare()
            with self._collectives.measure("gather"):
                self._read(wanted=True)
                if self._own is None and self._lent.is_in_place:
                    self._collectives.wait_read(self._lent)
        except CollectiveError as error:
            self._failed = error
            raise

    push = wait

    def abandon(self) -> None:
        with suppress(CollectiveError):
            self._read(wanted=False)

    def read_early(self) -> None:
        """Copy the other ranks' rows to separate memory now. `wait` copies them to `rows`, which may have no memory yet."""
        for peer in self._left:
            if peer not in self._early:
                self._early[peer] = self._row(peer).clone()
                self._collectives.release(peer, self._lent.tag, self._lent.label)

    def _row(self, peer: int) -> Tensor:
        """Wait for a rank's row, in that rank's memory. This rank's `rows` need a shape for this, but no memory."""
        rows = self._rows
        return self._collectives.lent_by(peer, self._lent.tag, rows.shape[1], rows.dtype, self._lent.label)

    def _read(self, *, wanted: bool) -> None:
        while self._left:
            peer = self._left[0]
            early = self._early.pop(peer, None)
            found = self._row(peer) if early is None else early
            if wanted:
                self._rows[peer].copy_(found)
            if early is None:
                self._collectives.release(peer, self._lent.tag, self._lent.label)
            del self._left[0]


@dataclass(eq=False)
class SharedRows(SummedRows):
    """Rows that are read in place. The others read this rank's rows, or a copy, in its file."""

    _collectives: SharedMemory
    _lent: Lent
    _rows: Tensor
    divisor: float

    @property
    def is_released(self) -> bool:
        return not self._lent.is_in_place

    def wait_released(self) -> None:
        self._collectives.wait_read(self._lent)

    def rows(self) -> list[Tensor]:
        collectives = self._collectives
        own = self._rows
        found = {collectives.rank: own[collectives.rank]}
        with collectives.measure("reduce"):
            for peer in collectives.peers:
                lent = collectives.lent_by(peer, self._lent.tag, own.numel(), own.dtype, self._lent.label)
                found[peer] = lent.view(own.shape)[collectives.rank]
        return [found[rank] for rank in range(collectives.world_size)]

    def release(self) -> None:
        for peer in self._collectives.peers:
            self._collectives.release(peer, self._lent.tag, self._lent.label)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
