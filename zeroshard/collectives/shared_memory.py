"""Owns the collectives of ranks that share a host: each reads in place what the others hold in memory that all of them map.

An operation is two messages between each pair of ranks: where its data lies, and that it was read. What a rank offers must
lie in its file (`shareable`); what does not is copied there first. Until the others have read it, it must stay as it is:
whoever waits for an operation waits for its readers too, but for two kinds of offers, whose owners ask when they need to:
rows of a reduction (`PendingReduction.wait_readers`), and what rests from step to step (`all_gather(resting=...)`,
`wait_readers`). To ranks of other hosts everything goes over gloo, pair by pair: the sums have the same order, and the same bits.
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

from zeroshard.collectives.base import Pending, PendingReduction
from zeroshard.collectives.grouped import Grouped, Transfer, Work
from zeroshard.collectives.lending import Lending
from zeroshard.collectives.meeting import Met, meet
from zeroshard.collectives.members import Members
from zeroshard.collectives.neighbours import Lost
from zeroshard.collectives.point_to_point import PointToPoint
from zeroshard.collectives.reduction import sum_into
from zeroshard.collectives.watch import Watch
from zeroshard.errors import CollectiveError, UsageError

_GATHER, _REDUCE, _EXCHANGE, _MOVE = range(4)
_SEQUENCE_BITS = 20
_OFFER = struct.Struct("<QQ")
_MESSAGE_NBYTES = 32 << 10
_PIECE_NBYTES = 4 << 20
"""Of a long transfer, as much passes through the file at once."""


class NotShared(Exception):
    """The ranks cannot share memory; says why, in the same words on every rank."""


class _Offer(NamedTuple):
    """What one rank tells another of an operation.

    Attributes:
        offset: where the data lies in its file.
        nbytes: how much of it, to find out ranks that diverge.
    """

    offset: int
    nbytes: int


class SharedMemory(Grouped):
    """See the module's docstring.

    Raises:
        NotShared: these ranks cannot.
    """

    reads_in_place = True
    travels = False
    arrives_by_itself = False

    def __init__(self, members: Members, device: torch.device, predivide_factor: float, watch: Watch) -> None:
        super().__init__(members, device, predivide_factor, watch)
        self._met: Met | None = None
        self._process = os.getpid()
        met = self._made(lambda: meet(members))
        if isinstance(met, str):
            raise NotShared(met)
        self._met = met
        # Who lets go of these without `close` leaves what others have not read yet.
        weakref.finalize(self, met.file.close).atexit = False
        self._made_lending: Lending | None = Lending(met.file)
        met.neighbours.was_read = self._made_lending.was_read
        self._sequence: Counter[int] = Counter()
        self._unread: weakref.WeakSet[_Gather] = weakref.WeakSet()
        turned = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.near = [peer for peer in turned if peer in met.windows]
        far = [peer for peer in turned if peer not in met.windows]
        self.over_gloo = PointToPoint(members, device, predivide_factor, watch, far) if far else None
        """To the ranks of other hosts."""
        self.sends = bool(far)
        if self.over_gloo is not None:
            self.over_gloo.sent = self.sent

    @property
    def _here(self) -> Met:
        if self._met is None:
            raise UsageError("these collectives were closed, by remove(): nothing can be sent any more.")
        if os.getpid() != self._process:  # it would take the messages that are for its parent
            raise UsageError("a forked process used a model that its parent trains: only the ranks themselves can.")
        return self._met

    @property
    def _lending(self) -> Lending:
        assert self._here
        assert self._made_lending is not None
        return self._made_lending

    def shareable(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._here.file.empty(numel, dtype)

    def is_shareable(self, tensor: Tensor) -> bool:
        return self._met is not None and self._met.file.offset_of(tensor) is not None

    def discard(self, memory: Tensor) -> None:
        self._wait_in_place(lambda _: True)
        self._here.file.discard(memory)

    @property
    def buffers_nbytes(self) -> int:
        return self._made_lending.copies_nbytes if self._made_lending is not None else 0

    def close(self) -> None:
        if self.over_gloo is not None:
            self.over_gloo.close()
        if self._met is not None:
            self._met.neighbours.close()
            self._met.file.close()
            for window in self._met.windows.values():
                window.close()
        self._met = self._made_lending = None
        super().close()

    # ------------------------------------------------------------------ offers

    def tag(self, bucket: int, kind: int) -> int:
        """A number that only the same operation of the same bucket carries, on every rank."""
        channel = bucket * 4 + kind
        self._sequence[channel] += 1
        return channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)

    def offer(self, tensor: Tensor, tag: int, peers: Iterable[int], label: str) -> bool:
        """Let these ranks read a contiguous tensor. Returns whether in place: then it must stay as it is until `wait_read(tag)`."""
        readers = sorted(peers)
        if not readers:  # alone on this host
            return False
        offset, in_place = self._lending.lend(tensor, tag, readers, label)
        for peer in readers:
            with self.guarded(label, peer):
                self._here.neighbours.send(peer, tag, _OFFER.pack(offset, tensor.nbytes))
        return in_place

    def wait_read(self, tag: int) -> None:
        """Block until everybody has read what was offered under this tag."""
        for peer in self._lending.readers(tag):
            label = f"the readers of {self._lending.label(tag)}"
            with self.guarded(label, peer):
                self._here.neighbours.block(peer, partial(self._lending.was_read_by, tag, peer), label)
            if not self._lending.readers(tag):
                return

    def wait_readers(self, memory: Tensor | None = None) -> None:
        # What this rank has not read yet others may wait for in the same way.
        for gather in [one for one in self._unread if memory is None or one.rests_in(memory)]:
            gather.read_early()

        def concerns(tag: int) -> bool:
            # Not rows: a peer may read those only after what this rank does next.
            is_gather = tag >> _SEQUENCE_BITS & 3 == _GATHER
            return is_gather and (memory is None or _overlap(self._lending.tensor(tag), memory))

        self._wait_in_place(concerns)

    def _wait_in_place(self, concerns: Callable[[int], bool]) -> None:
        for tag in self._made_lending.in_place() if self._made_lending is not None else ():
            if self.is_lent(tag) and concerns(tag):  # while one is waited for, others end
                self.wait_read(tag)

    def is_lent(self, tag: int) -> bool:
        """Whether anybody still reads in place what was offered under this tag."""
        return self._made_lending is not None and self._made_lending.is_in_place(tag)

    def offered(self, peer: int, tag: int, nbytes: int, label: str) -> _Offer:
        """Wait for a rank's offer of so many bytes. `view` shows it; `release` says that it was read."""
        with self.guarded(label, peer):
            found = _Offer(*_OFFER.unpack(self._here.neighbours.receive(peer, tag, label)))
            if found.nbytes != nbytes:
                raise RuntimeError(f"rank {peer} offers {found.nbytes} bytes, and this rank expects {nbytes}")
        return found

    def view(self, peer: int, offer: _Offer, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements of an offer, from the `start`-th on."""
        return self._here.windows[peer].view(offer.offset + start * dtype.itemsize, numel, dtype)

    def release(self, peer: int, tag: int, label: str) -> None:
        """An offer was read."""
        with self.guarded(label, peer):
            self._here.neighbours.tell_read(peer, tag)

    def failure(
        self, label: str, error: BaseException, peer: int | None = None, works: Sequence[Work] = (),
        gone: Collection[int] = (),
    ) -> CollectiveError:  # fmt: skip
        self.tell_failure()
        return super().failure(label, error, peer, works, gone or (error.peers if isinstance(error, Lost) else ()))

    def tell_failure(self) -> None:
        """A wait of this rank failed: who waits for it need not wait until the timeout."""
        if self._met is not None:
            self._met.neighbours.tell_failure()

    # ------------------------------------------------------------------ operations

    def all_gather(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        own, tag = rows[self.rank] if resting is None else resting, self.tag(bucket, _GATHER)
        self.sent["all_gather"] += own.nbytes * len(self.near)
        in_place = self.offer(own, tag, self.near, label)
        far = self.over_gloo.all_gather(rows, bucket, label) if self.over_gloo is not None else None
        gather = _Gather(self, rows, tag, label, far, resting, waits_for_readers=in_place and resting is None)
        if resting is not None:
            self._unread.add(gather)
        return gather

    def was_read(self, gather: _Gather) -> None:
        """Nothing of it is left to be read."""
        self._unread.discard(gather)

    def workspace_numel(self, rows: Tensor) -> int:
        return self.over_gloo.workspace_numel(rows) if self.over_gloo is not None else 0

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        tag = self.tag(bucket, _REDUCE)
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.near)
        self.offer(rows, tag, self.near, label)
        far = self.over_gloo.scatter(rows, workspace, bucket, label) if self.over_gloo is not None else None
        return _Mean(self, rows, tag, label, far)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        label = f"a broadcast of rank {self.members.ranks[source]}"
        if self.over_gloo is not None:
            self.over_gloo.broadcast(tensor, source)
        else:
            self._move(tensor, source, [peer for peer in range(self.world_size) if peer != source], "broadcast", label)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        other = target if self.rank == source else source
        if self.over_gloo is not None and self.rank in (source, target) and other in self.over_gloo.peers:
            return self.over_gloo.transfer(tensor, source, target, label)
        if source != target:
            self._move(tensor, source, [target], "transfer", label)
        return _DONE

    def _move(self, tensor: Tensor, source: int, targets: Sequence[int], kind: str, label: str) -> None:
        """Bring one rank's tensor to others, piece by piece, and wait until it is there."""
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
        if self.over_gloo is not None:
            with self.measure("exchange"):
                found |= self.over_gloo.exchange_with_peers(data, label)
        for peer in self.near:
            with self.guarded(label, peer), self.measure("exchange"):
                found[peer] = b"".join(self._here.neighbours.receive(peer, tag, label) for _ in pieces)
                if len(found[peer]) != len(data):
                    raise RuntimeError(f"rank {peer} says {len(found[peer])} bytes, and this rank expects {len(data)}")
        return [found[rank] for rank in range(self.world_size)]


class _Done(Pending):
    def wait(self) -> None:
        return


_DONE = _Done()


class _Gather(Pending):
    def __init__(
        self, collectives: SharedMemory, rows: Tensor, tag: int, label: str, far: Pending | None,
        resting: Tensor | None, *, waits_for_readers: bool,
    ) -> None:  # fmt: skip
        self._collectives, self._rows, self._tag, self._label = collectives, rows, tag, label
        self._far, self._waits_for_readers = far, waits_for_readers
        self._resting = resting
        self._early: dict[int, Tensor] = {}
        self._failed: CollectiveError | None = None
        self._left = list(collectives.near)

    def wait(self) -> None:
        if self._failed is not None:  # what did not arrive has not arrived since
            raise self._failed
        try:
            with self._collectives.measure("gather"):
                self._read(wanted=True)
                if self._far is not None:
                    self._far.wait()
                if self._waits_for_readers:
                    self._collectives.wait_read(self._tag)
        except CollectiveError as error:
            self._failed = error
            raise

    def abandon(self) -> None:
        with suppress(CollectiveError):
            self._read(wanted=False)
        if self._far is not None:
            self._far.abandon()

    def rests_in(self, memory: Tensor) -> bool:
        """Whether this rank's own row lies in this memory."""
        return self._resting is not None and _overlap(self._resting, memory)

    def read_early(self) -> None:
        """Read the others' rows now, to be put where they belong in `wait`: that place may have no memory yet."""
        for peer in [peer for peer in self._left if peer not in self._early]:
            row = self._rows[peer]
            offer = self._collectives.offered(peer, self._tag, row.nbytes, self._label)
            self._early[peer] = self._collectives.view(peer, offer, 0, row.numel(), row.dtype).clone()
            self._collectives.release(peer, self._tag, self._label)

    def _read(self, *, wanted: bool) -> None:
        collectives = self._collectives
        while self._left:
            peer = self._left[0]
            row = self._rows[peer]
            early = self._early.pop(peer, None)
            if early is None:
                offer = collectives.offered(peer, self._tag, row.nbytes, self._label)
                if wanted:
                    row.copy_(collectives.view(peer, offer, 0, row.numel(), row.dtype))
                collectives.release(peer, self._tag, self._label)
            elif wanted:
                row.copy_(early)
            del self._left[0]
        collectives.was_read(self)


class _Mean(PendingReduction):
    def __init__(
        self, collectives: SharedMemory, rows: Tensor, tag: int, label: str,
        far: tuple[Transfer, dict[int, Tensor]] | None,
    ) -> None:  # fmt: skip
        self._collectives, self._rows, self._tag, self._label, self._far = collectives, rows, tag, label, far

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        collectives, rows, rank = self._collectives, self._rows, self._collectives.rank
        numel = rows.shape[1]
        contributions = {rank: rows[rank]}
        with collectives.measure("reduce"):
            for peer in collectives.near:
                offer = collectives.offered(peer, self._tag, rows.nbytes, self._label)
                contributions[peer] = collectives.view(peer, offer, rank * numel, numel, rows.dtype)
            if self._far is not None:
                transfer, received = self._far
                transfer.wait()
                contributions |= received
        ordered = [contributions[one] for one in range(collectives.world_size)]
        sum_into(ordered, collectives._divisor, out, accumulate)
        for peer in collectives.near:
            collectives.release(peer, self._tag, self._label)

    @property
    def has_readers(self) -> bool:
        return self._collectives.is_lent(self._tag)

    def wait_readers(self) -> None:
        self._collectives.wait_read(self._tag)


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
