"""Owns the objects that all units and buckets of a model share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from torch import nn

from zeroshard.collectives.base import Alone, Collectives
from zeroshard.collectives.composed import Everyone
from zeroshard.policy import DTypes, Policy, Precision
from zeroshard.storage.buffers import BufferPool
from zeroshard.storage.storages import Storages
from zeroshard.torch_private import past_torch_function, version_of


@dataclass
class OwnWrites:
    """The writes that a parameter's version counter counts, and that are not the user's.

    Graphs that saved a sharded parameter stay valid when its values are freed, but not when they are updated.

    Attributes:
        updates: the number of updates.
        frees: the number of times that the values were freed.
    """

    updates: int = 0
    frees: int = 0


def own_writes_of(parameters: Sequence[nn.Parameter]) -> dict[int, OwnWrites]:
    """Return new counts for each parameter, by `id`. Parameters that share a version counter share them, too.

    Parameters created from views of one tensor share its counter: nn.Parameter(qkv[:n]), or
    `load_state_dict(assign=True)`.
    """
    found = {id(parameter): OwnWrites() for parameter in parameters}
    with past_torch_function():
        before = [version_of(parameter) for parameter in parameters]
        torch.autograd.graph.increment_version(parameters)
        left = [one for one, count in zip(parameters, before, strict=True) if version_of(one) > count + 1]
        while left:
            before = [version_of(parameter) for parameter in left]
            torch.autograd.graph.increment_version(left[0])
            changed = [version_of(one) > count for one, count in zip(left, before, strict=True)]
            for parameter in compress(left, changed):
                found[id(parameter)] = found[id(left[0])]
            left = [parameter for parameter, is_changed in zip(left, changed, strict=True) if not is_changed]
    return found


@dataclass
class Live:
    """The values that change while a model trains and that all its units share.

    Attributes:
        numels: the elements of each unit that is sharded at rest, and now unsharded or arriving.
        parked: the model states that are elsewhere until `reload_states`.
        gradient_operation: runs one of torch's operations on a parameter's mean gradient: `(unit, index), name, args, kwargs`.
        operations: the operations on gradients in this step, once there was one; a `GradientOperations`, of a higher package.
        before_later_gradients: called before the first gradients of a further backward are added to those of the step.
        drop_gradients: called when the user has replaced each `grad` of a unit; drops all gradients if every `grad` is None.
        own_writes: the counts of each parameter, by `id`.
        data_was_read: whether the user has read a parameter's `data`: writes through it do not change a version
            counter.
    """

    numels: Counter[Any] = field(default_factory=Counter)
    parked: frozenset[str] = frozenset()
    gradient_operation: Callable[..., Any] = lambda *_: NotImplemented
    operations: Any = None
    before_later_gradients: Callable[[], object] = lambda: None
    drop_gradients: Callable[[], object] = lambda: None
    own_writes: dict[int, OwnWrites] = field(default_factory=dict)
    data_was_read: bool = False


@dataclass(frozen=True)
class Context:
    """The objects that all buckets of a model share."""

    policy: Policy
    precision: Precision
    collectives: Collectives
    pool: BufferPool
    storages: Storages
    bucket_numel: int
    whole_parameters: bool = False
    """Whether no parameter is cut, so that the optimizer updates whole tensors."""
    live: Live = field(default_factory=Live)
    whole_class: type[nn.Parameter] = nn.Parameter
    """The class of parameters that have their values; one for all units, since torch.compile guards on it."""
    distributed_class: type[nn.Parameter] | None = None
    """The same for DTensors; None if there are none."""
    others: Collectives = field(default_factory=Alone)
    """The collectives of the ranks of another mesh dimension, which divide the DTensors. This rank is one of them."""

    @cached_property
    def everyone(self) -> Collectives:
        """The collectives of all ranks, over both dimensions of the mesh, for small messages."""
        if self.others.world_size == 1:
            return self.collectives
        return Everyone(self.collectives, self.others)

    def dtypes(self, own_dtype: torch.dtype) -> DTypes:
        """Return the dtypes of the model states of a parameter whose own dtype is `own_dtype`."""
        return self.precision.resolve(own_dtype, self.collectives.sum_dtype)

    def close(self) -> None:
        self.collectives.close()
        self.others.close()
        self.storages.close()
