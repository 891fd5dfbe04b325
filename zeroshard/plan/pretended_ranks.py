"""Owns the other ranks of a dry run: nothing is sent, everything is counted. A member of the family of collectives.

[Note: ranks and shards]
Where every rank updates everything (an unsharded optimizer), the engine makes a view for each rank's shard of each parameter, and
a plan for 1,024 ranks would take 1,024 times as long, to say the same: what one rank holds is the whole. There the engine is told
of one shard, and scratch and bytes are counted for all ranks. (Few ranks are told as they are, with their padding.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Pending, PendingReduction
from zeroshard.collectives.reduction import sum_into
from zeroshard.plan.clock import Arrival, Line
from zeroshard.plan.ledger import BUFFERS, Ledger

FEW = 4
"""Ranks of which the engine is told in any case. See [Note: ranks and shards]."""


class _Arriving(Pending):
    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals

    def wait(self) -> None:
        for arrival in self._arrivals:
            arrival.wait()


class _Sum(PendingReduction):
    """The backend has summed: one row arrives, as with NCCL. With a divisor of 1 it is the mean already."""

    def __init__(self, arriving: Pending, total: Tensor, divisor: float) -> None:
        self._arriving, self._total, self._divisor = arriving, total, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._arriving.wait()
        own = out[: self._total.numel()]
        if self._divisor == 1.0:
            own.add_(self._total) if accumulate else own.copy_(self._total)
        elif accumulate:
            own.add_(self._total.to(out.dtype).div_(self._divisor))
        else:
            own.copy_(self._total).div_(self._divisor)


class _Rows(PendingReduction):
    """Every rank's row arrives, to be summed here, as over gloo."""

    def __init__(self, arriving: Pending, rows: list[Tensor], divisor: float) -> None:
        self._arriving, self._rows, self._divisor = arriving, rows, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._arriving.wait()
        sum_into(self._rows, self._divisor, out, accumulate)


class PretendedRanks(Collectives):
    """Rank 0 of `ranks`, of which the others exist on paper: they say what this one says.

    Args:
        shards: what the engine is told that the ranks are; see [Note: ranks and shards].
        sums: the backend brings a sum (native), and not every rank's row (gloo). It rounds each, and launches several as one.
        link: to the other ranks.

    Attributes:
        calls: how often each collective was called.
    """

    def __init__(
        self, ranks: int, shards: int, predivide_factor: float, ledger: Ledger, link: Line, *, sums: bool
    ) -> None:
        super().__init__(predivide_factor)
        self.rank, self.ranks, self.world_size, self._sums = 0, ranks, shards, sums
        self.rounds_each_sum = self.launches_together = sums
        self._ledger, self._link = ledger, link
        self.calls: Counter[str] = Counter()

    def shareable(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._ledger.purpose(BUFFERS):
            return torch.zeros(numel, dtype=dtype)

    def _send(self, kind: str, nbytes: int) -> _Arriving:
        """This rank's part goes to every other."""
        if self.ranks == 1:
            return _Arriving(())
        self.sent[kind] += nbytes
        self.calls[kind] += 1
        return _Arriving((self._link.send(nbytes),))

    def _to_others(self, rows: Tensor) -> int:
        """Bytes of a rank's row, for each of the others."""
        return rows.nbytes * (self.ranks - 1) // self.ranks

    def all_gather(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        return self._send("all_gather", self._to_others(rows))

    def workspace_numel(self, rows: Tensor) -> int:
        if self.ranks == 1:
            return 0
        own = rows.numel() // self.ranks
        return own if self._sums else (self.ranks - 1) * own

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        arriving = self._send("reduce_scatter", self._to_others(rows))
        if self.ranks > 1 and (self._sums or self.world_size < self.ranks):
            divisor = 1.0 if self._sums and self.predivide_factor == 1.0 else self.ranks / self.predivide_factor
            return _Sum(arriving, workspace[: rows.numel() // self.ranks], divisor)
        others = list(workspace.view(self.world_size - 1, rows.shape[1])) if self.world_size > 1 else []
        return _Rows(arriving, [rows[0], *others], self._divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if self.ranks > 1 and tensor.numel():
            self._send("broadcast", tensor.nbytes).wait()

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        self._send("exchange", len(data) * (self.ranks - 1)).wait()
        return [data] * self.world_size

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        return self._send("transfer", tensor.nbytes if source == 0 else 0)
