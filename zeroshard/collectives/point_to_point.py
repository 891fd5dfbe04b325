"""Owns pairwise transfers over gloo, whose own reduce-scatter moves twice the bytes that are needed."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.collectives.base import Pending, PendingReduction
from zeroshard.collectives.grouped import Grouped, Transfer
from zeroshard.collectives.reduction import sum_into
from zeroshard.errors import CollectiveError

_SEQUENCE_BITS = 8


class PointToPoint(Grouped):
    """Pairwise transfers over gloo."""

    _backend = "gloo"

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, predivide_factor: float) -> None:
        super().__init__(parent, device, predivide_factor)
        self._sequence: Counter[int] = Counter()

    def _tag(self, bucket: int, kind: int) -> int:
        """A number that only the same operation of the same bucket carries, on every rank."""
        channel = bucket * 3 + kind
        self._sequence[channel] += 1
        return channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)

    def _peers(self) -> list[int]:
        # Each rank starts with its neighbour, so that not everybody sends to rank 0 first.
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _transfer(
        self, send: dict[int, Tensor], receive: dict[int, Tensor], tag: int, kind: str, label: str
    ) -> Transfer:
        # The group's own methods: dist.isend and irecv cost 20 times their microseconds in checks, 200 times a step.
        try:
            works = [self._group.recv([tensor], peer, tag) for peer, tensor in receive.items()]
            works += [self._group.send([tensor], peer, tag) for peer, tensor in send.items()]
        except RuntimeError as error:
            raise CollectiveError(self.report(label, error)) from error
        return Transfer(self, works, kind, label)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        peers = self._peers()
        own = rows[self.rank]
        self.sent["all_gather"] += own.nbytes * len(peers)
        send = dict.fromkeys(peers, own)
        return self._transfer(send, {peer: rows[peer] for peer in peers}, self._tag(bucket, 0), "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return (self.world_size - 1) * rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        peers = self._peers()
        received = dict(zip(peers, workspace.view(len(peers), rows.shape[1]), strict=True))
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(peers)
        send = {peer: rows[peer] for peer in peers}
        transfer = self._transfer(send, received, self._tag(bucket, 1), "reduce", label)
        contributions = [received[rank] if rank != self.rank else rows[rank] for rank in range(self.world_size)]
        return _PairwiseMean(transfer, contributions, self._divisor)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        peers = self._peers()
        received = {peer: torch.empty_like(own) for peer in peers}
        self.sent["exchange"] += own.nbytes * len(peers)
        self._transfer(dict.fromkeys(peers, own), received, self._tag(0, 2), "exchange", label).wait()
        received[self.rank] = own
        return [received[rank].numpy().tobytes() for rank in range(self.world_size)]


class _PairwiseMean(PendingReduction):
    def __init__(self, transfer: Transfer, contributions: list[Tensor], divisor: float) -> None:
        self._transfer, self._contributions, self._divisor = transfer, contributions, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._transfer.wait()
        sum_into(self._contributions, self._divisor, out, accumulate)
