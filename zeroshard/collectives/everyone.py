"""Owns small messages between all ranks of two dimensions of a mesh: data-parallel ones, and those that divide tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, Work, nothing

_SMALL = "ranks of two dimensions exchange small messages only: send tensors over the data-parallel transport."


class Everyone(Collectives):
    """The ranks of `data` and of `others`, which have this rank in common; in the order of torch's ranks.

    It is made of both, so any mesh has it: a message goes over one, and what all of that have goes over the other.

    Args:
        data: the collectives of the data-parallel ranks.
        others: the collectives of the ranks of the mesh's other dimension.
    """

    def __init__(self, data: Collectives, others: Collectives) -> None:
        super().__init__()
        self._data = data
        self._others = others
        self.world_size = data.world_size * others.world_size
        numbers = self._by_place(dist.get_rank().to_bytes(8, "little"), "the ranks of a mesh")
        ranks = [int.from_bytes(number, "little") for number in numbers]
        self._places = sorted(range(self.world_size), key=ranks.__getitem__)
        """By rank, its place: others.rank * data.world_size + data.rank."""
        self.rank = self._places.index(others.rank * data.world_size + data.rank)

    def _by_place(self, data: bytes, label: str) -> list[bytes]:
        rows = self._others.exchange(b"".join(self._data.exchange(data, label)), label)
        return [row[start : start + len(data)] for row in rows for start in range(0, len(row), max(len(data), 1))]

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        if not data:
            return [data] * self.world_size
        messages = self._by_place(data, label)
        return [messages[place] for place in self._places]

    def data_rank(self, rank: int) -> int:
        return self._places[rank] % self._data.world_size

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        other, own = divmod(self._places[source], self._data.world_size)
        if self._others.rank == other:
            self._data.broadcast(tensor, own)
        self._others.broadcast(tensor, other)

    def by_shard(self, by_rank: Tensor) -> Tensor:
        by_place = torch.empty_like(by_rank)
        by_place[torch.tensor(self._places)] = by_rank
        return torch.cat([self._data.by_shard(row) for row in by_place.view(self._others.world_size, -1)])

    def operation(self, name: str) -> AbstractContextManager[None]:
        return self._data.operation(name)

    def control(self) -> Collectives:
        return Everyone(self._data.control(), self._others.control())

    def close(self) -> None:
        self._data.close()
        self._others.close()

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        raise NotImplementedError(_SMALL)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        raise NotImplementedError(_SMALL)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        raise NotImplementedError(_SMALL)
