"""Owns the lossy wires: collectives around others, of which some bring rounded values (see codes). Made by choose, where the
policy's `wire` asks for it.

    QuantizedWeights    gathers of parameters to compute with. Every row goes through codes, this rank's own too: all ranks compute
                        with the same values. `all_gather` stays exact
    QuantizedGradients  reductions. What other ranks contribute comes as codes, and the sum over ranks is made in fp32 at least, in
                        rank order; what this rank contributes is exact
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Pending, PendingReduction, PendingRows
from zeroshard.collectives.codes import Codes, chunk_numel
from zeroshard.collectives.reduction import sum_into

BITS = {"int8": 8, "int4": 4}


class Wrapped(Collectives):
    """What others do, they do."""

    def __init__(self, inner: Collectives) -> None:
        # Not the base's: counts and clocks are the inner one's.
        self.inner, self.predivide_factor = inner, inner.predivide_factor
        self.rank, self.world_size = inner.rank, inner.world_size
        self.sends, self.launches_together = inner.sends, inner.launches_together
        self.rounds_each_sum, self.reads_in_place = inner.rounds_each_sum, inner.reads_in_place
        self.travels, self.arrives_by_itself = inner.travels, inner.arrives_by_itself

    @property
    def sent(self) -> Counter[str]:  # type: ignore[override]
        return self.inner.sent

    @property
    def measure(self) -> Callable[[str], AbstractContextManager[None]]:
        return self.inner.measure

    @measure.setter
    def measure(self, measure: Callable[[str], AbstractContextManager[None]]) -> None:
        self.inner.measure = measure

    @property
    def shard(self) -> int:
        return self.inner.shard

    @property
    def inside(self) -> Collectives:
        return self if self.inner.inside is self.inner else self.inner.inside

    @property
    def across(self) -> Collectives | None:
        return self.inner.across

    @property
    def buffers_nbytes(self) -> int:
        return self.inner.buffers_nbytes

    def together(self) -> AbstractContextManager[None]:
        return self.inner.together()

    def owner(self, shard: int) -> int:
        return self.inner.owner(shard)

    def by_shard(self, by_rank: Tensor) -> Tensor:
        return self.inner.by_shard(by_rank)

    def shareable(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inner.shareable(numel, dtype)

    def is_shareable(self, tensor: Tensor) -> bool:
        return self.inner.is_shareable(tensor)

    def discard(self, memory: Tensor) -> None:
        self.inner.discard(memory)

    def all_gather(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        return self.inner.all_gather(rows, bucket, label, resting)

    def wait_readers(self, memory: Tensor | None = None) -> None:
        self.inner.wait_readers(memory)

    def workspace_numel(self, rows: Tensor) -> int:
        return self.inner.workspace_numel(rows)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        return self.inner.reduce_scatter(rows, workspace, bucket, label)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.inner.broadcast(tensor, source)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        return self.inner.exchange(data, label)

    def exchange_values(self, value: Tensor | None, data: bytes, label: str) -> tuple[Tensor, list[bytes]]:
        return self.inner.exchange_values(value, data, label)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        return self.inner.transfer(tensor, source, target, label)

    def operation(self, name: str) -> AbstractContextManager[None]:
        return self.inner.operation(name)

    def close(self) -> None:
        self.inner.close()


def unwrapped(collectives: Collectives) -> Collectives:
    """Those that send."""
    return unwrapped(collectives.inner) if isinstance(collectives, Wrapped) else collectives


# ---------------------------------------------------------------------- parameters


class QuantizedWeights(Wrapped):
    """See the module's docstring."""

    rounds_parameters = True

    def __init__(self, inner: Collectives, bits: int) -> None:
        super().__init__(inner)
        self._bits = bits
        self._in_flight: weakref.WeakSet[_RoundedGather] = weakref.WeakSet()

    @cached_property
    def _inside(self) -> Collectives:
        return QuantizedWeights(self.inner.inside, self._bits)

    @property
    def inside(self) -> Collectives:
        return self if self.inner.inside is self.inner else self._inside

    @property
    def buffers_nbytes(self) -> int:
        inside = 0 if self.inside is self else sum(one.nbytes for one in self._inside_in_flight)
        return self.inner.buffers_nbytes + sum(one.nbytes for one in self._in_flight) + inside

    @property
    def _inside_in_flight(self) -> list[_RoundedGather]:
        return list(self._inside._in_flight) if isinstance(self._inside, QuantizedWeights) else []

    def gather_to_compute(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        codes = Codes(self._bits, rows.dtype)
        coded = torch.empty(len(rows), codes.nbytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
        codes.encode(rows[self.shard] if resting is None else resting, coded[self.shard])
        gather = _RoundedGather(self.inner.all_gather(coded, bucket, f"rounded {label}"), codes, coded, rows)
        self._in_flight.add(gather)
        return gather

    def round_to_compute(self, rows: Tensor) -> None:
        codes = Codes(self._bits, rows.dtype)
        coded = torch.empty(codes.nbytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
        for row in rows:
            codes.encode(row, coded)
            codes.decode_into(coded, row)


class _RoundedGather(Pending):
    def __init__(self, gather: Pending, codes: Codes, coded: Tensor, rows: Tensor) -> None:
        self._gather, self._codes, self._coded, self._rows = gather, codes, coded, rows
        self._is_over = False

    @property
    def nbytes(self) -> int:
        """Of the codes, as long as they are needed."""
        return 0 if self._is_over else self._coded.nbytes

    def wait(self) -> None:
        self._gather.wait()  # which raises again where it did before
        if not self._is_over:
            for coded, row in zip(self._coded, self._rows, strict=True):
                self._codes.decode_into(coded, row)
            self._end()

    def abandon(self) -> None:
        self._gather.abandon()
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._coded = self._rows = self._coded.new_empty(0)


# ---------------------------------------------------------------------- gradients


class QuantizedGradients(Wrapped):
    """See the module's docstring."""

    def __init__(self, inner: Collectives, bits: int) -> None:
        super().__init__(inner)
        self._bits = bits

    def workspace_numel(self, rows: Tensor) -> int:
        # What goes out, and what comes in.
        nbytes = 2 * len(rows) * Codes(self._bits, rows.dtype).nbytes(rows.shape[1])
        return -(-nbytes // rows.dtype.itemsize)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        codes, own = Codes(self._bits, rows.dtype), self.inner.shard
        nbytes = codes.nbytes(rows.shape[1])
        room = workspace.view(torch.uint8)[: 2 * len(rows) * nbytes].view(2, len(rows), nbytes)
        outgoing, incoming = room.unbind()
        for place, row in enumerate(rows):
            if place != own:
                codes.encode(row, outgoing[place])
        pending = self.inner.scatter_rows(outgoing, incoming, bucket, f"rounded {label}")
        return _RoundedMean(pending, codes, rows[own], incoming, own, self._divisor)


class _RoundedMean(PendingReduction):
    def __init__(
        self, pending: PendingRows, codes: Codes, own_row: Tensor, incoming: Tensor, own: int, divisor: float
    ) -> None:
        self._pending, self._codes, self._own_row, self._incoming = pending, codes, own_row, incoming
        self._own, self._divisor = own, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._pending.wait()
        codes, row = self._codes, self._own_row
        step, numel = chunk_numel(row), row.numel()
        for low in range(0, numel, step):
            high = min(low + step, numel)
            parts = [
                row[low:high].to(codes.wide) if place == self._own else codes.decode(coded, numel, low, high)
                for place, coded in enumerate(self._incoming)
            ]
            sum_into(parts, self._divisor, out[low:high], accumulate)

    @property
    def has_readers(self) -> bool:
        return self._pending.has_readers

    def wait_readers(self) -> None:
        self._pending.wait_readers()
