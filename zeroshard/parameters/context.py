"""Owns what all units and buckets of a model share. Made by shard."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from zeroshard.collectives.base import Collectives
from zeroshard.layout.layout import BucketLayout
from zeroshard.policy import DTypes, Policy, Precision
from zeroshard.storage.buffer_pool import BufferPool
from zeroshard.storage.flat_buffer import FlatBuffer
from zeroshard.storage.storages import Storages


@dataclass
class Live:
    """Elements of sharded units that are unsharded now, and will be given back."""

    numel: int = 0


@dataclass(frozen=True)
class Context:
    """What all buckets of a model share."""

    policy: Policy
    precision: Precision
    collectives: Collectives
    pool: BufferPool
    storages: Storages
    bucket_numel: int
    whole_parameters: bool = False
    """No parameter is cut: the optimizer looks at whole tensors."""
    live: Live = field(default_factory=Live)
    whole_class: type[nn.Parameter] = nn.Parameter
    """Of parameters whose values are here; one for all units, since torch.compile asks for it."""

    def dtypes(self, own_dtype: torch.dtype) -> DTypes:
        """Of the model states of a parameter whose own dtype is `own_dtype`."""
        return self.precision.resolve(own_dtype, rounds_each_sum=self.collectives.rounds_each_sum)

    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype) -> FlatBuffer:
        """For the parameters of a unit. What is sharded at rest comes and goes all the time."""
        return self.storages.accelerator.flat_buffer(
            f"parameters of {label}", numel, dtype, comes_and_goes=self.policy.parameters.sharded
        )


@dataclass(frozen=True)
class BucketSpec:
    """What a bucket is: the two halves of it, parameters and gradients, are made from the same one.

    Attributes:
        number: counts the model's buckets, the same on every rank.
        label: for errors and tables.
    """

    number: int
    label: str
    layout: BucketLayout
    dtypes: DTypes
    trainable: bool
