"""Owns a transport that detects writes to memory in use, for tests of its callers."""

from __future__ import annotations

import torch
from file_transport import Files
from torch import Tensor

from zeroshard.core.transport.base import Reduction, Work
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.watch import Watch


class Lending(Files):
    """Files whose sent memory is lent until the operation was waited for. A write to lent memory raises."""

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__(members, device, watch)
        self._lent: list[Lent] = []

    def check(self) -> None:
        """Raise if lent memory was written to."""
        for one in self._lent:
            if not torch.equal(one.memory, one.before):
                raise AssertionError("memory was written to before its operation was waited for")

    def lend(self, one: Lent) -> None:
        """Check the memory of an operation until `give_back`."""
        self._lent.append(one)

    def give_back(self, one: Lent) -> None:
        """End a loan."""
        self.check()
        self._lent = [other for other in self._lent if other is not one]

    def next(self, operation: str) -> str:
        self.check()
        return super().next(operation)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        return LentGather(self, super().all_gather(rows, bucket, label), rows[self.rank])

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        return LentMean(self, super().reduce_scatter(rows, workspace, bucket, label, divisor), rows)


class Lent:
    """The memory of an operation, and its values at that time."""

    def __init__(self, lender: Lending, memory: Tensor) -> None:
        self.memory, self.before = memory.detach(), memory.detach().clone()
        self._lender = lender
        lender.lend(self)

    def give_back(self) -> None:
        self._lender.give_back(self)


class LentGather(Work):
    """A gather whose row stays lent until its end."""

    def __init__(self, lender: Lending, work: Work, row: Tensor) -> None:
        self._work, self._lent = work, Lent(lender, row)

    def wait(self) -> None:
        self._lent.give_back()
        self._work.wait()


class LentMean(Reduction):
    """A reduction whose rows stay lent until its end."""

    def __init__(self, lender: Lending, mean: Reduction, rows: Tensor) -> None:
        self._mean, self._lent = mean, Lent(lender, rows)

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._lent.give_back()
        self._mean.finish(out, accumulate=accumulate)
