"""Owns pairwise transfers over gloo, whose own reduce-scatter moves twice the bytes that are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, SummedRows, Work, nothing
from zeroshard.collectives.grouped import TRANSFER_TAG, Grouped, Posted, Transfer, closed
from zeroshard.collectives.members import Members
from zeroshard.collectives.waits import OPERATION_SHIFT, SEQUENCE_BITS, Pairing, code_of
from zeroshard.collectives.watch import Watch


class PointToPoint(Grouped):
    """Pairwise transfers. Other tensors pass through CPU memory: gloo reads and writes plain memory.

    Args:
        peers: the members to connect with; another object serves the others. Default: all members.
    """

    def __init__(
        self, members: Members, device: torch.device, watch: Watch,
        peers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(members, device, watch)
        others = range(self.world_size) if peers is None else peers
        # Each rank starts with its neighbour, so that not everybody sends to rank 0 first.
        turned = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.peers = [peer for peer in turned if peer in others]
        self._begun: dict[int, int] = {}
        """By channel, the last tag."""
        self._name = members.counted_name("gloo")
        # torch's stubs lack its send, recv and broadcast.
        self._made_engine: Any = self._made(lambda: members.gloo(self._name))

    @property
    def _engine(self) -> Any:
        if self._made_engine is None:
            raise closed()
        return self._made_engine

    def close(self) -> None:
        self._made_engine = None
        super().close()

    def _tag(self, bucket: int, kind: int, name: str | None = None) -> int:
        """Return the next tag of an operation on a bucket, which is the same on every rank. `name` is that of a message."""
        channel = bucket * 3 + kind
        number = (self._begun.get(channel, 0) + 1) % (1 << SEQUENCE_BITS)
        code = self.watch.operation_code
        if name is not None and not code:  # gloo ends the process where two messages of unequal lengths meet
            code = code_of(name)
        self._begun[channel] = code << OPERATION_SHIFT | channel << SEQUENCE_BITS | number
        return self._begun[channel]

    def _start(self, send: dict[int, Tensor], receive: dict[int, Tensor], tag: int, kind: str, label: str) -> Transfer:
        # The engine's own methods: dist.isend and irecv cost 20 times their microseconds in checks, 200 times a step.
        land = nothing
        if self._is_staged:
            send = _copied(send)
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
        pairing = None
        if tag != TRANSFER_TAG:
            ranks = [self.members.ranks[peer] for peer in receive]
            pairing = Pairing(self._name, tag, ranks, self._begun, self._interrupt)
        return Transfer(self, works, kind, label, land, pairing)

    def _interrupt(self) -> None:
        """Close all connections of gloo's, as a wait that times out does."""
        nothing_comes = torch.empty(1, dtype=torch.uint8)
        with suppress(RuntimeError):
            self._engine.recv([nothing_comes], self.peers[0], TRANSFER_TAG + 1).wait(timedelta(milliseconds=1))

    @property
    def _is_staged(self) -> bool:
        """Whether tensors pass through CPU memory."""
        return self._device.type != "cpu"

    def control(self) -> Collectives:
        return control_of(self)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        self.sent["broadcast"] += tensor.nbytes if self.rank == source else 0
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        plain = tensor.detach().to("cpu").contiguous()
        with self.guarded(f"a broadcast of rank {self.members.ranks[source]}"):
            self._engine.broadcast([plain.view(-1).view(torch.uint8)], options).wait()
        if self.rank != source and plain.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(plain)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        send = dict[int, Tensor]()
        receive = dict[int, Tensor]()
        if source == target:
            pass
        elif self.rank == source:
            self.sent["transfer"] += tensor.nbytes
            send = {target: tensor}
        elif self.rank == target:
            receive = {source: tensor}
        return self._start(send, receive, TRANSFER_TAG, "transfer", label)

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        prepare()
        return self.gather_from(self.peers, rows, bucket, label)

    def gather_from(self, peers: Sequence[int], rows: Tensor, bucket: int, label: str) -> Work:
        """Receive the rows of some peers, which receive this rank's."""
        own = rows[self.rank]
        self.sent["all_gather"] += own.nbytes * len(peers)
        receive = {peer: rows[peer] for peer in peers}
        return self._start(dict.fromkeys(peers, own), receive, self._tag(bucket, 0), "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return len(self.peers) * rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        received = dict(zip(self.peers, workspace.view(len(self.peers), rows.shape[1]), strict=True))
        transfer = self._scatter(rows, received, bucket, label)
        contributions = [received[rank] if rank != self.rank else rows[rank] for rank in range(self.world_size)]
        return SummedRows([transfer], contributions, divisor)

    def scatter_rows(self, rows: Tensor, received: Tensor, bucket: int, label: str) -> Work:
        return self._scatter(rows, {peer: received[peer] for peer in self.peers}, bucket, label)

    def _scatter(self, rows: Tensor, received: dict[int, Tensor], bucket: int, label: str) -> Transfer:
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.peers)
        send = {peer: rows[peer] for peer in self.peers}
        return self._start(send, received, self._tag(bucket, 1), "reduce", label)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = {self.rank: data, **self.exchange_with_peers(data, label)}
        return [found[rank] for rank in range(self.world_size)]

    def exchange_with_peers(self, data: bytes, label: str) -> dict[int, bytes]:
        """Return every peer's `data`, which has the same length."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = {peer: torch.empty_like(own) for peer in self.peers}
        self.sent["exchange"] += own.nbytes * len(self.peers)
        self._start(dict.fromkeys(self.peers, own), received, self._tag(0, 2, label), "exchange", label).wait()
        return {peer: one.numpy().tobytes() for peer, one in received.items()}


def control_of(beside: Grouped) -> PointToPoint:
    """Make connections for small messages beside those of a group, which report a dead rank at once."""
    beside.exchange(b"\0", "connections for small messages")
    return PointToPoint(beside.members, torch.device("cpu"), beside.watch)


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.accelerator.is_available())


def _copied(send: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copy tensors to CPU memory; a tensor for several members is copied once."""
    copies = {id(tensor): _host_memory(tensor).copy_(tensor) for tensor in send.values()}
    return {peer: copies[id(tensor)] for peer, tensor in send.items()}


def _land(landing: dict[int, Tensor], receive: dict[int, Tensor]) -> None:
    """Copy what arrived in CPU memory to its place."""
    for peer, tensor in receive.items():
        tensor.copy_(landing[peer])
