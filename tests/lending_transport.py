"""Owns a transport that detects writes to lent memory, for tests of its callers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from file_transport import Files, Mean
from torch import Tensor

from zeroshard.collectives.base import Reduction, Work, nothing
from zeroshard.collectives.members import Members
from zeroshard.collectives.watch import Watch


class Lending(Files):
    """Files whose sent memory is lent until its release is waited for. A write to lent memory raises."""

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__(members, device, watch)
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}
        """Lent memory and its values at that time, by number."""
        self._resting: set[int] = set()
        """The numbers of parameters at rest that other ranks gather."""
        self._numbers = count()

    def lend(self, memory: Tensor) -> int:
        """Lend memory, and return its number."""
        number = next(self._numbers)
        self._lent[number] = memory, memory.clone()
        return number

    def check(self) -> None:
        """Raise if lent memory was written to."""
        for memory, lent in self._lent.values():
            if not torch.equal(memory, lent):
                raise AssertionError("memory was written to before its release")

    def give_back(self, number: int) -> None:
        """End a loan."""
        self.check()
        self._lent.pop(number, None)

    def is_lent(self, number: int) -> bool:
        """Return whether memory is lent still."""
        return number in self._lent

    def next(self, operation: str) -> str:
        self.check()
        return super().next(operation)

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        if own is not None:
            self._resting.add(self.lend(own))
        return super().all_gather(rows, bucket, label, own, prepare)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        arriving = super().reduce_scatter(rows, workspace, bucket, label, divisor)
        assert isinstance(arriving, Mean)
        numbers = [self.lend(rows[other]) for other in range(self.world_size) if other != self.rank]
        return LentMean(arriving, self, numbers)

    def wait_released(self, memory: Tensor | None = None) -> None:
        self.check()
        for number in [*self._resting]:
            if memory is None or self._lent[number][0].data_ptr() == memory.data_ptr():
                self._resting.remove(number)
                del self._lent[number]


class LentMean(Reduction):
    """A reduction whose rows stay lent after its end."""

    def __init__(self, mean: Mean, lender: Lending, numbers: list[int]) -> None:
        self._mean, self._lender, self._numbers = mean, lender, numbers

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._mean.finish(out, accumulate=accumulate)

    def wait_released(self) -> None:
        for number in self._numbers:
            self._lender.give_back(number)

    @property
    def is_released(self) -> bool:
        return not any(map(self._lender.is_lent, self._numbers))
