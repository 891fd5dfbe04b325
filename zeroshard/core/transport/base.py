"""The transport: the operations between ranks that the other packages use, over any medium.

A transport implements five operations: `all_gather`, `reduce_scatter`, `broadcast`, `exchange`, `transfer`. Every other
method has a default that is correct for all transports. Callers do not depend on the kind of transport.

The contract is the same for all of them. The memory of an operation is there before the call, and nothing writes to it until
`Work.wait` or `Reduction.finish` returns. Then the caller may read the values, and may write to all of this memory. A
transport calls none of its callers. Ranks that do not diverge start a transport's operations in one order.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from zeroshard.core.transport.rounds import Merge, Swap, combined, merged
from zeroshard.errors import CollectiveError

T = TypeVar("T")


def nothing() -> None:
    """Do nothing."""


_UNMEASURED = nullcontext()


class Work(ABC):
    """An operation in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Block, or let only this stream wait, until the operation's memory may be read and written.

        Raises:
            CollectiveError: the data cannot arrive.
        """

    def push(self) -> None:
        """Finish the operation now if it needs another call on this rank, since `wait` may come late."""

    def abandon(self) -> None:
        """Block until the operation writes nothing more. Its data is no longer needed."""
        with suppress(CollectiveError):
            self.wait()


class Done(Work):
    """An operation in which this rank has nothing to wait for."""

    def wait(self) -> None:
        return


class Reduction(ABC):
    """A reduce-scatter in flight."""

    @abstractmethod
    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Wait, then set `out` [shard_numel] to the divided sum over ranks of this rank's row, or add that sum to `out`.

        Afterwards, the rows that were sent may be written.
        """


class Agreed(NamedTuple):
    """The ranks' answers, combined on their way.

    Attributes:
        every: the bits that are set in every rank's answer.
        some: the bits that are set in any rank's answer.
        values: the ranks' values, in fp64, joined in the tree of `rounds.merged`, by the shards that the ranks own.
    """

    every: bytes
    some: bytes
    values: array[float]

    @property
    def are_equal(self) -> bool:
        """Whether all ranks gave the same answer."""
        return self.every == self.some


class Collectives(ABC):
    """A transport. `rows` is a [world_size, shard_numel] tensor, of which each rank owns one row."""

    rank: int
    world_size: int

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes that this rank sent to others, by operation: the name of its method, such as "all_gather"."""
        self.measure: Callable[[str], AbstractContextManager[None]] = lambda _: _UNMEASURED
        """Returns a context for each wait for other ranks, by kind: "reduce", "gather", "exchange", "transfer", "broadcast"."""
        self.on_failure: list[Callable[[], None]] = []
        """Functions that notify the ranks waiting for this one. They are called after a wait of this rank has failed."""

    # ------------------------------------------------------------------ the five operations

    @abstractmethod
    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        """Start to fill every row from its owner, in place; this rank's own row is the input."""

    @abstractmethod
    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        """Start to sum this rank's row over ranks. `rows` and `workspace` are busy until the result's `finish`.

        Args:
            divisor: the number that divides the sum; `world_size` for the mean, if nothing has divided the rows before.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite `tensor` with rank `source`'s tensor."""

    @abstractmethod
    def exchange(self, data: bytes, label: str) -> list[bytes]:
        """Return every rank's `data` (the same length on all), in rank order."""

    @abstractmethod
    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        """Start to copy rank `source`'s contiguous `tensor` to rank `target`'s. All ranks call it, the others with any tensor."""

    # ------------------------------------------------------------------ when operations start and end

    def together(self) -> AbstractContextManager[None]:
        """Launch the block's operations together at its end, if the backend can. Wait for none of them inside.

        Every rank must enter it, including ranks that take part in no transfer.
        """
        return nullcontext()

    def launches(self, operations: Sequence[T]) -> list[tuple[T, ...]]:
        """Group operations into launches. A launch starts when all of its operations are ready."""
        return [(operation,) for operation in operations]

    def numel_in_flight(self, units: Sequence[int]) -> int:
        """Return how many elements of reductions may be under way while the next gradients are computed.

        Args:
            units: elements of each unit, the largest first. The largest is usually the root unit, which is not typical:
                the default uses the second.
        """
        if not units:
            return 0
        return 2 * units[min(1, len(units) - 1)]

    def close(self) -> None:
        """Release sockets and threads."""

    # ------------------------------------------------------------------ memory

    def workspace_numel(self, rows: Tensor) -> int:
        """Return how many scratch elements `reduce_scatter` needs for such rows."""
        return 0

    @property
    def buffers_nbytes(self) -> int:
        """The bytes of the transport's own scratch."""
        return 0

    # ------------------------------------------------------------------ sums

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `dtype` are sent, so that sums are computed in fp32 at least."""
        return dtype

    # ------------------------------------------------------------------ hosts

    @property
    def shard(self) -> int:
        """The number of the row that this rank owns."""
        return self.rank

    def owner(self, shard: int) -> int:
        """Return the rank that owns a row."""
        return shard

    def data_rank(self, rank: int) -> int:
        """Return the place of a rank among the ranks that shard one model; by default these are all ranks."""
        return rank

    @property
    def inside(self) -> Collectives:
        """The collectives of this host's ranks, whose rows are adjacent; this object if the transport ignores hosts."""
        return self

    @property
    def across(self) -> Collectives | None:
        """The collectives of the ranks that hold the same rows, one on each host; None if the transport ignores hosts."""
        return None

    # ------------------------------------------------------------------ messages

    def swaps(self, label: str) -> Swap | None:
        """Begin an operation in which two ranks swap messages. None: this transport can only exchange all. Every rank must call it.

        The result addresses ranks by the shards that they own.
        """
        return None

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        """Return every rank's message, merged in one tree by the shards that the ranks own. Every rank must call it.

        All messages must have one length. A rank sends O(log W) messages if the transport has `swaps`.
        """
        swap = self.swaps(label)
        if swap is not None:
            return combined(own, merge, self.shard, self.world_size, swap)
        messages = self.exchange(own, label)
        return merged([messages[self.owner(shard)] for shard in range(self.world_size)], merge)

    @final
    def agree(
        self, answer: bytes, label: str, values: Sequence[float] = (), join: Callable[..., Tensor] = torch.add
    ) -> Agreed:
        """Combine every rank's `answer`, of one length, and `values`, as many on each. Every rank must call it.

        Args:
            join: the operation on two ranks' values, such as torch.add or torch.maximum.
        """
        own = array("d", values).tobytes()
        size = len(own)
        found = self.combine(own + answer + answer, partial(_joined, size, len(answer), join), label)
        return Agreed(found[size + len(answer) :], found[size : size + len(answer)], array("d", found[:size]))

    @final
    def exchange_if_different(self, data: bytes, label: str) -> list[bytes]:
        """Return every rank's `data` as `exchange` does. It takes O(log W) messages of a rank if all are equal."""
        if self.agree(data, label).are_equal:
            return [data] * self.world_size
        return self.exchange(data, label)

    @final
    def exchange_json(self, value: Any, label: str) -> list[Any]:
        """Return every rank's `value`, converted by JSON, in rank order. It takes O(log W) messages of a rank if all are equal."""
        data = json.dumps(value).encode()
        found = self.agree(hashlib.sha256(data).digest(), f"the length of {label}", [len(data)], torch.maximum)
        if found.are_equal:
            return [json.loads(data) for _ in range(self.world_size)]
        return [json.loads(message) for message in self.exchange(data.ljust(int(found.values[0])), label)]

    @property
    def adds_on_device(self) -> bool:
        """Whether `added` works: a sum over ranks stays on the accelerator, in stream order."""
        return False

    def added(self, value: Tensor, label: str) -> Tensor:
        """Return the sum over ranks of `value`, fp64 of shape [], on its device. The host does not wait."""
        raise NotImplementedError

    @final
    def sum_values(self, value: Tensor | None, answer: bytes, label: str) -> tuple[Tensor, Agreed]:
        """Return the sum over ranks of `value` (fp64, shape []), and the ranks' combined answers, as `agree` does.

        The sum is made in the tree of `rounds.merged`, or stays on the device if the transport `adds_on_device`. If no rank gives
        a `value`, it is 0.

        Raises:
            CollectiveError: only some ranks gave a `value`; the message names them.
        """
        stays = self.adds_on_device and (
            value is None or value.device.type != "cpu"
        )  # the optimizer may be in CPU memory
        own = 0.0 if value is None or stays else float(value)
        found = self.agree(bytes([value is not None]) + answer, label, [own])
        if found.every[0] != found.some[0]:
            self._refuse_opposite(value is not None, label)
        if stays and value is not None:
            total = self.added(value, label)
        else:
            total = torch.tensor(found.values[0], dtype=torch.float64, device="cpu")
        return total, Agreed(found.every[1:], found.some[1:], found.values)

    def _refuse_opposite(self, answer: bool, label: str) -> None:
        """Raise CollectiveError, since ranks differ in an answer. Every rank must call it."""
        messages = self.exchange(bytes([answer]), label)
        others = [rank for rank, message in enumerate(messages) if message[0] != answer]
        raise CollectiveError(
            f"rank {self.rank} {'asked' if answer else 'did not ask'} for {label}, but the group's ranks "
            f"{others} did the opposite: every rank must make the same calls. Look for an `if rank == 0:` "
            "around this call."
        )

    def operation(self, name: str) -> AbstractContextManager[None]:
        """Name this thread's waits inside the block for reports, such as `save "step_10"`. The outermost name counts."""
        return nullcontext()

    # ------------------------------------------------------------------ transports that consist of others

    def count_in(self, sent: Counter[str], measure: Callable[[str], AbstractContextManager[None]]) -> None:
        """Use the counter and `measure` of a transport that is composed of this one."""
        self.sent = sent
        self.measure = measure

    def control(self) -> Collectives:
        """Return separate connections for small messages in CPU memory. Every rank must call it.

        Raises:
            CollectiveError: some ranks did not make the call; the message names them.
        """
        return self


def _joined(numbers: int, answer: int, join: Callable[..., Tensor], one: bytes, other: bytes) -> bytes:
    """Merge two messages of `agree`: `numbers` bytes of values, and the bits of any and of every answer, each `answer` bytes."""
    found = b""
    if numbers:
        values = [torch.frombuffer(bytearray(each[:numbers]), dtype=torch.float64) for each in (one, other)]
        found = join(values[0], values[1], out=values[0]).numpy().tobytes()
    if one[numbers:] == other[numbers:]:  # as in almost every step
        return found + one[numbers:]
    cut = numbers + answer
    some, every = [
        [int.from_bytes(each[part], "little") for each in (one, other)]
        for part in (slice(numbers, cut), slice(cut, None))
    ]
    return found + (some[0] | some[1]).to_bytes(answer, "little") + (every[0] & every[1]).to_bytes(answer, "little")


CHUNK_NUMEL = 1 << 16
"""Elements that a CPU sums and divides at once: few enough that the second pass finds them in the cache."""


def sum_into(contributions: Sequence[Tensor], divisor: float, out: Tensor, accumulate: bool) -> None:
    """Compute out (+)= (c0 + c1 + ... ) / divisor, in this order, in fp32 at least. `out` may be one of the contributions."""
    first = contributions[0]
    if len(contributions) == 1 and divisor == 1.0:
        if accumulate:
            out.add_(first)
        elif out.data_ptr() != first.data_ptr() or out.dtype != first.dtype or out.stride() != first.stride():
            out.copy_(first)  # otherwise it is `out` itself
        return
    dtype = torch.promote_types(first.dtype, torch.float32)
    step = CHUNK_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    for low in range(0, out.numel(), step):
        # One addend of each sum is in `dtype`, so torch adds in `dtype`, and never has casts of all rows in memory at once.
        total, *parts = [contribution[low : low + step] for contribution in contributions]
        total = total.to(dtype)
        target = out[low : low + step]
        if parts:
            # A sum in place would overwrite a row that may be needed later, as a third contribution.
            room = target if not accumulate and target.dtype == dtype and len(parts) == 1 else None
            total = torch.add(total, parts[0], out=room)
        for part in parts[1:]:
            total.add_(part)
        if accumulate:
            target.add_(torch.div(total, divisor))
        else:
            torch.div(total, divisor, out=target)


class SummedRows(Reduction, ABC):
    """A reduction that gets every rank's row, sums the rows in the order of ranks, and divides the sum by `divisor`."""

    divisor: float

    @abstractmethod
    def rows(self) -> list[Tensor]:
        """Wait for every rank's row for this rank, each [shard_numel], and return them by rank. They stay until `release`."""

    def release(self) -> None:
        """Let the transport use the memory of the rows again."""

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        sum_into(self.rows(), self.divisor, out, accumulate)
        self.release()


@dataclass(eq=False)
class ReceivedRows(SummedRows):
    """Rows that have arrived in this rank's memory when `_works` are done."""

    _works: Sequence[Work]
    _rows: Sequence[Tensor]
    divisor: float

    def rows(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return [*self._rows]


class Alone(Collectives):
    """The collectives of one rank, which sends nothing."""

    rank = 0
    world_size = 1

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        return Done()

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        return ReceivedRows((), list(rows), divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        return [data]

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        return own

    @property
    def adds_on_device(self) -> bool:
        return True

    def added(self, value: Tensor, label: str) -> Tensor:
        return value

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        return Done()
