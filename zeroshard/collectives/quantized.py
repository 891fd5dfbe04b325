"""Lossy reductions: the contributions of other ranks arrive as blocks of small integers, each block with a scale.

The sum over ranks is computed in fp32 at least, in rank order. This rank's own contribution is exact.

A block has 256 elements; the last block of a row may be shorter. The scale is the largest magnitude over the largest code, in
fp32 (fp64 for fp64). An element arrives as its code times the scale, which is off by half a scale at most. A block with an
infinite or NaN element arrives as all NaN, so checks for such values find it.

A row is sent as its scales, followed by its codes: int8, or two int4 in a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, Work, chunks, sum_into

BITS: dict[str | None, int | None] = {None: None, "int8": 8, "int4": 4}
"""The number of bits of a code, by the name of a lossy dtype; None sends rows as they are."""
BLOCK_NUMEL = 256
"""The number of elements of a block: a divisor of CHUNK_NUMEL, so that a chunk has whole blocks."""


@dataclass(eq=False)
class QuantizedGradients:
    """The reductions of a transport that sends gradients as codes of `_bits` bits."""

    _inner: Collectives
    _bits: int

    def workspace_numel(self, rows: Tensor) -> int:
        # The codes to send, and those received.
        nbytes = 2 * len(rows) * Codes(self._bits, rows.dtype).nbytes(rows.shape[1])
        return -(-nbytes // rows.dtype.itemsize)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        codes = Codes(self._bits, rows.dtype)
        own = self._inner.shard
        nbytes = codes.nbytes(rows.shape[1])
        room = workspace.view(torch.uint8)[: 2 * len(rows) * nbytes].view(2, len(rows), nbytes)
        outgoing, incoming = room.unbind()
        if rows.device.type == "cpu":  # row by row, in the CPU's caches
            for place, row in enumerate(rows):
                if place != own:
                    codes.encode(row, outgoing[place])
        else:  # few launches, however many ranks there are; this rank's own row is not sent
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

    @property
    def parts(self) -> Sequence[Work]:
        return (self._work,)

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._work.wait()
        row = self._own_row
        for low, high in chunks(row):
            own = row[low:high].to(self._codes.wide)
            if row.device.type == "cpu":  # row by row, in the CPU's caches
                parts = []
                for place, coded in enumerate(self._incoming):
                    parts.append(own if place == self._own else self._codes.decode(coded, row.numel(), low, high))
            else:  # few launches, however many ranks there are; nothing has arrived in this rank's own row
                parts = list(self._codes.decode(self._incoming, row.numel(), low, high).unbind())
                parts[self._own] = own
            sum_into(parts, self._divisor, out[low:high], accumulate)


@dataclass(frozen=True)
class Codes:
    """The encoding of rows of one dtype as bytes, with codes of 8 or 4 bits."""

    bits: int
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scales and of the arithmetic."""
        return torch.promote_types(self.dtype, torch.float32)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a row, padded to a multiple of a scale's size to align the next row."""
        unit = self.wide.itemsize
        blocks = -(-numel // BLOCK_NUMEL)
        codes = -(-numel * self.bits // 8)
        return (blocks + -(-codes // unit)) * unit

    def encode(self, row: Tensor, out: Tensor) -> None:
        """Write a row [n] to `out`, uint8 [nbytes(n)]; or several rows [..., n] to [..., nbytes(n)], in the same launches."""
        scales, codes, padding = self._parts(out, row.shape[-1])
        padding.zero_()
        top = (1 << (self.bits - 1)) - 1  # the largest code; the smallest is its negative
        limits = torch.finfo(self.wide)
        for low, high in chunks(row):
            for start, blocks in _cut(row[..., low:high].to(self.wide)):
                largest = blocks.abs().amax(-1)
                # A scale of zero would have no quotients, and the top code times too large a scale would be infinite.
                scale = (largest / top).clamp_(limits.tiny, limits.max / top * (1 - 2 * limits.eps))
                first = (low + start) // BLOCK_NUMEL
                here = scales[..., first : first + blocks.shape[-2]]
                here.copy_(torch.where(largest.isfinite(), scale, float("nan")))
                quotients = (blocks / here[..., None]).round_().nan_to_num_(0.0).clamp_(-top, top)
                coded = quotients.to(torch.int8).flatten(-2).view(torch.uint8)
                if self.bits == 4:
                    nibbles = coded & 15
                    if nibbles.shape[-1] % 2:
                        nibbles = torch.cat((nibbles, nibbles.new_zeros(*nibbles.shape[:-1], 1)), -1)
                    pairs = nibbles.unflatten(-1, (-1, 2))
                    coded = pairs[..., 0] | pairs[..., 1] << 4
                at = (low + start) * self.bits // 8
                codes[..., at : at + coded.shape[-1]].copy_(coded)

    def decode(self, coded: Tensor, numel: int, low: int = 0, high: int | None = None) -> Tensor:
        """Return elements [low, high) of a row of `numel`, in the wide dtype. `low` begins a block; `high` ends one, or the row.

        Several rows [..., nbytes(numel)] take the same number of launches.
        """
        scales, codes, _ = self._parts(coded, numel)
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

    def _parts(self, coded: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scales of a row, its codes, and the padding after them."""
        cut_at = -(-numel // BLOCK_NUMEL) * self.wide.itemsize
        used = cut_at + -(-numel * self.bits // 8)
        return coded[..., :cut_at].view(self.wide), coded[..., cut_at:used], coded[..., used:]


def _cut(part: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, view [..., blocks, elements]): once for all whole blocks, and once for a shorter last one."""
    whole = part.shape[-1] // BLOCK_NUMEL * BLOCK_NUMEL
    if whole:
        yield 0, part[..., :whole].unflatten(-1, (-1, BLOCK_NUMEL))
    if whole < part.shape[-1]:
        yield whole, part[..., whole:].unsqueeze(-2)
