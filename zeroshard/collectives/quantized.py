"""Lossy reductions: the contributions of other ranks arrive as codes, in blocks of small integers with a scale each.

The sum over ranks is made in fp32 at least, in rank order. This rank's own contribution is exact.

A block is 256 elements; the last of a row may be shorter. Its scale is the largest magnitude over the largest code, in fp32 (fp64
for fp64), and an element is its code times the scale: off by half a scale at most. A block with an infinite or NaN
element arrives as all NaN, so checks for such values find them.

A row travels as its scales, then its codes: int8, or two int4 in a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.collectives.base import CHUNK_NUMEL, Collectives, Reduction, Work, sum_into

BITS: dict[str | None, int | None] = {None: None, "int8": 8, "int4": 4}
"""By the name of a lossy dtype, the number of bits of a code; None sends rows as they are."""
BLOCK_NUMEL = 256


@dataclass(eq=False)
class QuantizedGradients:
    """The reductions of a transport, which sends codes of so many bits."""

    _inner: Collectives
    _bits: int

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


@dataclass(eq=False)
class _RoundedMean(Reduction):
    _work: Work
    _codes: Codes
    _own_row: Tensor
    _incoming: Tensor
    _own: int
    _divisor: float

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._work.wait()
        row = self._own_row
        for low, high in _chunks(row):
            parts = self._decoded(low, high)
            parts[self._own] = row[low:high].to(self._codes.wide)
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


@dataclass(frozen=True)
class Codes:
    """The encoding of rows of one dtype as bytes.

    Attributes:
        bits: the number of bits of a code, 8 or 4.
        dtype: the dtype of the rows.
    """

    bits: int
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scales and of the arithmetic."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def top(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int) -> int:
        """The bytes of a row. Whole scales, so that rows can lie one after another."""
        unit = self.wide.itemsize
        codes = -(-numel * self.bits // 8)
        return _blocks(numel) * unit + -(-codes // unit) * unit

    def encode(self, row: Tensor, out: Tensor) -> None:
        """Write a row [n] to `out`, uint8 [nbytes(n)]; or several [..., n] to [..., nbytes(n)], in as many launches."""
        numel = row.shape[-1]
        scales, codes = self._parts(out, numel)
        out[..., self._used(numel) :].zero_()
        for low, high in _chunks(row):
            part = row[..., low:high].to(self.wide)
            first = low // BLOCK_NUMEL
            for start, blocks in _cut(part):
                at = first + start // BLOCK_NUMEL
                self._write(blocks, scales[..., at : at + blocks.shape[-2]], codes, low + start)

    def _write(self, blocks: Tensor, scales: Tensor, codes: Tensor, start: int) -> None:
        limits = torch.finfo(self.wide)
        largest = blocks.abs().amax(-1)
        # Neither end may fall off: a scale of zero has no quotients, and the top code times the scale is no inf.
        scale = (largest / self.top).clamp_(limits.tiny, limits.max / self.top * (1 - 2 * limits.eps))
        scales.copy_(torch.where(largest.isfinite(), scale, float("nan")))
        quotients = (blocks / scales[..., None]).round_().nan_to_num_(0.0).clamp_(-self.top, self.top)
        small = quotients.to(torch.int8).flatten(-2)
        if self.bits == 8:
            codes[..., start : start + small.shape[-1]].copy_(small.view(torch.uint8))
            return
        nibbles = small.view(torch.uint8) & 15
        if nibbles.shape[-1] % 2:
            nibbles = torch.cat((nibbles, nibbles.new_zeros(*nibbles.shape[:-1], 1)), -1)
        pairs = nibbles.unflatten(-1, (-1, 2))
        codes[..., start // 2 : start // 2 + pairs.shape[-2]].copy_(pairs[..., 0] | pairs[..., 1] << 4)

    def decode(self, coded: Tensor, numel: int, low: int = 0, high: int | None = None) -> Tensor:
        """Return elements [low, high) of a row of `numel`, in the wide dtype. `low` begins a block; `high` ends one, or the row.

        Of several rows [..., nbytes(numel)] alike, in as many launches.
        """
        scales, codes = self._parts(coded, numel)
        high = numel if high is None else high
        if self.bits == 8:
            values = codes[..., low:high].view(torch.int8).to(self.wide)
        else:
            pairs = codes[..., low // 2 : -(-high // 2)].view(torch.int8)
            # Shifts of signed numbers keep the sign: up, and down again.
            both = torch.stack(((pairs << 4) >> 4, pairs >> 4), -1)
            values = both.flatten(-2)[..., : high - low].to(self.wide)
        first = low // BLOCK_NUMEL
        for start, blocks in _cut(values):
            at = first + start // BLOCK_NUMEL
            blocks.mul_(scales[..., at : at + blocks.shape[-2], None])
        return values

    def _used(self, numel: int) -> int:
        return _blocks(numel) * self.wide.itemsize + -(-numel * self.bits // 8)

    def _parts(self, coded: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        cut_at = _blocks(numel) * self.wide.itemsize
        return coded[..., :cut_at].view(self.wide), coded[..., cut_at : self._used(numel)]


def _chunks(row: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of elements of a row that are worked on at once: whole blocks."""
    step = CHUNK_NUMEL if row.device.type == "cpu" else max(row.shape[-1], 1)
    return ((low, min(low + step, row.shape[-1])) for low in range(0, row.shape[-1], step))


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL)


def _cut(part: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield starts, and views [..., blocks, block numel]: of the whole blocks, and of the rest as one."""
    whole = part.shape[-1] // BLOCK_NUMEL * BLOCK_NUMEL
    if whole:
        yield 0, part[..., :whole].unflatten(-1, (-1, BLOCK_NUMEL))
    if whole < part.shape[-1]:
        yield whole, part[..., whole:].unsqueeze(-2)
