"""Lossy reductions: the contributions of other ranks arrive as codes (see codes.py).

The sum over ranks is made in fp32 at least, in rank order. This rank's own contribution is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, Work, sum_into
from zeroshard.collectives.codes import Codes, chunk_numel

BITS = {"int8": 8, "int4": 4}


class QuantizedGradients:
    """The reductions of a transport, lossy.

    Args:
        inner: the transport, which sends the codes.
        bits: the number of bits of a code.
    """

    def __init__(self, inner: Collectives, bits: int) -> None:
        self._inner = inner
        self._bits = bits

    def workspace_numel(self, rows: Tensor) -> int:
        """See `Collectives`."""
        # The codes to send, and those received.
        nbytes = 2 * len(rows) * Codes(self._bits, rows.dtype).nbytes(rows.shape[1])
        return -(-nbytes // rows.dtype.itemsize)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        """See `Collectives`."""
        codes = Codes(self._bits, rows.dtype)
        own = self._inner.shard
        nbytes = codes.nbytes(rows.shape[1])
        room = workspace.view(torch.uint8)[: 2 * len(rows) * nbytes].view(2, len(rows), nbytes)
        outgoing, incoming = room.unbind()
        if rows.device.type == "cpu":  # which works in its caches, row by row
            for place, row in enumerate(rows):
                if place != own:
                    codes.encode(row, outgoing[place])
        else:  # few launches, however many ranks there are; nobody sends this rank's own row
            codes.encode(rows, outgoing)
        work = self._inner.scatter_rows(outgoing, incoming, bucket, f"rounded {label}")
        return _RoundedMean(work, codes, rows[own], incoming, own, divisor)


class _RoundedMean(Reduction):
    def __init__(self, work: Work, codes: Codes, own_row: Tensor, incoming: Tensor, own: int, divisor: float) -> None:
        self._work = work
        self._codes = codes
        self._own_row = own_row
        self._incoming = incoming
        self._own = own
        self._divisor = divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._work.wait()
        codes = self._codes
        row = self._own_row
        step = chunk_numel(row)
        numel = row.numel()
        for low in range(0, numel, step):
            high = min(low + step, numel)
            parts = self._decoded(low, high)
            parts[self._own] = row[low:high].to(codes.wide)
            sum_into(parts, self._divisor, out[low:high], accumulate)

    def _decoded(self, low: int, high: int) -> list[Tensor]:
        """Return elements [low, high) of each rank's row. This rank's own is undefined."""
        numel = self._own_row.numel()
        if self._incoming.device.type != "cpu":
            return list(self._codes.decode(self._incoming, numel, low, high).unbind())
        rows = []
        for place, coded in enumerate(self._incoming):
            rows.append(self._own_row if place == self._own else self._codes.decode(coded, numel, low, high))
        return rows

    @property
    def is_released(self) -> bool:
        return self._work.is_released

    def wait_released(self) -> None:
        self._work.wait_released()
