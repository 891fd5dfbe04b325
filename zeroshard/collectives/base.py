"""Owns the interface: what the rest of the package asks of the other ranks. Called by bucket, optimizer and checkpoints."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import CollectiveError


class Pending(ABC):
    """A transfer in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the data may be used on this stream. Raises `CollectiveError` when it cannot arrive."""

    def abandon(self) -> None:
        """The data is not wanted any longer: block until nothing is written any more."""
        with suppress(CollectiveError):
            self.wait()


class PendingReduction(ABC):
    """A reduce-scatter in flight."""

    @abstractmethod
    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Wait, then set `out` (shape [shard_numel]) to the mean over ranks of this rank's row, or add the mean."""

    @property
    def has_readers(self) -> bool:
        """Once finished: other ranks still read the rows, which must stay as they are."""
        return False

    def wait_readers(self) -> None:
        """Block until none does."""
        return


class Collectives(ABC):
    """What a bucket asks of the other ranks. `rows` is a [world_size, shard_numel] tensor; row r belongs to rank r."""

    rank: int
    world_size: int
    sends = True
    """Rows go to some ranks from where they are together, and must be complete when an all-gather starts."""
    reads_in_place = False
    """Other ranks read what is offered where it lies, if that is memory from `shareable`; nothing travels by itself."""

    def __init__(self, predivide_factor: float = 1.0) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes that this rank handed to others, by collective."""
        self.predivide_factor = predivide_factor
        """What the rows of a reduce-scatter were divided by beforehand; the mean divides by the rest of the world size."""
        self.measure: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        """Wraps each wait for other ranks: "reduce", "gather" or "exchange". For clocks."""

    def shareable(self, numel: int, dtype: torch.dtype) -> Tensor:
        """CPU memory [numel] of zeros, from which other ranks may be able to read."""
        return torch.zeros(numel, dtype=dtype)

    def is_shareable(self, tensor: Tensor) -> bool:
        """Whether it lies in memory that `shareable` took from the operating system, and torch cannot give back."""
        return False

    def discard(self, memory: Tensor) -> None:
        """Give back the pages of such memory, all of it. Its content is undefined until it is written to."""
        raise NotImplementedError

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of scratch of its own."""
        return 0

    @abstractmethod
    def all_gather(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        """Fill every row from its owner, in place; this rank's own row is the input.

        Args:
            resting: [shard_numel], the same values in memory that stays as it is until `wait_readers`.
        """

    def wait_readers(self, memory: Tensor | None = None) -> None:
        """What rests here (default: all of it) is about to change: block until no other rank reads it."""
        return

    @abstractmethod
    def workspace_numel(self, rows: Tensor) -> int:
        """Elements of scratch that `reduce_scatter` needs for such rows."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        """Start to bring this rank's row of every rank together. `rows` and `workspace` are busy until `finish`."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with rank `source`'s."""

    @abstractmethod
    def exchange(self, data: bytes, label: str) -> list[bytes]:
        """Every rank's `data` (the same length on all), in rank order."""

    def exchange_json(self, value: Any, label: str) -> list[Any]:
        """Every rank's `value`, as JSON has it, in rank order."""
        data = json.dumps(value).encode()
        lengths = self.exchange(len(data).to_bytes(8, "little"), f"the length of {label}")
        longest = max(int.from_bytes(length, "little") for length in lengths)
        return [json.loads(message) for message in self.exchange(data.ljust(longest), label)]

    @abstractmethod
    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        """Bring rank `source`'s contiguous `tensor` into rank `target`'s. Every rank must call it; others give what they like."""

    def operation(self, name: str) -> AbstractContextManager[None]:
        """Waits inside, of this thread, belong to `name`, such as `save "step_10"`: told when one is long, or fails.

        The outermost name counts.
        """
        return nullcontext()

    @property
    def _divisor(self) -> float:
        return self.world_size / self.predivide_factor

    def close(self) -> None:
        """Give back what the operating system lent: sockets, threads."""
