"""Owns the buckets of parameters that stay whole: the part that each rank updates, and the all-gather afterwards.

Elements are counted in the order of the parameter's storage, so a channels-last weight is divided like any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroshard.core.layout import BucketLayout, Piece, lay_out, lay_out_whole
from zeroshard.core.storage.buffers import BufferPool, in_own_storage
from zeroshard.core.transport.base import Collectives, Work
from zeroshard.errors import UsageError

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
    for stride, size in sorted(_order(tensor.stride(), tensor.shape)):
        if stride != expected:
            return False
        expected *= size
    return True


def finish_all(works: Iterable[Work]) -> None:
    """Wait for operations that were started together."""
    for work in works:
        work.wait()


def _order(strides: Sequence[int], shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return (stride, size) of each dimension, except those of size 1, whose strides have no meaning."""
    return [(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]


class OwnView:
    """The part of a parameter that this rank updates: elements `start` to `stop`, 1-D, or the parameter itself (`is_whole`).

    Attributes:
        value: the tensor that the local optimizer updates.
    """

    def __init__(self, parameter: Tensor, start: int, stop: int, *, is_whole: bool) -> None:
        self.parameter = parameter
        self.start = start
        self.stop = stop
        self.is_whole = is_whole
        self.value = self.part(parameter)

    def follow(self) -> None:
        """Point the view at the parameter's current storage, if user code replaced it (`p.data = x`, as trainers do)."""
        if self.value.data_ptr() != self.parameter.data_ptr() + self.start * self.parameter.element_size():
            self.value.data = self.part(self.parameter)

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


class FollowedParameter:
    """A parameter whose storage user code may replace.

    Args:
        place: the parameter's place in a flat buffer, if there is one.
    """

    def __init__(self, parameter: Tensor, place: Tensor | None) -> None:
        self.parameter = parameter
        self._place = place
        self._kind = parameter.device, parameter.dtype
        self._strides = parameter.stride()

    def follow(self, *, has_order: bool) -> None:
        """Move the parameter into its place, with its current value, if it is elsewhere.

        Args:
            has_order: whether there are states in the order of the storage, so that the order must not change.

        Raises:
            UsageError: the parameter has another device, dtype or memory format.
        """
        parameter = self.parameter
        if (parameter.device, parameter.dtype) != self._kind:
            raise UsageError(
                f"a parameter moved from {self._kind[0]}, {self._kind[1]} to {parameter.device}, {parameter.dtype} "
                "after the optimizer was made: move and cast the model first."
            )
        if self._place is not None and parameter.data_ptr() != self._place.data_ptr():
            self._place.copy_(parameter.detach())
            parameter.data = in_own_storage(self._place)
        before, now, shape = self._strides, parameter.stride(), parameter.shape
        if has_order and now != before and _order(now, shape) != _order(before, shape):
            raise UsageError(
                f"a parameter of shape {tuple(shape)} changed its strides from {before} to {now} between two steps: "
                "set the memory format before the first step."
            )
        self._strides = now


@dataclass(frozen=True)
class GatheredBucket:
    """A set of parameters, or ranges of them, that are gathered together.

    Attributes:
        parameters: the parameters that the layout's pieces index.
        views: the parts that this rank updates.
        is_whole: whether each parameter is on one rank. Ranks may then hold very different numbers of elements.
        flat: the flat buffer of which the parameters are views, if there is one.
    """

    number: int
    layout: BucketLayout
    parameters: Sequence[Tensor]
    views: Sequence[OwnView]
    is_whole: bool
    flat: Tensor | None

    @property
    def members(self) -> list[Tensor]:
        """The parameters that have elements in this bucket."""
        return [self.parameters[index] for index in dict.fromkeys(piece.index for piece in self.layout.pieces)]

    @property
    def needs_scratch(self) -> bool:
        """Whether the elements are in several storages, but sent as one message."""
        return not self.is_whole and self.flat is None and self.layout.pieces[0].numel != self.layout.numel

    def start_gather(self, collectives: Collectives, pool: BufferPool) -> Callable[[], None]:
        """Start to gather every rank's shard and return a function that waits for it."""
        label = f"all-gather of parameters [bucket {self.number}]"
        ranks = range(self.layout.world_size)
        if self.is_whole:  # from their owners directly into the others' storages, without padding
            with collectives.together():
                sent = [
                    collectives.transfer(part, owner, rank, label)
                    for owner in ranks
                    for part, _ in self._parts(owner)
                    for rank in ranks
                    if rank != owner
                ]
            return partial(finish_all, sent)
        if not self.needs_scratch:
            together = self.flat
            start = self.layout.start
            if together is None:
                first = self.layout.pieces[0]
                together = in_storage_order(self.parameters[first.index])
                start = first.parameter_start
            rows = together[start : start + self.layout.numel].view(len(ranks), -1)
            return collectives.all_gather(rows, self.number, label).wait
        scratch = pool.acquire(self.layout.numel, self.parameters[0].dtype)
        rows = scratch.view(len(ranks), -1)
        for part, piece in self._parts(collectives.rank):
            rows[collectives.rank, piece.start : piece.start + piece.numel].copy_(part)
        pending = collectives.all_gather(rows, self.number, label)

        def finish() -> None:
            pending.wait()
            for rank in {*ranks} - {collectives.rank}:
                for part, piece in self._parts(rank):
                    part.copy_(rows[rank, piece.start : piece.start + piece.numel])
            pool.release(scratch)

        return finish

    def _parts(self, rank: int) -> Iterator[tuple[Tensor, Piece]]:
        """Yield a view of each parameter range that belongs to a rank's shard, with the corresponding `Piece`."""
        for piece in self.layout.shard_pieces(rank):
            flat = in_storage_order(self.parameters[piece.index])
            yield flat[piece.parameter_start : piece.parameter_start + piece.numel], piece


def lay_out_parameters(
    parameters: Sequence[Tensor], first_number: int, rank: int, world_size: int, *,
    whole: bool, flat: bool, piece_numel: int | None,
) -> tuple[list[GatheredBucket], list[FollowedParameter]]:  # fmt: skip
    """Divide parameters into buckets. Parameters of one dtype on one device share buckets.

    Args:
        parameters: dense parameters.
        first_number: the number of the first bucket.
        rank, world_size: this rank, and the number of ranks.
        whole: whether to leave parameters undivided.
        flat: whether to make the parameters views of one flat buffer for each dtype and device.
        piece_numel: the maximum number of elements of one view; None for no limit.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.layout is not torch.strided:
            raise ValueError(f"a parameter is sparse ({parameter.layout}). Convert it: only dense ones can be sharded.")
        if not is_dense(parameter):
            parameter.data = parameter.data.contiguous()
        alike[parameter.dtype, parameter.device].append(parameter)
    buckets: list[GatheredBucket] = []
    followed: list[FollowedParameter] = []
    # In a flat buffer, all parameters are gathered in place anyway: fewer, larger buckets are better.
    solo_numel = BUCKET_NUMEL + 1 if flat else SOLO_NUMEL
    for (dtype, device), members in alike.items():
        numels = [parameter.numel() for parameter in members]
        unit = lay_out_whole(numels, world_size) if whole else lay_out(numels, world_size, BUCKET_NUMEL, solo_numel)
        buffer: Tensor | None = None
        if flat:
            buffer = torch.zeros(unit.numel, dtype=dtype, device=device)
        for parameter, start in zip(members, unit.starts, strict=True):
            place = None if buffer is None else buffer.as_strided(parameter.shape, parameter.stride(), start)
            followed.append(FollowedParameter(parameter, place))
            followed[-1].follow(has_order=False)
        for layout in unit.buckets:
            views: list[OwnView] = []
            for piece in layout.shard_pieces(rank):
                stop = piece.parameter_start + piece.numel
                step = piece_numel or max(piece.numel, 1)
                for start in range(piece.parameter_start, stop, step):
                    views.append(OwnView(members[piece.index], start, min(start + step, stop), is_whole=whole))
            buckets.append(GatheredBucket(first_number + len(buckets), layout, members, views, whole, buffer))
    return buckets, followed
