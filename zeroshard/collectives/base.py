"""Owns the interface: what the rest of the package asks of the other ranks. Called by bucket, optimizer and checkpoints."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class Pending(ABC):
    """A transfer in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the data may be used on this stream. Raises `CollectiveError` when it cannot arrive."""


class PendingReduction(ABC):
    """A reduce-scatter in flight."""

    @abstractmethod
    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Wait, then set `out` (shape [shard_numel]) to the mean over ranks of this rank's row, or add the mean."""


class Collectives(ABC):
    """What a bucket asks of the other ranks. `rows` is a [world_size, shard_numel] tensor; row r belongs to rank r."""

    rank: int
    world_size: int

    def __init__(self, predivide_factor: float = 1.0) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes that this rank handed to the network, by collective."""
        self.predivide_factor = predivide_factor
        """What the rows of a reduce-scatter were divided by beforehand; the mean divides by the rest of the world size."""
        self.measure: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        """Wraps each wait for other ranks: "reduce", "gather" or "exchange". For clocks."""

    @abstractmethod
    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        """Fill every row from its owner, in place; this rank's own row is the input."""

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
