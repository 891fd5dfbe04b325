"""Owns the objects that all units and buckets of a model share."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.eight_bits import BLOCK_NUMEL, CODES
from zeroshard.core.layout import ALIGNMENT
from zeroshard.core.step import Step
from zeroshard.core.storage.buffers import BufferPool
from zeroshard.core.storage.storages import Storages
from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.composed import Everyone
from zeroshard.policy import DTypes, Policy, Precision
from zeroshard.torch_private import past_torch_function, version_of

FIRST_BATCH_NBYTES = 8
"""Bytes of `Live.first_batch`."""


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
        step: the present step, which `zero_grad` replaces.
        before_later_gradients: called before the first gradients of a further backward are added to those of the step.
        drop_gradients: called when the user has replaced each `grad` of a unit; drops all gradients if every `grad` is None.
        own_writes: the counts of each parameter, by `id`.
        first_batch: a digest of the inputs of the first forward that may have a backward; None before it.
        trainer: the identifier of the thread that stepped last, or sharded the model.
        data_was_read: whether the user has read a parameter's `data`: writes through it do not change a version
            counter.
        given_out: the tensors that the user got as `data`, by the parameter's `id`. They are in the memory that it shows.
    """

    numels: Counter[Any] = field(default_factory=Counter)
    parked: frozenset[str] = frozenset()
    gradient_operation: Callable[..., Any] = lambda *_: NotImplemented
    step: Step = field(default_factory=Step)
    before_later_gradients: Callable[[], object] = lambda: None
    drop_gradients: Callable[[], object] = lambda: None
    own_writes: dict[int, OwnWrites] = field(default_factory=dict)
    data_was_read: bool = False
    given_out: dict[int, list[weakref.ref[Tensor]]] = field(default_factory=dict)
    first_batch: bytes | None = None
    trainer: int = field(default_factory=threading.get_ident)

    def give_out(self, parameter: object, data: Tensor) -> None:
        """Record that the user gets `data` of a parameter."""
        used = [one for one in self.given_out.get(id(parameter), ()) if one() is not None]
        self.given_out[id(parameter)] = [*used, weakref.ref(data)]


@dataclass(frozen=True)
class Experts:
    """The ranks of divided experts, which have a data-parallel group of their own.

    Dense parameters are sharded over all ranks, which all have different batches. Each expert is on the ranks of one column:

        "dp" 0     rank 0: experts 0, 1     rank 1: experts 2, 3      "ep"
        "dp" 1     rank 2: experts 0, 1     rank 3: experts 2, 3

    Attributes:
        collectives: of the ranks with the same experts as this one, such as 0 and 2, which shard these.
        others: of the ranks that divide all experts, such as 0 and 1.
        places: for each of all ranks, its place in its own `collectives`.
    """

    collectives: Collectives
    others: Collectives
    places: tuple[int, ...]

    def join(self, dense: Collectives) -> None:
        """Count bytes and waits with those of the transport between all ranks; a failure of either notifies both."""

        def measure(kind: str) -> AbstractContextManager[None]:
            return dense.measure(kind)  # a different clock may be set later

        self.collectives.count_in(dense.sent, measure)
        both = [*dense.on_failure, *self.collectives.on_failure]
        dense.on_failure = self.collectives.on_failure = both


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

    experts: Experts | None = None
    """The ranks of divided experts, if these have a data-parallel group of their own."""
    places: tuple[int, ...] = ()
    """In the context of experts, for each rank of the model its place in `collectives`. Otherwise these are the same."""

    @property
    def alignment(self) -> int:
        """The multiples of elements at which parameters are cut; whole blocks, if optimizer states rest in 8 bits."""
        return BLOCK_NUMEL if self.precision.state_dtype == CODES else ALIGNMENT

    @property
    def data_world_size(self) -> int:
        """The number of ranks with different batches, over which gradients are averaged."""
        return len(self.places) or self.collectives.world_size

    def of_experts(self) -> Context:
        """Return the context of the units of divided experts."""
        if self.experts is None:
            return self
        experts = self.experts
        return replace(
            self, collectives=experts.collectives, others=experts.others, places=experts.places, experts=None
        )

    @cached_property
    def everyone(self) -> Collectives:
        """The collectives of all ranks, over both dimensions of the mesh, for small messages."""
        if self.others.world_size == 1:
            return self.collectives
        return Everyone(self.collectives, self.others)

    def dtypes(self, own_dtype: torch.dtype, *, in_fp32: bool = False) -> DTypes:
        """Return the dtypes of the model states of a parameter whose own dtype is `own_dtype`; see `Precision.keep_in_fp32`."""
        return self.precision.resolve(own_dtype, self.collectives.sum_dtype, in_fp32=in_fp32)

    def close(self) -> None:
        self.collectives.close()
        self.others.close()
        if self.experts is not None:
            self.experts.collectives.close()
            self.experts.others.close()
        self.storages.close()
