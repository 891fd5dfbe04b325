"""The transport: the operations between ranks that the other packages use, over any medium.

A transport implements five operations: `all_gather`, `reduce_scatter`, `broadcast`, `exchange`, `transfer`. Every other
method has a default that is correct for all transports, except `discard` (for memory that the system lends), which has
no default. Callers do not depend on the kind of transport.
"""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from zeroshard.errors import CollectiveError

T = TypeVar("T")


def nothing() -> None:
    """Do nothing."""


class Sent:
    """The memory lent to an operation. Other ranks may still read it in place after the operation has ended on this rank."""

    @property
    def parts(self) -> Sequence[Sent]:
        """The operations that this one consists of."""
        return ()

    def wait_released(self) -> None:
        """Block until the sent memory may be written again."""
        for part in self.parts:
            part.wait_released()

    @property
    def is_released(self) -> bool:
        """Whether the sent memory may be written again."""
        return all(part.is_released for part in self.parts)


class Work(Sent, ABC):
    """An operation in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Block, or let only this stream wait, until the data may be used. Raise `CollectiveError` if it cannot arrive."""

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


class Reduction(Sent, ABC):
    """A reduce-scatter in flight."""

    @abstractmethod
    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        """Wait, then set `out` [shard_numel] to the divided sum over ranks of this rank's row, or add that sum to `out`."""


class Collectives(ABC):
    """A transport. `rows` is a [world_size, shard_numel] tensor, of which each rank owns one row."""

    rank: int
    world_size: int

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes that this rank sent to others, by operation."""
        self.measure: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        """Returns a context for each wait for other ranks, by kind: "reduce", "gather", "exchange", "transfer", "broadcast"."""
        self.on_failure: list[Callable[[], None]] = []
        """Functions that notify the ranks waiting for this one. They are called after a wait of this rank has failed."""

    # ------------------------------------------------------------------ the five operations

    @abstractmethod
    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        """Start to fill every row from its owner, in place; this rank's own row is the input.

        Args:
            own: [shard_numel], this rank's stored values. They must not change before `wait_released(own)`.
            prepare: gives `rows` memory and puts this rank's values into its row. It is called at most once: now, or in `wait`.
        """

    @abstractmethod
    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        """Start to sum this rank's row over ranks. `workspace` is busy until `finish`, `rows` until the result's `wait_released`.

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

    def wait_released(self, memory: Tensor | None = None) -> None:
        """Block until no other rank is reading `memory` (default: all memory at rest), which is about to change."""

    def close(self) -> None:
        """Release sockets and threads."""

    # ------------------------------------------------------------------ memory

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeroed CPU memory [numel] to send from. Other ranks may be able to read it in place."""
        return torch.zeros(numel, dtype=dtype)

    def resting_memory(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for parameters at rest, or None if other ranks read them equally well in any memory."""
        return None

    def sends_in_place(self, tensor: Tensor) -> bool:
        """Return whether a reduction sends the tensor without first copying it to memory that other ranks can read."""
        return True

    def is_lent_by_system(self, tensor: Tensor) -> bool:
        """Return whether `buffer` took the tensor's memory from the operating system, so that torch cannot free it."""
        return False

    def discard(self, memory: Tensor) -> None:
        """Free the pages of a whole tensor from `buffer`, if the system lends it. Its content is undefined until it is written."""
        raise NotImplementedError

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

    def by_shard(self, by_rank: Tensor) -> Tensor:
        """Reorder values [world_size], one for each rank, by the rows that the ranks own."""
        return by_rank

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

    def exchange_json(self, value: Any, label: str) -> list[Any]:
        """Return every rank's `value`, converted by JSON, in rank order."""
        data = json.dumps(value).encode()
        lengths = self.exchange(len(data).to_bytes(8, "little"), f"the length of {label}")
        longest = max(int.from_bytes(length, "little") for length in lengths)
        return [json.loads(message) for message in self.exchange(data.ljust(longest), label)]

    def exchange_values(self, value: Tensor | None, data: bytes, label: str) -> tuple[Tensor, list[bytes]]:
        """Return every rank's `value` (fp64, shape []) as [world_size], and its `data` as `exchange` does, in rank order.

        The host waits for a value on a device, except in `Native` and `Alone`: there it stays on the device, in stream order.
        If no rank gives a `value`, the values are zeros. If only some do, the call raises CollectiveError.
        """
        own = struct.pack("<d", 0.0 if value is None else float(value))
        messages = self.agreed(value is not None, own + data, label)
        values = [struct.unpack_from("<d", message)[0] for message in messages]
        return torch.tensor(values, dtype=torch.float64, device="cpu"), [message[8:] for message in messages]

    @final
    def agreed(self, answer: bool, data: bytes, label: str) -> list[bytes]:
        """Return every rank's `data`, as `exchange` does, if all give the same `answer`; otherwise raise CollectiveError."""
        messages = self.exchange(bytes([answer]) + data, label)
        others = [rank for rank, message in enumerate(messages) if message[0] != answer]
        if others:
            raise CollectiveError(
                f"rank {self.rank} {'asked' if answer else 'did not ask'} for {label}, but the group's ranks "
                f"{others} did the opposite: every rank must make the same calls. Look for an `if rank == 0:` "
                "around this call."
            )
        return [message[1:] for message in messages]

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
        """Let the ranks that lent the rows write to them again."""

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        sum_into(self.rows(), self.divisor, out, accumulate)
        self.release()


@dataclass(eq=False)
class ReceivedRows(SummedRows):
    """Rows that have arrived in this rank's memory when `_works` are done."""

    _works: Sequence[Work]
    _rows: Sequence[Tensor]
    divisor: float

    @property
    def parts(self) -> Sequence[Work]:
        return self._works

    def rows(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return [*self._rows]


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
        return ReceivedRows((), list(rows), divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        return [data]

    def exchange_values(self, value: Tensor | None, data: bytes, label: str) -> tuple[Tensor, list[bytes]]:
        values = torch.zeros(1, dtype=torch.float64, device="cpu") if value is None else value.reshape(1)
        return values, [data]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        return Done()
