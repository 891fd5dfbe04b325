"""Owns the buckets of parameters that stay whole: the part that each rank updates, and the all-gather afterwards.

Elements are counted in the order of the parameter's storage, so a channels-last weight is divided like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.layout.layout import BucketLayout, Piece, lay_out, lay_out_whole
from zeroshard.storage.buffers import BufferPool, in_own_storage

BUCKET_NUMEL = 1 << 23
"""The maximum number of elements of a bucket: 32 MiB of fp32, so that a transfer's fixed cost is small."""

SOLO_NUMEL = 1 << 16
"""A parameter with its own storage and at least this many elements is gathered in place, without scratch."""

CACHE_NUMEL = 1 << 17
"""The maximum number of elements of a view, for optimizers that pass over their elements several times.

Parameter, gradient and two states in fp32 then take 2 MiB, which fit into a core's cache. Adam's loop over 25 M
elements on each of two ranks took 43 ms, instead of 60 to 80 ms with whole parameters."""


def in_storage_order(tensor: Tensor) -> Tensor:
    """Return all elements of a dense tensor as a 1-D view of its storage."""
    flat = tensor.detach()
    return flat.as_strided((flat.numel(),), (1,))


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of the storage, in some order of dimensions."""
    expected = 1
    dimensions = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for stride, size in sorted(dimensions):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class OwnView:
    """The part of a parameter that this rank updates: elements `start` to `stop`, 1-D, or the parameter itself (`is_whole`)."""

    parameter: Tensor
    start: int
    stop: int
    value: Tensor
    is_whole: bool

    def follow(self) -> None:
        """Point the view at the parameter's current storage, if user code replaced it (`p.data = x`, as trainers do)."""
        if self.value.data_ptr() != self.parameter.data_ptr() + self.start * self.parameter.element_size():
            self.value.data = _range(self.parameter, self.start, self.stop, self.is_whole)

    def lend(self, gradient: Tensor | None) -> None:
        """Set this view's gradient: its part of the parameter's gradient, or None."""
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"a gradient is sparse ({gradient.layout}), and zeroshard needs dense ones: use sparse=False embeddings."
            )
        if gradient is not None:
            gradient = self.part(gradient)
        self.value.grad = gradient

    def part(self, tensor: Tensor) -> Tensor:
        """Return this view's part of a tensor of the parameter's shape."""
        if self.is_whole:
            return tensor.detach()
        if tensor.stride() != self.parameter.stride():
            tensor = torch.empty_like(self.parameter, dtype=tensor.dtype).copy_(tensor)
        return in_storage_order(tensor)[self.start : self.stop]


@dataclass(frozen=True)
class Home:
    """A parameter's place in a flat buffer."""

    parameter: Tensor
    place: Tensor

    def move_in(self) -> None:
        """Make the parameter a view of its place, with its current value."""
        if self.parameter.data_ptr() != self.place.data_ptr():
            self.place.copy_(self.parameter.detach())
            self.parameter.data = in_own_storage(self.place)


@dataclass(frozen=True)
class ParameterBucket(ABC):
    """A set of parameters, or ranges of them, that are gathered together.

    Attributes:
        parameters: the parameters that the layout's pieces index.
        views: the parts that this rank updates.
    """

    number: int
    layout: BucketLayout
    parameters: Sequence[Tensor]
    views: Sequence[OwnView]
    needs_scratch: ClassVar[bool] = False

    @property
    def members(self) -> list[Tensor]:
        """The parameters that have elements in this bucket."""
        return [self.parameters[index] for index in dict.fromkeys(piece.index for piece in self.layout.pieces)]

    @property
    def is_trainable(self) -> bool:
        """Whether any member requires a gradient."""
        return any(parameter.requires_grad for parameter in self.members)

    @abstractmethod
    def start_gather(self, collectives: Collectives, pool: BufferPool) -> Callable[[], None]:
        """Start to gather every rank's shard and return a function that waits for it."""

    def _parts(self, rank: int) -> Iterator[tuple[Tensor, Piece]]:
        """Yield a view of each parameter range that belongs to a rank's shard, with the corresponding `Piece`."""
        for piece in self.layout.shard_pieces(rank):
            flat = in_storage_order(self.parameters[piece.index])
            yield flat[piece.parameter_start : piece.parameter_start + piece.numel], piece

    @property
    def _label(self) -> str:
        return f"all-gather of parameters [bucket {self.number}]"


@final
@dataclass(frozen=True)
class InPlaceBucket(ParameterBucket):
    """A bucket in one range of storage: of the flat `buffer`, or, if there is none, of one large parameter."""

    buffer: Tensor | None

    def start_gather(self, collectives: Collectives, pool: BufferPool) -> Callable[[], None]:
        """Start one all-gather, without a copy."""
        if self.buffer is not None:
            together = self.buffer[self.layout.start : self.layout.stop]
        else:
            first = self.layout.pieces[0]
            stop = first.parameter_start + first.numel
            together = _range(self.parameters[first.index], first.parameter_start, stop, whole=False)
        rows = together.view(self.layout.world_size, self.layout.shard_numel)
        return collectives.all_gather(rows, self.number, self._label).wait


@final
@dataclass(frozen=True)
class ScratchBucket(ParameterBucket):
    """A bucket of parameters with separate storages."""

    needs_scratch: ClassVar[bool] = True

    def start_gather(self, collectives: Collectives, pool: BufferPool) -> Callable[[], None]:
        """Start one all-gather, through scratch."""
        own = collectives.rank
        count = self.layout.world_size
        scratch = pool.acquire(self.layout.numel, self.parameters[0].dtype)
        rows = scratch.view(count, self.layout.shard_numel)
        for part, piece in self._parts(own):
            rows[own, piece.start : piece.start + piece.numel].copy_(part)
        pending = collectives.all_gather(rows, self.number, self._label)

        def finish() -> None:
            pending.wait()
            for rank in {*range(count)} - {own}:
                for part, piece in self._parts(rank):
                    part.copy_(rows[rank, piece.start : piece.start + piece.numel])
            pool.release(scratch)

        return finish


@final
@dataclass(frozen=True)
class OwnedBucket(ParameterBucket):
    """A bucket of whole parameters, each on one rank; ranks may hold very different numbers of elements."""

    def start_gather(self, collectives: Collectives, pool: BufferPool) -> Callable[[], None]:
        """Send each parameter from its owner directly into the others' storages, without padding."""
        ranks = range(self.layout.world_size)
        with collectives.together():
            pending = [
                collectives.transfer(part, owner, rank, self._label)
                for owner in ranks
                for part, _ in self._parts(owner)
                for rank in ranks
                if rank != owner
            ]

        def finish() -> None:
            for transfer in pending:
                transfer.wait()

        return finish


def lay_out_parameters(
    parameters: Sequence[Tensor], first_number: int, rank: int, world_size: int, *,
    whole: bool, flat: bool, piece_numel: int | None,
) -> tuple[list[ParameterBucket], list[Home]]:  # fmt: skip
    """Divide parameters into buckets. Parameters of one dtype on one device share buckets.

    Args:
        parameters: dense parameters.
        first_number: the number of the first bucket.
        rank, world_size: this rank, and the number of ranks.
        whole: whether to leave parameters undivided.
        flat: whether to make the parameters views of one flat buffer for each dtype and device.
        piece_numel: the maximum number of elements of one view; None for no limit.

    Returns:
        The buckets, and, with `flat`, the places in the flat buffers.
    """
    buckets: list[ParameterBucket] = []
    homes: list[Home] = []
    solo = SOLO_NUMEL
    if flat:  # all parameters are gathered in place anyway: fewer, larger buckets are better
        solo = BUCKET_NUMEL + 1
    for (dtype, device), members in _alike(parameters).items():
        numels = [parameter.numel() for parameter in members]
        if whole:
            unit = lay_out_whole(numels, world_size)
        else:
            unit = lay_out(numels, world_size, BUCKET_NUMEL, solo)
        buffer: Tensor | None = None
        if flat:
            buffer = torch.zeros(unit.numel, dtype=dtype, device=device)
            for parameter, start in zip(members, unit.starts, strict=True):
                homes.append(Home(parameter, buffer.as_strided(parameter.shape, parameter.stride(), start)))
                homes[-1].move_in()
        for layout in unit.buckets:
            views: list[OwnView] = []
            for piece in layout.shard_pieces(rank):
                views += _own_views(members[piece.index], piece, piece_numel or max(piece.numel, 1), whole)
            number = first_number + len(buckets)
            if whole:
                buckets.append(OwnedBucket(number, layout, members, views))
            elif buffer is not None or layout.pieces[0].numel == layout.numel:
                buckets.append(InPlaceBucket(number, layout, members, views, buffer))
            else:
                buckets.append(ScratchBucket(number, layout, members, views))
    return buckets, homes


def _alike(parameters: Sequence[Tensor]) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.layout is not torch.strided:
            raise ValueError(f"a parameter is sparse ({parameter.layout}). Convert it: only dense ones can be sharded.")
        if not is_dense(parameter):
            parameter.data = parameter.data.contiguous()
        alike[parameter.dtype, parameter.device].append(parameter)
    return alike


def _own_views(parameter: Tensor, piece: Piece, most: int, whole: bool) -> Iterator[OwnView]:
    """Yield views of a piece, of at most `most` elements each."""
    stop = piece.parameter_start + piece.numel
    for start in range(piece.parameter_start, stop, most):
        end = min(start + most, stop)
        yield OwnView(parameter, start, end, _range(parameter, start, end, whole), whole)


def _range(parameter: Tensor, start: int, stop: int, whole: bool) -> Tensor:
    if whole:
        return parameter.detach()
    return in_storage_order(parameter)[start:stop]
