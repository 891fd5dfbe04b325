"""Owns the interface: what the rest of the package asks of the other ranks. Called by bucket, optimizer and checkpoints."""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, final

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


class PendingRows(Pending):
    """Rows on their way from each rank to each."""

    @property
    def has_readers(self) -> bool:
        """Once waited for: other ranks still read what went out, which must stay as it is."""
        return False

    def wait_readers(self) -> None:
        """Block until none does."""
        return


class Collectives(ABC):
    """What a bucket asks of the other ranks. `rows` is a [world_size, shard_numel] tensor, of which each rank owns one row."""

    rank: int
    world_size: int
    sends = True
    """Rows go to some ranks from where they are together, and must be complete when an all-gather starts."""
    launches_together = False
    """What starts inside of one `together` is one launch: to start a unit's buckets at once costs less than one after the other."""
    rounds_each_sum = False
    """A sum over ranks is rounded after each addition, to the dtype that travels; else it is made in fp32 at least."""
    reads_in_place = False
    """Other ranks read what is offered where it lies, if that is memory from `shareable`."""
    travels = True
    """What was started goes on behind the computation."""
    arrives_by_itself = True
    """An all-gather is complete without a further call of the others."""
    rounds_parameters = False
    """What `gather_to_compute` brings has lost digits."""

    def __init__(self, predivide_factor: float = 1.0) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes that this rank handed to others, by collective."""
        self.predivide_factor = predivide_factor
        """What the rows of a reduce-scatter were divided by beforehand; the mean divides by the rest of the world size."""
        self.measure: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        """Wraps each wait for other ranks: "reduce", "gather" or "exchange". For clocks."""

    def together(self) -> AbstractContextManager[None]:
        """What starts inside (of one kind, mostly) may be launched as one when it ends; none of it may be waited for inside.

        Every rank must enter it, also one that only sits out transfers.
        """
        return nullcontext()

    @property
    def shard(self) -> int:
        """The number of the row that this rank owns."""
        return self.rank

    def owner(self, shard: int) -> int:
        """The rank that owns a row."""
        return shard

    def by_shard(self, by_rank: Tensor) -> Tensor:
        """Values [world_size] of ranks, in the order of the rows that these own."""
        return by_rank

    @property
    def inside(self) -> Collectives:
        """Those over the ranks of this host, whose rows lie together; these themselves where hosts make no difference."""
        return self

    @property
    def across(self) -> Collectives | None:
        """Those over the ranks that hold the same rows, one on each host; None where hosts make no difference."""
        return None

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

    def gather_to_compute(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        """As `all_gather`, of parameters that are computed with, and never become what rests.

        Where the policy's wire says so every row arrives rounded, this rank's own too, and the same on every rank.
        """
        return self.all_gather(rows, bucket, label, resting)

    def round_to_compute(self, rows: Tensor) -> None:
        """Make of whole rows, in place and without other ranks, what `gather_to_compute` would have brought."""
        return

    def scatter_rows(self, rows: Tensor, received: Tensor, bucket: int, label: str) -> PendingRows:
        """Bring each row of `rows`, uint8 [world_size, n], to its rank; `received` is then what each rank had for this one.

        Part of a reduction, and counted as one. Each rank's own row stays where it is, and `received` has nothing for it. Both are
        busy until it was waited for.
        """
        raise NotImplementedError

    def wait_readers(self, memory: Tensor | None = None) -> None:
        """What rests here (default: all of it) is about to change: block until no other rank reads it."""
        return

    @abstractmethod
    def workspace_numel(self, rows: Tensor) -> int:
        """Elements of scratch that `reduce_scatter` needs for such rows."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        """Start to bring what every rank has in this rank's row together. `rows` and `workspace` are busy until `finish`."""

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

    def exchange_values(self, value: Tensor | None, data: bytes, label: str) -> tuple[Tensor, list[bytes]]:
        """Every rank's `value` (fp64, shape []), as [world_size], and its `data`, as `exchange`; in rank order.

        Where messages do not pass through the device, the host does not wait for it either: the values are there when the device
        comes so far. With no `value`, on any rank, they are zeros.

        Raises:
            CollectiveError: some ranks gave a value, and some did not.
        """
        own = struct.pack("<d", 0.0 if value is None else float(value))
        messages = self.agreed(value is not None, own + data, label)
        values = [struct.unpack_from("<d", message)[0] for message in messages]
        return torch.tensor(values, dtype=torch.float64), [message[8:] for message in messages]

    @final
    def agreed(self, answer: bool, data: bytes, label: str) -> list[bytes]:
        """As `exchange`, of ranks that all go on in the same way.

        Raises:
            CollectiveError: they do not.
        """
        messages = self.exchange(bytes([answer]) + data, label)
        others = [rank for rank, message in enumerate(messages) if message[0] != answer]
        if others:
            raise CollectiveError(
                f"rank {self.rank} {'asked' if answer else 'did not ask'} for {label}, and of the group's ranks {others} did the "
                "opposite: every rank must make the same calls."
            )
        return [message[1:] for message in messages]

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
