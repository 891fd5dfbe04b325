"""Owns the collectives of one rank: there is nothing to send."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Done, Reduction, SummedRows, Work, nothing


class Alone(Collectives):
    """The collectives of one rank, which sends nothing."""

    rank = 0
    world_size = 1

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        prepare()
        return Done()

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        return SummedRows((), list(rows), divisor)

    def scatter_rows(self, rows: Tensor, received: Tensor, bucket: int, label: str) -> Work:
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        return [data]

    def exchange_values(self, value: Tensor | None, data: bytes, label: str) -> tuple[Tensor, list[bytes]]:
        values = torch.zeros(1, dtype=torch.float64, device="cpu") if value is None else value.reshape(1)
        return values, [data]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        return Done()
