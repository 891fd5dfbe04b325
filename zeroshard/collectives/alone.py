"""Owns the collectives of one rank: there is nothing to send."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, Work, nothing, sum_into


class Alone(Collectives):
    """The collectives of one rank, which sends nothing."""

    rank = 0
    world_size = 1

    class _Nothing(Work):
        def wait(self) -> None:
            return

    class _Mean(Reduction):
        def __init__(self, rows: Tensor, divisor: float) -> None:
            self._rows = rows
            self._divisor = divisor

        def finish(self, out: Tensor, *, accumulate: bool) -> None:
            sum_into(list(self._rows), self._divisor, out, accumulate)

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        prepare()
        return self._Nothing()

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> Reduction:
        return self._Mean(rows, self.divisor)

    def scatter_rows(self, rows: Tensor, received: Tensor, bucket: int, label: str) -> Work:
        return self._Nothing()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        return [data]

    def exchange_values(self, value: Tensor | None, data: bytes, label: str) -> tuple[Tensor, list[bytes]]:
        values = torch.zeros(1, dtype=torch.float64, device="cpu") if value is None else value.reshape(1)
        return values, [data]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        return self._Nothing()
