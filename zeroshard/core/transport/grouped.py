"""The parts that transports of several ranks share (guarded waits, works in flight), and the plainest transport, over gloo."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.core.transport.base import Collectives, ReceivedRows, SummedRows, Work, nothing
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.rounds import Swap, partners_of
from zeroshard.core.transport.waits import code_of
from zeroshard.core.transport.watch import Watch, describe_failure
from zeroshard.errors import CollectiveError, UsageError, ZeroshardError

T = TypeVar("T")

TRANSFER_TAG = (1 << 30) + 1
"""Transfers from one rank to another keep their order, so one tag serves all of them; no bucket has this number."""
_NEVER_SENT_TAG = TRANSFER_TAG + 1
CLOSED = "these collectives were closed by remove(), so nothing can be sent. Shard the model again."
_SEQUENCE_BITS = 8
_OPERATION_SHIFT = 26
"""The first bit of the operation's code in a tag, above the channel and the number in the channel. gloo's tags have 31 bits."""
_PROBE = timedelta(milliseconds=1)
_CLOSED_CONNECTION = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused")


class Lost(RuntimeError):
    """Raised when ranks of this host no longer send messages; `peers` are those whose processes have ended."""

    def __init__(self, text: str, peers: frozenset[int]) -> None:
        super().__init__(text)
        self.peers = peers


Posted = tuple[dist.Work, int | None]
"""One work of the backend, and the member at its other end if there is one."""


class Grouped(Collectives):
    """The collectives of several ranks, for tensors on `device`. Several transports may share a watchdog."""

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__()
        self.members = members
        self.watch = watch
        self.device = device
        self.rank = members.rank
        self.world_size = len(members.ranks)
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        """The other ranks, starting with the next rank, so that not all ranks send to rank 0 first."""
        self.end_watch: Callable[[], object] = nothing
        """Ends the watchdog, if this transport owns it."""

    def close(self) -> None:
        self.end_watch()

    def operation(self, name: str) -> AbstractContextManager[None]:
        return self.watch.operation(name)

    def control(self) -> Collectives:
        # Existing connections report a dead rank at once; for new ones there is only the timeout.
        self.agree(b"\0", "connections for small messages")
        return PointToPoint(self.members, torch.device("cpu"), self.watch, only_messages=True)

    @contextmanager
    def guarded(self, label: str, peer: int | None = None) -> Iterator[None]:
        """Watch a wait for other ranks, or for one `peer`; raise its failure as a `CollectiveError`."""
        self.watch.enter(label)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZeroshardError):
                raise
            raise self.failure(label, error, peer) from error
        finally:
            self.watch.leave()

    def _made(self, make: Callable[[], T]) -> T:
        """Open connections, under the watchdog. Every member must call it."""
        with self.guarded("the others, to make connections"):
            self.watch.begin(self.members.root)
            return make()

    def failure(
        self, label: str, error: BaseException, peer: int | None = None, works: Sequence[Posted] = ()
    ) -> CollectiveError:
        """Return the error to raise after a wait for `peer` has failed. `works` are the other parts of the same operation."""
        ranks = self.members.ranks
        gone = error.peers if isinstance(error, Lost) else frozenset[int]()
        closed = set(gone)
        # A wait that times out closes all of gloo's connections, so the other parts of the operation end at once.
        for work, other in works:
            try:
                work.wait(_PROBE)
            except RuntimeError as end:
                if other is not None and _is_closed(end):
                    closed.add(other)
        if peer is not None and not gone and _is_closed(error):
            closed.add(peer)
        for notify in self.on_failure:
            notify()
        mine, others, reaches_store = self.watch.ask(
            label, [ranks[one] for one in closed], [ranks[one] for one in gone]
        )
        return CollectiveError(
            describe_failure(
                self.members.own,
                self.watch.ranks,
                mine,
                others,
                {ranks[one] for one in closed}.union(*(told.closed for told in others.values())) - {self.members.own},
                self.members.timeout,
                error,
                awaited=None if peer is None else ranks[peer],
                reaches_store=reaches_store,
            )
        )


def _is_closed(error: BaseException) -> bool:
    return any(words in str(error) for words in _CLOSED_CONNECTION)


@dataclass(eq=False)
class GroupedTransfer(Work):
    """The works of one operation. `_land` is called when they are done."""

    _collectives: Grouped
    works: Sequence[Posted] | None
    """The works that the backend has started; None until the operation is launched."""
    _kind: str
    _label: str
    _land: Callable[[], None] = nothing
    _failed: CollectiveError | None = None

    def wait(self) -> None:
        if self._failed is not None:  # the missing data has not arrived since then
            raise self._failed
        collectives = self._collectives
        assert self.works is not None, f"{self._label} was waited for before it was launched"
        works = self.works
        self.works = ()
        with collectives.measure(self._kind):
            collectives.watch.enter(self._label)
            done = 0
            try:
                for work, _ in works:
                    work.wait()
                    done += 1
            except RuntimeError as error:
                self._failed = collectives.failure(self._label, error, works[done][1], works[done + 1 :])
                raise self._failed from error
            finally:
                collectives.watch.leave()
        land = self._land
        self._land = nothing
        land()


class PointToPoint(Grouped):
    """Pairwise transfers over gloo: each pair of ranks exchanges exactly the rows that the other owns.

    gloo's own reduce-scatter moves twice as many bytes. gloo reads and writes CPU memory, so tensors of other devices are
    copied through CPU memory.

    Args:
        peers: the members to exchange with (default: all).
        only_messages: connect only the pairs of ranks that `combine`, and collecting and spreading over a tree, use: at most
            log2(W) + 1 for each rank. Any other pair connects when it first sends. (gloo may wait without end for a rank that
            died before a pair's first message, so the pairs in use are connected at once, while all ranks are there.)
    """

    def __init__(
        self,
        members: Members,
        device: torch.device,
        watch: Watch,
        peers: Sequence[int] | None = None,
        *,
        only_messages: bool = False,
    ) -> None:
        super().__init__(members, device, watch)
        if peers is not None:
            self.peers = [peer for peer in self.peers if peer in peers]
        self._begun: Counter[int] = Counter()
        """The number of operations, by channel."""
        # torch registers process groups, names each by the number of groups before it, and never frees a subgroup's
        # resources. Ranks that had created different numbers of groups would wait for each other under different names.
        # So the store counts instead, for these members only, and any ranks may create groups in any order.
        store = PrefixStore(members.counted_name("gloo"), members.store)
        # torch's stubs lack its send, recv and broadcast.
        self._made_engine: Any = None

        def connect() -> None:
            if not only_messages:
                self._made_engine = dist.ProcessGroupGloo(store, members.rank, len(members.ranks), members.timeout)
                return
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = members.timeout
            options._devices = _lazy_devices()
            self._made_engine = dist.ProcessGroupGloo(store, members.rank, len(members.ranks), options)
            label = "connections for small messages"
            partners = partners_of(self.rank, self.world_size)
            self._messages(b"\0", partners, partners, self._tag(0, 2, label), label)

        self._made(connect)
        self.sent.clear()
        self._connected = partners_of(self.rank, self.world_size) if only_messages else self.peers
        """The peers that were connected at the start."""
        self.on_failure = [self._close_pairs]

    @property
    def _engine(self) -> Any:
        if self._made_engine is None:
            raise UsageError(CLOSED)
        return self._made_engine

    def close(self) -> None:
        self._made_engine = None
        super().close()

    def _close_pairs(self) -> None:
        """Close the connections to all ranks, so that those that wait for this one fail now, and pass it on."""
        room = torch.empty(1, dtype=torch.uint8)
        for peer in self._connected:
            try:
                self._made_engine.recv([room], peer, _NEVER_SENT_TAG).wait(_PROBE)
            except RuntimeError as error:
                if not _is_closed(error):  # a wait that times out closes all pairs; gloo has no other way
                    return

    def _tag(self, bucket: int, kind: int, name: str | None = None) -> int:
        """Return the next tag of an operation on a bucket, the same on every rank.

        Args:
            kind: 0 for a gather, 1 for a reduction, 2 for an exchange. Each kind counts its operations on a bucket separately.
            name: makes the tags of unrelated exchanges differ outside operations. Inside one, the operation's name does.
        """
        channel = bucket * 3 + kind
        self._begun[channel] += 1
        number = self._begun[channel] % (1 << _SEQUENCE_BITS)
        code = self.watch.operation_code
        if name is not None and not code:  # gloo ends the process if two messages of unequal lengths meet
            code = code_of(name)
        return code << _OPERATION_SHIFT | channel << _SEQUENCE_BITS | number

    def _start(
        self, send: dict[int, Tensor], receive: dict[int, Tensor], tag: int, kind: str, label: str
    ) -> GroupedTransfer:
        # The engine's own methods: dist.isend and dist.irecv take 20 times as long, because of checks, 200 times a step.
        land = nothing
        if self._is_staged:
            # A tensor for several members is copied once.
            copies = {id(tensor): _host_memory(tensor).copy_(tensor) for tensor in send.values()}
            send = {peer: copies[id(tensor)] for peer, tensor in send.items()}
            landing = {peer: _host_memory(tensor) for peer, tensor in receive.items()}
            land = partial(_land, landing, receive)
            receive = landing
        engine = self._engine
        peer = None
        works: list[Posted] = []
        try:
            for peer, tensor in receive.items():
                works.append((engine.recv([tensor], peer, tag), peer))
            for peer, tensor in send.items():
                works.append((engine.send([tensor], peer, tag), peer))
        except RuntimeError as error:
            raise self.failure(label, error, peer, works) from error
        return GroupedTransfer(self, works, kind, label, land)

    @property
    def _is_staged(self) -> bool:
        """Whether tensors are on an accelerator and are copied through CPU memory to be sent."""
        return self.device.type != "cpu"

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        self.sent["broadcast"] += tensor.nbytes if self.rank == source else 0
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        plain = tensor.detach().to("cpu").contiguous()
        with self.guarded(f"a broadcast of rank {self.members.ranks[source]}"):
            # no test needs this wait: the host waits for gloo, whose memory is the CPU's.
            self._engine.broadcast([plain.view(-1).view(torch.uint8)], options).wait()
        if self.rank != source and plain.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(plain)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        send = dict[int, Tensor]()
        receive = dict[int, Tensor]()
        if self.rank == source != target:
            self.sent["transfer"] += tensor.nbytes
            send = {target: tensor}
        elif self.rank == target != source:
            receive = {source: tensor}
        return self._start(send, receive, TRANSFER_TAG, "transfer", label)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        return self.gather_from(self.peers, rows, bucket, label)

    def gather_from(self, peers: Sequence[int], rows: Tensor, bucket: int, label: str) -> Work:
        """Start to receive some peers' rows and to send this rank's row to them."""
        own = rows[self.rank]
        self.sent["all_gather"] += own.nbytes * len(peers)
        receive = {peer: rows[peer] for peer in peers}
        return self._start(dict.fromkeys(peers, own), receive, self._tag(bucket, 0), "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return len(self.peers) * rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> SummedRows:
        received = dict(zip(self.peers, workspace.view(len(self.peers), rows.shape[1]), strict=True))
        send = {peer: rows[peer] for peer in self.peers}
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.peers)
        transfer = self._start(send, received, self._tag(bucket, 1), "reduce", label)
        by_rank = {**received, self.rank: rows[self.rank]}
        return ReceivedRows([transfer], [by_rank[rank] for rank in sorted(by_rank)], divisor)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = {self.rank: data, **self.exchange_with_peers(data, label)}
        return [found[rank] for rank in range(self.world_size)]

    def exchange_with_peers(self, data: bytes, label: str) -> dict[int, bytes]:
        """Send `data` to every peer and return theirs; all must have the same length."""
        return self._messages(data, self.peers, self.peers, self._tag(0, 2, label), label)

    def swaps(self, label: str) -> Swap:
        tag = self._tag(0, 2, label)

        def swap(data: bytes, receiver: int | None, sender: int | None) -> bytes:
            senders = () if sender is None else (sender,)
            found = self._messages(data, () if receiver is None else (receiver,), senders, tag, label)
            return b"" if sender is None else found[sender]

        return swap

    def _messages(
        self, data: bytes, receivers: Sequence[int], senders: Sequence[int], tag: int, label: str
    ) -> dict[int, bytes]:
        """Send `data` to some ranks, and return the messages of equal length of others."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = {peer: torch.empty_like(own) for peer in senders}
        self.sent["exchange"] += own.nbytes * len(receivers)
        # no test needs this wait: the host waits for gloo, whose memory is the CPU's.
        self._start(dict.fromkeys(receivers, own), received, tag, "exchange", label).wait()
        return {peer: one.numpy().tobytes() for peer, one in received.items()}


def _lazy_devices() -> list[Any]:
    """Return gloo's devices as torch chooses them, for connections that are made when first used."""
    make: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [make.create_default_device(lazy_init=True)]
    return [make.create_device(interface=one, lazy_init=True) for one in interfaces.split(",")]


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.accelerator.is_available())


def _land(landing: dict[int, Tensor], receive: dict[int, Tensor]) -> None:
    """Copy tensors that arrived in CPU memory to their places."""
    for peer, tensor in receive.items():
        tensor.copy_(landing[peer])
