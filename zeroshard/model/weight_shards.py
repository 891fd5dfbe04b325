"""Owns the weights as each rank holds them: this rank's own parts with their places, and what changed in them.

No rank waits for another, and nothing is sent. All ranks' parts together are exactly the weights that `named_weights` yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.core.blocks import Copy, Target, row_major
from zeroshard.errors import UsageError
from zeroshard.model.named_weights import parts_of, refuse_divided, refuse_other_names, targets_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes that show the bits of values, by their size: -0.0 is not 0.0, and a NaN equals itself."""


@dataclass(frozen=True)
class WeightShard:
    """A part of a weight that this rank holds, and its place in the whole weight.

    Attributes:
        tensor: the values, on the device that computes. They have one dimension, but for weights that are made of others.
        shape: the shape of the whole weight.
        offset: the place of the first value among the whole weight's flattened elements.
        strides: for each dimension of `tensor`, the distance between neighbours there; (1,) for a range of elements.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    def view_in(self, whole: Tensor) -> Tensor:
        """Return these elements of a contiguous tensor of `shape`, as a view: `shard.view_in(whole).copy_(shard.tensor)`."""
        return whole.view(-1).as_strided(self.tensor.shape, self.strides, whole.storage_offset() + self.offset)

    def index(self) -> Tensor:
        """Return the places of the values among the whole weight's flattened elements: int64, [numel]."""
        return self.index_of(torch.arange(self.tensor.numel(), device=self.tensor.device))

    def index_of(self, own: Tensor) -> Tensor:
        """Return the places in the whole weight of some values, which `own`, int64, counts in the flattened `tensor`."""
        place = torch.full_like(own, self.offset)
        for here, size, there in zip(row_major(self.tensor.shape), self.tensor.shape, self.strides, strict=True):
            place += own.div(here, rounding_mode="floor").remainder_(size).mul_(there)
        return place


class WeightsVersion:
    """A copy of this rank's parts of the weights, as another program has them; see `Sharded.weights_version`.

    `Sharded.changed_since` compares the weights with it and updates it.
    """

    def __init__(self, live: LiveModel, names: str) -> None:
        self.names = names
        self.kept = {(name, shard.offset): shard.tensor.clone() for name, shard in weight_shards(live, names)}

    @property
    def nbytes(self) -> int:
        """The memory of the copy, in bytes."""
        return sum(tensor.nbytes for tensor in self.kept.values())


def weight_shards(live: LiveModel, names: str) -> Iterator[tuple[str, WeightShard]]:
    """Return an iterator over this rank's parts; see `Sharded.named_weights`. Raise for wrong arguments at once."""
    refuse_divided(live)
    refuse_other_names(names)
    return _own_parts(live, targets_of(live, merge_adapters=False) if names == "checkpoint" else None)


def _own_parts(live: LiveModel, targets: Sequence[Target] | None) -> Iterator[tuple[str, WeightShard]]:
    live.schedule.refuse_unseen_changes()
    live.schedule.refuse_aborted_step()
    values = live.schedule.values
    states = live.states
    with live.collectives.operation("named_weights()"):
        plain = list(chain.from_iterable(part.plain for part in parts_of(live)))
    names: dict[int, list[str]] = {}
    for name, tensor in plain:
        names.setdefault(id(tensor), []).append(name)
    targets_by_source: dict[str, list[Target]] = {}
    for target in targets or ():
        for source in dict.fromkeys(block.source for block in target.blocks):
            targets_by_source.setdefault(source, []).append(target)

    def placed(name: str, flat: Tensor, start: int, shape: torch.Size) -> Iterator[tuple[str, WeightShard]]:
        """Yield elements of the tensor `name` in memory, from `start`, at their places in the weights."""
        if targets is None:
            yield name, WeightShard(flat, tuple(shape), start, (1,))
        for target in targets_by_source.get(name, ()):
            if target.is_whole:
                yield target.name, WeightShard(flat, target.shape, start, (1,))
                continue
            for block in target.blocks:
                if block.source == name:
                    for copy in Copy.from_source(block, target.shape).within(start, start + flat.numel()):
                        box = flat.as_strided(copy.shape, copy.strides, flat.storage_offset() + copy.here - start)
                        yield target.name, WeightShard(box.contiguous(), target.shape, copy.there, copy.other_strides)

    def found() -> Iterator[tuple[str, WeightShard]]:
        for held in states.held():
            parameter = held.named.parameter
            if id(parameter) not in names or not live.writes(held):
                continue
            with held.shard.opened():
                value = held.value.detach()
                own = value.to(parameter.device, parameter.dtype)
                if own is value and not held.shard.is_here:
                    own = value.clone()
            for name in names[id(parameter)]:
                yield from placed(name, own, held.span.start, parameter.shape)
        if live.rank == 0:  # buffers are whole on every rank, and no rank holds a part of an empty parameter
            parameters = {id(entry.parameter) for unit in live.units for entry in unit.named}
            for name, tensor in plain:
                if id(tensor) not in parameters:
                    yield from placed(name, tensor.detach().reshape(-1), 0, tensor.shape)
                elif not tensor.shape.numel():  # at stage 3, it may not be read
                    yield from placed(name, torch.empty(0, dtype=tensor.dtype, device=tensor.device), 0, tensor.shape)

    for name, shard in found():
        yield name, shard
        if live.schedule.values is not values:
            raise UsageError(
                "optimizer.step() was called inside a loop over named_weights(shards=True) or changed_since(): later weights "
                "would be newer than earlier ones. Call it after the loop."
            )


def changed_since(live: LiveModel, version: WeightsVersion) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield this rank's elements that differ from a version; see `Sharded.changed_since`."""
    for name, shard in weight_shards(live, version.names):
        new = shard.tensor.reshape(-1)
        # It returns to the version after the consumer's turn. If the consumer leaves, all of the part comes again.
        kept = version.kept.pop((name, shard.offset), None)
        if kept is None or kept.shape != shard.tensor.shape or kept.dtype != new.dtype:
            index, value = shard.index(), new.clone()
            kept = shard.tensor.clone()
        else:
            own = _differ(new, kept.view(-1)).nonzero().view(-1)
            index, value = shard.index_of(own), new[own]
            kept.view(-1)[own] = value
        if index.numel():
            yield name, index, value
        version.kept[name, shard.offset] = kept


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors, [numel], have different bits: bool, [numel]."""
    size = one.dtype.itemsize
    differ = one.view(_BITS[min(size, 8)]) != other.view(_BITS[min(size, 8)])
    return differ if size <= 8 else differ.view(one.numel(), -1).any(1)
