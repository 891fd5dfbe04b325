"""Owns the collectives of ranks that share a host: each reads in place what the others hold in memory that all of them map.

An operation is two messages between each pair of ranks: the place of its data, and that it was read. Data that a rank
offers must be in its file (`buffer`); other data is copied there first. Until the others have read it, it must not
change: a wait for an operation is also a wait for its readers. There are two exceptions, whose owners wait when they
need to: rows of a reduction (`Reduction.wait_released`), and parameters that stay from step to step
(`all_gather(own=...)`, `wait_released`). Sums are made in the order of ranks, and have the bits that they have over
gloo.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Done, Reduction, Work, nothing, sum_into
from zeroshard.collectives.grouped import Grouped, Posted
from zeroshard.collectives.lending import Lending
from zeroshard.collectives.meeting import Met, NotShared, meet
from zeroshard.collectives.members import Members
from zeroshard.collectives.neighbours import Lost
from zeroshard.collectives.watch import Watch
from zeroshard.errors import CollectiveError, UsageError

_GATHER, _REDUCE, _EXCHANGE, _MOVE = range(4)
_SEQUENCE_BITS = 20
_OPERATION_SHIFT = 56
_OFFER = struct.Struct("<QQ")
_MESSAGE_NBYTES = 32 << 10
_PIECE_NBYTES = 4 << 20
"""The bytes of a long transfer that pass through the file at once."""


class Offer(NamedTuple):
    """The message of one rank to another about an operation.

    Attributes:
        offset: the place of the data in its file.
        nbytes: how much of it, to find out ranks that diverge.
    """

    offset: int
    nbytes: int


class SharedMemory(Grouped):
    """A transport through shared memory, see the module's docstring.

    Raises:
        NotShared: these ranks cannot.
    """

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__(members, device, watch)
        self._met: Met | None = None
        self._process = os.getpid()
        self._met = met = self._made(lambda: meet(members))
        # If these are dropped without `close`, data that others have not read yet stays.
        weakref.finalize(self, met.file.close).atexit = False
        self._made_lending: Lending | None = Lending(met.file)
        met.neighbours.was_read = self._made_lending.was_read
        self._sequence: Counter[int] = Counter()
        self._unread: weakref.WeakSet[SharedGather] = weakref.WeakSet()
        self.near = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        """The other ranks, from this one's neighbour on."""

    @property
    def _here(self) -> Met:
        if self._met is None:
            raise UsageError(
                "these collectives were closed by remove(), so nothing can be sent. Shard the model again."
            )
        if os.getpid() != self._process:  # it would take the messages that are for its parent
            raise UsageError(
                "a forked process used a model that its parent trains, which only the ranks can. Give it a copy of "
                "the values, or make the call in the parent."
            )
        return self._met

    @property
    def _lending(self) -> Lending:
        assert self._here
        assert self._made_lending is not None
        return self._made_lending

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._here.file.empty(numel, dtype)

    def resting_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.buffer(numel, dtype)

    def is_lent_by_system(self, tensor: Tensor) -> bool:
        return self._met is not None and self._met.file.offset_of(tensor) is not None

    def sends_in_place(self, tensor: Tensor) -> bool:
        return self.is_lent_by_system(tensor)

    def numel_in_flight(self, units: Sequence[int]) -> int:
        return super().numel_in_flight(units) // 2  # nothing goes on behind the computation

    def control(self) -> Collectives:
        # Existing connections reveal a dead rank at once; for new ones there is only the timeout.
        self.exchange(b"\0", "connections for small messages")
        try:
            return SharedMemory(self.members, torch.device("cpu"), self.watch)
        except NotShared as error:
            raise CollectiveError(
                f"the ranks have no connections for small messages: {error}. It was permitted when the model was "
                "sharded: look for a limit of memory, descriptors or files that was set since."
            ) from error

    def discard(self, memory: Tensor) -> None:
        self._wait_in_place(lambda _: True)
        self._here.file.discard(memory)

    @property
    def buffers_nbytes(self) -> int:
        return self._made_lending.copies_nbytes if self._made_lending is not None else 0

    def close(self) -> None:
        if self._met is not None:
            self._met.neighbours.close()
            self._met.file.close()
            for window in self._met.windows.values():
                window.close()
        self._met = self._made_lending = None
        super().close()

    # ------------------------------------------------------------------ offers

    def tag(self, bucket: int, kind: int) -> int:
        """Return the next tag of an operation on a bucket, which is the same on every rank."""
        channel = bucket * 4 + kind
        self._sequence[channel] += 1
        number = channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)
        return self.watch.operation_code << _OPERATION_SHIFT | number

    def offer(self, tensor: Tensor, tag: int, peers: Iterable[int], label: str) -> bool:
        """Let these ranks read a contiguous tensor. If it returns True, they read in place until `wait_read(tag)`: do not write."""
        readers = sorted(peers)
        offset, in_place = self._lending.lend(tensor, tag, readers, label)
        for peer in readers:
            with self.guarded(label, peer):
                if not self._here.neighbours.send_if_there(peer, tag, _OFFER.pack(offset, tensor.nbytes)):
                    self._lending.was_read(tag, peer)
        return in_place and self.is_lent(tag)

    def wait_read(self, tag: int) -> None:
        """Block until all peers have read the offer under this tag."""
        for peer in self._lending.readers(tag):
            label = f"the readers of {self._lending.label(tag)}"
            with self.guarded(label, peer):
                self._here.neighbours.block(peer, partial(self._lending.was_read_by, tag, peer), label)
            if not self._lending.readers(tag):
                return

    def wait_released(self, memory: Tensor | None = None) -> None:
        # Others may wait in the same way for this rank to read their data.
        for gather in [one for one in self._unread if memory is None or one.rests_in(memory)]:
            gather.read_early()

        def concerns(tag: int) -> bool:
            # This excludes rows: a peer may read those only after this rank's next operation.
            is_gather = tag >> _SEQUENCE_BITS & 3 == _GATHER
            return is_gather and (memory is None or _overlap(self._lending.tensor(tag), memory))

        self._wait_in_place(concerns)

    def _wait_in_place(self, concerns: Callable[[int], bool]) -> None:
        if self._made_lending is None:
            return
        for tag in self._made_lending.in_place():
            if self.is_lent(tag) and concerns(tag):  # while one is waited for, others end
                self.wait_read(tag)

    def is_lent(self, tag: int) -> bool:
        """Return whether a peer may still read the offer under this tag in place."""
        return self._made_lending is not None and self._made_lending.is_in_place(tag)

    def offered(self, peer: int, tag: int, nbytes: int, label: str) -> Offer:
        """Wait for a rank's offer of `nbytes`. `view` returns its elements, and `release` reports that it was read."""
        with self.guarded(label, peer):
            found = Offer(*_OFFER.unpack(self._here.neighbours.receive(peer, tag, label)))
            if found.nbytes != nbytes:
                raise RuntimeError(f"rank {peer} offers {found.nbytes} bytes, and this rank expects {nbytes}")
        return found

    def view(self, peer: int, offer: Offer, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return elements of an offer, from the `start`-th on."""
        return self._here.windows[peer].view(offer.offset + start * dtype.itemsize, numel, dtype)

    def release(self, peer: int, tag: int, label: str) -> None:
        """Report to its rank that an offer was read."""
        with self.guarded(label, peer):
            self._here.neighbours.tell_read(peer, tag)

    def failure(
        self, label: str, error: BaseException, peer: int | None = None, works: Sequence[Posted] = (),
        gone: Collection[int] = (),
    ) -> CollectiveError:  # fmt: skip
        self.tell_failure()
        return super().failure(label, error, peer, works, gone or (error.peers if isinstance(error, Lost) else ()))

    def tell_failure(self) -> None:
        """Notify peers that a wait of this rank failed, so that they need not wait for it until the timeout."""
        if self._met is not None:
            self._met.neighbours.tell_failure()

    # ------------------------------------------------------------------ operations

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        # The others read this rank's stored values. So the rows need no memory before they are waited for.
        if own is None:
            prepare()
            prepare = nothing
        offered = rows[self.rank] if own is None else own
        tag = self.tag(bucket, _GATHER)
        self.sent["all_gather"] += offered.nbytes * len(self.near)
        in_place = self.offer(offered, tag, self.near, label)
        gather = SharedGather(self, rows, tag, label, own, prepare, waits_for_readers=in_place and own is None)
        if own is not None:
            self._unread.add(gather)
        return gather

    def was_read(self, gather: SharedGather) -> None:
        """Forget a gather whose data was all read."""
        self._unread.discard(gather)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        tag = self.tag(bucket, _REDUCE)
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.near)
        self.offer(rows, tag, self.near, label)
        return SharedMean(self, rows, tag, label, divisor)

    def scatter_rows(self, rows: Tensor, received: Tensor, bucket: int, label: str) -> Work:
        tag = self.tag(bucket, _REDUCE)
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.near)
        self.offer(rows, tag, self.near, label)
        return SharedRows(self, received, tag, label)

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
        # Ranks that sit out a transfer do not count it: a broadcast has a channel of its own.
        channel = source * self.world_size + (targets[0] if kind == "transfer" else source)
        if self.rank == source:
            self.sent[kind] += tensor.nbytes
        flat = tensor.detach().reshape(-1)
        last = None
        for piece in flat.split(max(_PIECE_NBYTES // flat.dtype.itemsize, 1)):
            tag = self.tag(channel, _MOVE)
            if self.rank == source:
                self.offer(piece, tag, targets, label)
                if last is not None:
                    self.wait_read(last)
                last = tag
            else:
                with self.measure(kind):
                    found = self.offered(source, tag, piece.nbytes, label)
                piece.copy_(self.view(source, found, 0, piece.numel(), piece.dtype))
                self.release(source, tag, label)
        if last is not None:
            self.wait_read(last)
        if self.rank != source and not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        tag = self.tag(0, _EXCHANGE)
        self.sent["exchange"] += len(data) * len(self.near)
        pieces = [data[at : at + _MESSAGE_NBYTES] for at in range(0, max(len(data), 1), _MESSAGE_NBYTES)]
        for peer in self.near:
            with self.guarded(label, peer):
                for piece in pieces:
                    self._here.neighbours.send(peer, tag, piece)
        found = {self.rank: data}
        for peer in self.near:
            with self.guarded(label, peer), self.measure("exchange"):
                found[peer] = b"".join(self._here.neighbours.receive(peer, tag, label) for _ in pieces)
                if len(found[peer]) != len(data):
                    raise RuntimeError(f"rank {peer} says {len(found[peer])} bytes, and this rank expects {len(data)}")
        return [found[rank] for rank in range(self.world_size)]


# ---------------------------------------------------------------- operations in flight


class SharedGather(Work):
    """An all-gather."""

    def __init__(
        self, collectives: SharedMemory, rows: Tensor, tag: int, label: str,
        own: Tensor | None, prepare: Callable[[], None], *, waits_for_readers: bool,
    ) -> None:  # fmt: skip
        self._collectives = collectives
        self._rows = rows
        self._tag = tag
        self._label = label
        self._waits_for_readers = waits_for_readers
        self._own = own
        self._prepare = prepare
        self._early: dict[int, Tensor] = {}
        self._failed: CollectiveError | None = None
        self._left = list(collectives.near)

    def wait(self) -> None:
        if self._failed is not None:  # missing data has not arrived since
            raise self._failed
        try:
            prepare = self._prepare
            self._prepare = nothing
            prepare()
            with self._collectives.measure("gather"):
                self._read(wanted=True)
                if self._waits_for_readers:
                    self._collectives.wait_read(self._tag)
        except CollectiveError as error:
            self._failed = error
            raise

    def push(self) -> None:
        self.wait()

    def abandon(self) -> None:
        with suppress(CollectiveError):
            self._read(wanted=False)

    def rests_in(self, memory: Tensor) -> bool:
        """Return whether this rank's own row is in this memory."""
        return self._own is not None and _overlap(self._own, memory)

    def read_early(self) -> None:
        """Copy the others' rows now. `wait` puts them into the rows, which may have no memory yet."""
        for peer in [peer for peer in self._left if peer not in self._early]:
            self._early[peer] = self._view(peer).clone()
            self._collectives.release(peer, self._tag, self._label)

    def _view(self, peer: int) -> Tensor:
        """Wait for a rank's row, and return a view of that rank's memory. The rows need only a shape, no memory."""
        numel = self._rows.shape[1]
        dtype = self._rows.dtype
        offer = self._collectives.offered(peer, self._tag, numel * dtype.itemsize, self._label)
        return self._collectives.view(peer, offer, 0, numel, dtype)

    def _read(self, *, wanted: bool) -> None:
        collectives = self._collectives
        while self._left:
            peer = self._left[0]
            early = self._early.pop(peer, None)
            found = self._view(peer) if early is None else early
            if wanted:
                self._rows[peer].copy_(found)
            if early is None:
                collectives.release(peer, self._tag, self._label)
            del self._left[0]
        collectives.was_read(self)


class SharedMean(Reduction):
    """A reduce-scatter."""

    def __init__(self, collectives: SharedMemory, rows: Tensor, tag: int, label: str, divisor: float) -> None:
        self._collectives = collectives
        self._rows = rows
        self._tag = tag
        self._label = label
        self._divisor = divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        collectives = self._collectives
        rows = self._rows
        rank = self._collectives.rank
        numel = rows.shape[1]
        contributions = {rank: rows[rank]}
        with collectives.measure("reduce"):
            for peer in collectives.near:
                offer = collectives.offered(peer, self._tag, rows.nbytes, self._label)
                contributions[peer] = collectives.view(peer, offer, rank * numel, numel, rows.dtype)
        ordered = [contributions[one] for one in range(collectives.world_size)]
        sum_into(ordered, self._divisor, out, accumulate)
        for peer in collectives.near:
            collectives.release(peer, self._tag, self._label)

    @property
    def is_released(self) -> bool:
        return not self._collectives.is_lent(self._tag)

    def wait_released(self) -> None:
        self._collectives.wait_read(self._tag)


class SharedRows(Work):
    """Rows from each rank to each."""

    def __init__(self, collectives: SharedMemory, received: Tensor, tag: int, label: str) -> None:
        self._collectives = collectives
        self._received = received
        self._tag = tag
        self._label = label
        self._left = list(collectives.near)

    def wait(self) -> None:
        collectives = self._collectives
        received = self._received
        with collectives.measure("reduce"):
            while self._left:
                peer = self._left[0]
                numel = received.shape[1]
                offer = collectives.offered(peer, self._tag, received.nbytes, self._label)
                received[peer].copy_(collectives.view(peer, offer, collectives.rank * numel, numel, received.dtype))
                collectives.release(peer, self._tag, self._label)
                del self._left[0]

    @property
    def is_released(self) -> bool:
        return not self._collectives.is_lent(self._tag)

    def wait_released(self) -> None:
        self._collectives.wait_read(self._tag)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
