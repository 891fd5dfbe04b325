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
        self.lent: dict[int, tuple[Tensor, Tensor]] = {}
        """The memory of each operation, and its values at that time."""
        self._loans = 0

    def lend(self, memory: Tensor) -> int:
        """Check the memory of an operation from now on, and return the loan's number."""
        self._loans += 1
        self.lent[self._loans] = memory.detach(), memory.detach().clone()
        return self._loans

    def give_back(self, loan: int) -> None:
        """End a loan, unless it has ended."""
        self.check()
        self.lent.pop(loan, None)

    def check(self) -> None:
        """Raise if lent memory was written to."""
        for memory, before in self.lent.values():
            if not torch.equal(memory, before):
                raise AssertionError("memory was written to before its operation was waited for")

    def next(self, operation: str) -> str:
        self.check()
        return super().next(operation)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        return LentGather(self, super().all_gather(rows, bucket, label), self.lend(rows[self.rank]))

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        return LentMean(self, super().reduce_scatter(rows, workspace, bucket, label, divisor), self.lend(rows))


class LentGather(Work):
    """A gather whose row stays lent until its end."""

    def __init__(self, lender: Lending, work: Work, loan: int) -> None:
        self._lender, self._work, self._loan = lender, work, loan

    def wait(self) -> None:
        self._lender.give_back(self._loan)
        self._work.wait()


class LentMean(Reduction):
    """A reduction whose rows stay lent until its end."""

    def __init__(self, lender: Lending, mean: Reduction, loan: int) -> None:
        self._lender, self._mean, self._loan = lender, mean, loan

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._lender.give_back(self._loan)
        self._mean.finish(out, accumulate=accumulate)
