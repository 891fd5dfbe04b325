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
from functools import partial

import torch
from torch import Tensor

from zeroshard.collectives.base import Pending, PendingReduction, PendingRows
from zeroshard.collectives.grouped import Grouped, Work
from zeroshard.collectives.lending import Lending
from zeroshard.collectives.meeting import Met, meet
from zeroshard.collectives.members import Members
from zeroshard.collectives.neighbours import Lost
from zeroshard.collectives.point_to_point import PointToPoint
from zeroshard.collectives.reading import Offer, SharedGather, SharedMean, SharedRows, overlap
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
        self._unread: weakref.WeakSet[SharedGather] = weakref.WeakSet()
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
            return is_gather and (memory is None or overlap(self._lending.tensor(tag), memory))

        self._wait_in_place(concerns)

    def _wait_in_place(self, concerns: Callable[[int], bool]) -> None:
        for tag in self._made_lending.in_place() if self._made_lending is not None else ():
            if self.is_lent(tag) and concerns(tag):  # while one is waited for, others end
                self.wait_read(tag)

    def is_lent(self, tag: int) -> bool:
        """Whether anybody still reads in place what was offered under this tag."""
        return self._made_lending is not None and self._made_lending.is_in_place(tag)

    def offered(self, peer: int, tag: int, nbytes: int, label: str) -> Offer:
        """Wait for a rank's offer of so many bytes. `view` shows it; `release` says that it was read."""
        with self.guarded(label, peer):
            found = Offer(*_OFFER.unpack(self._here.neighbours.receive(peer, tag, label)))
            if found.nbytes != nbytes:
                raise RuntimeError(f"rank {peer} offers {found.nbytes} bytes, and this rank expects {nbytes}")
        return found

    def view(self, peer: int, offer: Offer, start: int, numel: int, dtype: torch.dtype) -> Tensor:
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
        gather = SharedGather(self, rows, tag, label, far, resting, waits_for_readers=in_place and resting is None)
        if resting is not None:
            self._unread.add(gather)
        return gather

    def was_read(self, gather: SharedGather) -> None:
        """Nothing of it is left to be read."""
        self._unread.discard(gather)

    def workspace_numel(self, rows: Tensor) -> int:
        return self.over_gloo.workspace_numel(rows) if self.over_gloo is not None else 0

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        tag = self.tag(bucket, _REDUCE)
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.near)
        self.offer(rows, tag, self.near, label)
        far = self.over_gloo.scatter(rows, workspace, bucket, label) if self.over_gloo is not None else None
        return SharedMean(self, rows, tag, label, far)

    def scatter_rows(self, rows: Tensor, received: Tensor, bucket: int, label: str) -> PendingRows:
        tag = self.tag(bucket, _REDUCE)
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.near)
        self.offer(rows, tag, self.near, label)
        far = self.over_gloo.scatter_rows(rows, received, bucket, label) if self.over_gloo is not None else None
        return SharedRows(self, received, tag, label, far)

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
