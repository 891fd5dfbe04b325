"""Owns the collectives of ranks that share a host: each reads in place what the others hold in memory that all of them map.

An operation is two words between each pair of ranks: where its data lies, and that it was read. Nothing is sent. What a rank offers must
lie in its arena (`shareable`); what does not is copied there first. Until the others have read it, it must stay as it is: `PendingReduction.read`
says when the rows of a reduction are free, `before_update` waits for the readers of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from zeroshard.collectives.arena import Arena, Window
from zeroshard.collectives.base import Pending, PendingReduction
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.members import Members
from zeroshard.collectives.neighbours import Neighbours, Word
from zeroshard.collectives.reduction import sum_into
from zeroshard.collectives.watch import Watch
from zeroshard.errors import CollectiveError

_GATHER, _REDUCE, _EXCHANGE, _BROADCAST, _TRANSFER = range(5)
_KINDS = 8
_SEQUENCE_BITS = 20
_READ = 1 << 62
"""The bit of a tag that says: read."""
_MESSAGE_NBYTES = 32 << 10


class SharedMemory(Grouped):
    """See the module's docstring.

    Args:
        arena: this rank's memory.
        windows: the other ranks' arenas, by rank.
        neighbours: the connections.
    """

    def __init__(
        self, members: Members, device: torch.device, predivide_factor: float, watch: Watch, arena: Arena,
        windows: dict[int, Window], neighbours: Neighbours,
    ) -> None:  # fmt: skip
        super().__init__(members, device, predivide_factor, watch)
        self._arena, self._windows, self._neighbours = arena, windows, neighbours
        self._sequence: Counter[int] = Counter()
        self._peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._unread: dict[int, tuple[set[int], Tensor]] = {}
        """Of what this rank offers and not all have read: who has not, and the tensor, which stays until then."""

    def shareable(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory from which the others read without a copy; undefined content."""
        return self._arena.empty(numel, dtype)

    def close(self) -> None:
        self._neighbours.close()
        self._windows.clear()
        self._unread.clear()
        self._arena.close()
        super().close()

    # ------------------------------------------------------------------ words

    def _tag(self, bucket: int, kind: int) -> int:
        """A number that only the same operation of the same bucket carries, on every rank."""
        channel = bucket * _KINDS + kind
        self._sequence[channel] += 1
        return channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)

    def offer(self, tensor: Tensor, tag: int, peers: Iterable[int], label: str, staging: Tensor | None = None) -> None:
        """Let these ranks read a contiguous tensor, which must stay as it is until `wait_read(tag)`.

        Args:
            staging: where it is copied to, if it does not lie in the arena; default: memory of its own.
        """
        offset = self._arena.offset_of(tensor)
        if offset is None:
            room = staging if staging is not None else self.shareable(tensor.numel(), tensor.dtype)
            tensor = room.view(-1)[: tensor.numel()].copy_(tensor.reshape(-1))
            offset = self._arena.offset_of(tensor)
            assert offset is not None
        told = set(peers)
        self._unread[tag] = (set(told), tensor)
        with self.guarded(label):
            for peer in told:
                self._neighbours.tell(peer, Word(tag, offset, tensor.nbytes))

    def read(self, peer: int, tag: int, label: str) -> Word:
        """Where a rank's offer lies. `view` shows it; `release` says that it was read."""
        with self._waiting(label, peer):
            return self._neighbours.hear(peer, tag)

    def view(self, peer: int, word: Word, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Elements of an offer, from the `start`-th on."""
        return self._windows[peer].view(word.offset + start * dtype.itemsize, numel, dtype)

    def release(self, peer: int, tag: int, label: str) -> None:
        """An offer was read."""
        with self.guarded(label):
            self._neighbours.send(peer, tag | _READ, b"")

    def wait_read(self, tag: int, label: str) -> None:
        """Block until everybody has read what was offered under this tag."""
        peers, _ = self._unread.get(tag, (set(), None))
        for peer in list(peers):
            with self._waiting(f"the readers of {label}", peer):
                self._neighbours.receive(peer, tag | _READ)
            peers.discard(peer)
        self._unread.pop(tag, None)

    def before_update(self) -> None:
        """What this rank offers is about to change: nobody reads it any longer when this returns."""
        for tag in list(self._unread):
            self.wait_read(tag, "parameters")

    def _waiting(self, label: str, peer: int) -> _Waiting:
        return _Waiting(self, label, peer)

    # ------------------------------------------------------------------ operations

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        own, tag = rows[self.rank], self._tag(bucket, _GATHER)
        self.sent["all_gather"] += own.nbytes * len(self._peers)
        self.offer(own, tag, self._peers, label)
        return _Gather(self, rows, tag, label)

    def workspace_numel(self, rows: Tensor) -> int:
        return 0 if self._arena.offset_of(rows) is not None else rows.numel()

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        tag = self._tag(bucket, _REDUCE)
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self._peers)
        self.offer(rows, tag, self._peers, label, workspace)
        return _Mean(self, rows, tag, label)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        label = f"a broadcast of rank {self.members.ranks[source]}"
        self.transfer_to(tensor, source, [peer for peer in range(self.world_size) if peer != source], label, _BROADCAST)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        self.transfer_to(tensor, source, [target] if source != target else [], label, _TRANSFER)
        return _DONE

    def transfer_to(self, tensor: Tensor, source: int, targets: list[int], label: str, kind: int) -> None:
        """Bring one rank's tensor to others, and wait until it is there."""
        tag = self._tag(0, kind)
        if self.rank == source:
            self.sent["broadcast" if kind == _BROADCAST else "transfer"] += tensor.nbytes
            self.offer(tensor.detach().contiguous(), tag, targets, label)
            self.wait_read(tag, label)
        elif self.rank in targets:
            word = self.read(source, tag, label)
            self._check(word, tensor.nbytes, source, label)
            tensor.detach().view(-1).copy_(self.view(source, word, 0, tensor.numel(), tensor.dtype))
            self.release(source, tag, label)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        tag = self._tag(0, _EXCHANGE)
        self.sent["exchange"] += len(data) * len(self._peers)
        pieces = [data[at : at + _MESSAGE_NBYTES] for at in range(0, max(len(data), 1), _MESSAGE_NBYTES)]
        for piece in pieces:
            for peer in self._peers:
                with self.guarded(label):
                    self._neighbours.send(peer, tag, piece)
        found = {self.rank: data}
        for peer in self._peers:
            with self._waiting(label, peer), self.measure("exchange"):
                found[peer] = b"".join(self._neighbours.receive(peer, tag) for _ in pieces)
        return [found[rank] for rank in range(self.world_size)]

    def _check(self, word: Word, nbytes: int, peer: int, label: str) -> None:
        if word.nbytes != nbytes:
            error = RuntimeError(f"rank {peer} offers {word.nbytes} bytes, and this rank expects {nbytes}")
            raise self.failure(label, error, peer)


class _Waiting:
    """A wait for one other rank: watched, and what fails becomes a `CollectiveError` that names it."""

    def __init__(self, collectives: SharedMemory, label: str, peer: int) -> None:
        self._collectives, self._label, self._peer = collectives, label, peer

    def __enter__(self) -> None:
        self._collectives.watch.enter(self._label)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise self._collectives.failure(self._label, error, self._peer) from error
        finally:
            self._collectives.watch.leave()


class _Done(Pending):
    def wait(self) -> None:
        return


_DONE = _Done()


class _Gather(Pending):
    def __init__(self, collectives: SharedMemory, rows: Tensor, tag: int, label: str) -> None:
        self._collectives, self._rows, self._tag, self._label = collectives, rows, tag, label
        self._failed: CollectiveError | None = None
        self._left = list(collectives._peers)

    def wait(self) -> None:
        if self._failed is not None:  # what did not arrive has not arrived since
            raise self._failed
        collectives, rows = self._collectives, self._rows
        with collectives.measure("gather") if self._left else nullcontext():
            try:
                while self._left:
                    peer = self._left[0]
                    word = collectives.read(peer, self._tag, self._label)
                    own = rows[peer]
                    collectives._check(word, own.nbytes, peer, self._label)
                    own.copy_(collectives.view(peer, word, 0, own.numel(), own.dtype))
                    collectives.release(peer, self._tag, self._label)
                    del self._left[0]
            except CollectiveError as error:
                self._failed = error
                raise


class _Mean(PendingReduction):
    def __init__(self, collectives: SharedMemory, rows: Tensor, tag: int, label: str) -> None:
        self._collectives, self._rows, self._tag, self._label = collectives, rows, tag, label

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        collectives, rows = self._collectives, self._rows
        numel = rows.shape[1]
        contributions = {collectives.rank: rows[collectives.rank]}
        with collectives.measure("reduce"):
            for peer in collectives._peers:
                word = collectives.read(peer, self._tag, self._label)
                collectives._check(word, rows.nbytes, peer, self._label)
                contributions[peer] = collectives.view(peer, word, collectives.rank * numel, numel, rows.dtype)
        ordered = [contributions[rank] for rank in range(collectives.world_size)]
        sum_into(ordered, collectives._divisor, out, accumulate)
        for peer in collectives._peers:
            collectives.release(peer, self._tag, self._label)

    def wait_read(self) -> None:
        """Block until the other ranks have read these rows, too."""
        self._collectives.wait_read(self._tag, self._label)
