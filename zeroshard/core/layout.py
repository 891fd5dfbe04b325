"""Owns the layout of elements over ranks: integers only, no tensors and no state of a rank.

A unit's parameters follow one another in one flat buffer. The buffer is cut into buckets, and each bucket into
`world_size` equal shards (world_size 2, p = padding):

    unit       |----- weight (large) -----|-- weight (large) --|- bias -|- norm -|pp|
    buckets    |         bucket 0         |      bucket 1      |      bucket 2      |
    shards     |   rank 0   |   rank 1    |  rank 0  |  rank 1 |  rank 0  |  rank 1 |

An optimizer that needs whole matrices (Muon) gets a layout that does not cut parameters (see `lay_out_whole`).

The layout depends only on shapes, `world_size`, `bucket_numel` and the alignment of cuts, never on the policy, so an optimizer
always gets the same 1-D views. The last bits of a fused kernel's results depend on tensor boundaries, so these bits are equal, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 16
"""The start of every parameter and the size of every shard are padded to a multiple of this number of elements. In fp32 this is
64 bytes, the size of a cache line and of a vector register. In 16 bits it is 32 bytes, and an accelerator's matrix products
need an alignment of 16 bytes."""

SOLO_NUMEL = 1 << 20
"""A parameter that has at least this many elements, and does not need padding in its shards, has separate buckets.
If the transport and the dtype allow it, its gradient is sent from the tensor that autograd returned, without a copy into
a buffer."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of elements, `start` to `stop`, of the flattened parameter `name`."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, start: int, stop: int) -> Span | None:
        """Return the elements that also lie between `start` and `stop`, or None."""
        low = max(self.start, start)
        high = min(self.stop, stop)
        if low >= high:
            return None
        return Span(self.name, low, high)

    def within(self, outer: int) -> slice:
        """Return the slice for these elements of a tensor that begins at element `outer`."""
        return slice(self.start - outer, self.stop - outer)

    def __str__(self) -> str:
        return f"elements {self.start} to {self.stop} of {self.name}"


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in one range of the flat buffer. Offsets are in elements."""

    index: int
    """The number of the parameter in the unit."""
    parameter_start: int
    """The start in the flattened parameter."""
    start: int
    """The start in the requested range."""
    numel: int


@dataclass(frozen=True)
class BucketLayout:
    """A segment of the unit's flat buffer that is communicated at once."""

    start: int
    numel: int
    world_size: int
    pieces: tuple[Piece, ...]
    """The parameters' pieces, in the order of their starts."""

    @cached_property
    def stop(self) -> int:
        return self.start + self.numel

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of the bucket that belong to no parameter."""
        gaps = []
        used = 0
        for piece in self.pieces:
            if used < piece.start:
                gaps.append((used, piece.start))
            used = piece.start + piece.numel
        if used < self.numel:
            gaps.append((used, self.numel))
        return tuple(gaps)

    def shard_pieces(self, shard: int) -> tuple[Piece, ...]:
        """Return the pieces in one shard, with `start` counted from the start of the shard."""
        low = shard * self.shard_numel
        high = low + self.shard_numel
        found = []
        for piece in self.pieces:
            start = max(piece.start, low)
            stop = min(piece.start + piece.numel, high)
            if start < stop:
                offset = piece.parameter_start + (start - piece.start)
                found.append(Piece(piece.index, offset, start - low, stop - start))
        return tuple(found)


@dataclass(frozen=True)
class UnitLayout:
    """The places of a unit's parameters in its flat buffer, and the cuts between buckets."""

    numels: tuple[int, ...]
    starts: tuple[int, ...]
    buckets: tuple[BucketLayout, ...]

    @cached_property
    def numel(self) -> int:
        return self.buckets[-1].stop if self.buckets else 0

    def owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, start, stop) for each shard that holds elements `start` to `stop` of the flattened parameter `index`."""
        for bucket in self.buckets:
            if any(piece.index == index for piece in bucket.pieces):
                for shard in range(bucket.world_size):
                    for piece in bucket.shard_pieces(shard):
                        if piece.index == index:
                            yield shard, piece.parameter_start, piece.parameter_start + piece.numel

    @cached_property
    def order(self) -> list[int]:
        """The parameters that have elements, in the order of their places."""
        return sorted((i for i, numel in enumerate(self.numels) if numel), key=self.starts.__getitem__)


def lay_out(
    numels: Sequence[int], world_size: int, bucket_numel: int, solo_numel: int = SOLO_NUMEL, alignment: int = ALIGNMENT
) -> UnitLayout:  # fmt: skip
    """Place parameters of the given sizes and cut the buckets.

    Args:
        numels: the elements of each parameter; 0 is allowed.
        world_size: the number of shards in a bucket.
        bucket_numel: the maximum number of elements in a bucket (at least `alignment` a shard); larger parameters span several.
        solo_numel: see `SOLO_NUMEL`.
        alignment: parameters start, and shards are cut, only at multiples of this, so a parameter is cut at multiples of it, too.
    """
    quantum = world_size * alignment
    limit = max(bucket_numel // quantum, 1) * quantum
    # Solo parameters first: the others then fill shared buckets without gaps.
    solo = [i for i, numel in enumerate(numels) if numel >= solo_numel and numel % quantum == 0]
    shared = sorted({*range(len(numels))}.difference(solo))
    starts = [0] * len(numels)
    buckets: list[BucketLayout] = []
    cursor = 0  # where the open bucket starts
    fill = 0  # elements in the open bucket
    pieces: list[Piece] = []

    def close() -> None:
        nonlocal cursor, fill
        if fill:
            numel = -(-fill // quantum) * quantum
            buckets.append(BucketLayout(cursor, numel, world_size, tuple(pieces)))
            pieces.clear()
            cursor += numel
            fill = 0

    for order, index in enumerate(solo + shared):
        numel = numels[index]
        done = 0
        fill = -(-fill // alignment) * alignment
        if (fill and (order < len(solo) or fill + numel > limit)) or order == len(solo):
            close()
        starts[index] = cursor + fill
        while done < numel:
            part = min(numel - done, limit - fill)
            pieces.append(Piece(index, done, fill, part))
            done += part
            fill += part
            if done < numel:
                close()
    close()
    return UnitLayout(tuple(numels), tuple(starts), tuple(buckets))


def lay_out_whole(numels: Sequence[int], world_size: int, alignment: int = ALIGNMENT) -> UnitLayout:
    """Place parameters of the given sizes, at multiples of `alignment`, so that each one lies in a single shard.

    The unit is one bucket. The largest remaining parameter goes to the rank that holds the fewest elements. All shards have the
    same size, so an uneven division adds padding: a unit with a single large matrix takes `world_size` times its size.
    """
    loads = [0] * world_size
    homes = {}
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        rank = loads.index(min(loads))
        homes[index] = (rank, loads[rank])
        loads[rank] += -(-numels[index] // alignment) * alignment
    starts = [homes[index][0] * max(loads) + homes[index][1] for index in range(len(numels))]
    in_order = sorted((start, index) for index, start in enumerate(starts) if numels[index])
    pieces = tuple(Piece(index, 0, start, numels[index]) for start, index in in_order)
    buckets: tuple[BucketLayout, ...] = ()
    if pieces:
        buckets = (BucketLayout(0, max(loads) * world_size, world_size, pieces),)
    return UnitLayout(tuple(numels), tuple(starts), buckets)
