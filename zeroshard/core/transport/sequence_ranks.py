"""Owns the messages that a computation itself sends: parts of activations, sums, small objects.

They do not belong to a step or a bucket, so they go over the user's own process group, at the same point of the model
on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.transport.members import group_of
from zeroshard.errors import CollectiveError, UsageError


class SequenceRanks:
    """The ranks of a group, and the messages that a computation sends between them.

    Args:
        group: a process group, or a mesh of one dimension; None is all ranks, or only this process if
            torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        self.group = group_of(group)
        self.rank = 0
        self.size = 1
        self.members = [0]
        if dist.is_initialized():
            self.group = self.group or dist.group.WORLD
            self.rank = dist.get_rank(self.group)
            self.size = dist.get_world_size(self.group)
            if self.rank < 0:
                raise UsageError(
                    "this rank is in none of the groups that were made. Make all groups on every rank, and pass the one with it."
                )
            self.members = dist.get_process_group_ranks(self.group)
        self.messages = 0
        """The number of all-to-alls in which this rank has taken part."""
        self.sent_nbytes = 0
        """The bytes that this rank sent to others in all-to-alls."""

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceRanks:
        return self

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send row r of `parts`, [size, n], to rank r and return [size, n], in which row r came from rank r."""
        self._count(parts)
        received = torch.empty_like(parts)
        with self._named("an exchange of heads for positions"):
            # As bytes, so the backend need not support the dtype.
            dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8), group=self.group)
        return received

    def _count(self, parts: Tensor) -> int:
        """Count a message and return the bytes that it sends to other ranks."""
        nbytes = parts.nbytes * (self.size - 1) // self.size
        self.messages += 1
        self.sent_nbytes += nbytes
        return nbytes

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, in a new tensor. Every rank must call it, with one shape and dtype."""
        total = values.detach().clone()
        if self.size > 1:
            with self._named("a sum over tokens"):
                dist.all_reduce(total, group=self.group)
        return total

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return every rank's `value`, in rank order. Every rank must call it, with a value that pickle supports."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._named(what):
            dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"{what} among ranks {self.members} failed on rank {dist.get_rank()}: every one of them must run the "
                f"same forwards and backwards. torch: {error}"
            ) from error
