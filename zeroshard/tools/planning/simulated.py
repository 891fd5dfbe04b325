"""Owns the simulated ranks, hosts and storages of a dry run, which count bytes but do not move data.

[Note: ranks and shards]
If every rank updates all parameters (an unsharded optimizer), the engine creates a view for each rank's shard of each
parameter. A plan for 1,024 ranks would create 1,024 times as many views, although each rank holds everything. So the
engine gets a single shard, and scratch and bytes are counted for all ranks. (A few ranks are simulated exactly, with
their padding.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import HashStore  # type: ignore[attr-defined]

from zeroshard.core.storage.base import FREE_SHARE, AcceleratorStorage, MemoryStorage, Slot
from zeroshard.core.storage.buffers import FlatBuffer
from zeroshard.core.storage.disk import DirectFile
from zeroshard.core.storage.storages import Storages
from zeroshard.core.storage.transfers import CPU, LANDED, Copies, Staging, Transfer, in_pages
from zeroshard.core.transport.base import CHUNK_NUMEL, Collectives, Done, ReceivedRows, Reduction, Work, sum_into
from zeroshard.core.transport.composed import CrossingCount, OneHost, TwoLevel
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.native import NativeMean
from zeroshard.core.transport.rounds import Merge, moves
from zeroshard.core.transport.watch import Watch
from zeroshard.errors import UsageError
from zeroshard.policy import Offload, Policy
from zeroshard.tools.planning.ledger import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, PARAMETERS, Ledger
from zeroshard.tools.planning.machine import Machine

T = TypeVar("T")

_FEW = 4
"""The maximum number of ranks that are always simulated exactly. See [Note: ranks and shards]."""

# ---------------------------------------------------------------------- ranks


class _Sum(NativeMean):
    """One row that is summed already, as by NCCL. It may be shorter than the single shard of [Note: ranks and shards]."""

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        super().finish(out[: self._total.numel()], accumulate=accumulate)


class _Rows(ReceivedRows):
    """The rows of a reduction, which a CPU sums in chunks that all take the same memory. A dry run sums the first and the last."""

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        arrived = self.rows()
        for low in dict.fromkeys((0, out.numel() // CHUNK_NUMEL * CHUNK_NUMEL)):
            part = slice(low, low + CHUNK_NUMEL)
            if low < out.numel():
                sum_into([row[part] for row in arrived], self.divisor, out[part], accumulate)


_ROWS_SUMMED = 3
"""The maximum number of rows whose sum is run. The first two make a new tensor, to which the further ones are added."""


class SimulatedRanks(Collectives):
    """Rank 0 of `ranks` ranks. The others are simulated and send as much as this one.

    Args:
        ranks: the number of ranks.
        shards: the number of ranks that the engine sees; see [Note: ranks and shards].
        ledger: the ledger that counts buffers.
        sums: whether the backend sums (native) or delivers every rank's row (gloo). A native backend rounds each sum,
            so it gets gradients in fp32 at least. It launches several collectives as one.

    Attributes:
        calls: the number of calls of each collective.
    """

    def __init__(self, ranks: int, shards: int, ledger: Ledger, *, sums: bool) -> None:
        super().__init__()
        self.rank = 0
        self.ranks = ranks
        self.world_size = shards
        self._sums = sums
        self._ledger = ledger
        self.calls: Counter[str] = Counter()

    def launches(self, operations: Sequence[T]) -> list[tuple[T, ...]]:
        return [tuple(operations)] if self._sums else super().launches(operations)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32) if self._sums else dtype

    def _send(self, kind: str, nbytes: int) -> Work:
        if self.ranks > 1:
            self.count(kind, nbytes)
        return Done()

    def count(self, kind: str, nbytes: int) -> None:
        """Count a message that this rank sends."""
        self.sent[kind] += nbytes
        self.calls[kind] += 1

    def _send_row(self, kind: str, rows: Tensor) -> Work:
        """Send one row to every other rank."""
        return self._send(kind, rows.nbytes * (self.ranks - 1) // self.ranks)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        return self._send_row("all_gather", rows)

    def workspace_numel(self, rows: Tensor) -> int:
        if self.ranks == 1:
            return 0
        own = rows.numel() // self.ranks
        return own if self._sums else (self.ranks - 1) * own

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        arriving = self._send_row("reduce_scatter", rows)
        if self.ranks > 1 and (self._sums or self.world_size < self.ranks):
            if self._sums and divisor == self.world_size:  # the backend divides
                divisor = 1.0
            return _Sum(arriving, workspace[: rows.numel() // self.ranks], divisor)
        summed = [rows[0]]
        if self.world_size > 1:
            summed += workspace.view(self.world_size - 1, rows.shape[1])[: _ROWS_SUMMED - 1]
        return _Rows([arriving], summed, divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if self.ranks > 1 and tensor.numel():
            self._send("broadcast", tensor.nbytes)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        self._send("exchange", len(data) * (self.ranks - 1))
        return [data] * self.world_size

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        self._send("exchange", len(own) * sum(receiver is not None for receiver, _ in moves(0, self.ranks)))
        return own

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        return self._send("transfer", tensor.nbytes if source == 0 else 0)


# ---------------------------------------------------------------------- hosts


class SimulatedTwoLevel(TwoLevel):
    """A `TwoLevel` over simulated ranks: rows, scratch, and messages inside and across hosts are as in a real run.

    Attributes:
        calls: the number of calls of each collective.
    """

    def __init__(self, ranks: int, within: int, make: Callable[..., SimulatedRanks]) -> None:
        store = HashStore()
        group: Any = store  # the group is used only for its members
        members = Members(tuple(range(ranks)), 0, ranks, timedelta(), "simulated", weakref.ref(group), store, store)
        watch = Watch(store, members.ranks, 0, inf)
        watch.close()  # nothing waits
        super().__init__(members, torch.device("cpu"), watch, within, make)  # type: ignore[arg-type]
        self.calls: Counter[str] = Counter()
        for one, calls in ((self.inside, self.calls), (self.across, CrossingCount(self.calls))):
            if isinstance(one, SimulatedRanks):
                one.calls = calls


@dataclass(frozen=True)
class SimulatedHosts:
    """The hosts over which the simulated ranks are spread, in order.

    Attributes:
        sums: whether their backend sums; see `SimulatedRanks`.
    """

    ranks: int
    hosts: int
    ledger: Ledger
    sums: bool

    def collectives(self, policy: Policy) -> SimulatedRanks | SimulatedTwoLevel:
        """Create simulated collectives; the counterpart of `create_collectives`.

        Raises:
            UsageError: `within` does not divide the ranks, or is "host" and hosts have different numbers of ranks.
        """
        size = policy.within
        if size is None or self.ranks == 1:
            return self._flat(policy)
        if size == "host":
            size, rest = divmod(self.ranks, self.hosts)
            if rest:
                raise UsageError(
                    f'within="host" needs the same number of ranks on each host, and {self.ranks} ranks cannot be '
                    f"divided evenly over {self.hosts} hosts. Choose a multiple of the number of hosts."
                )

        def make(members: Members, _device: torch.device, _watch: Watch) -> SimulatedRanks:
            count = len(members.ranks)
            return self._simulated(count, count)

        try:
            return SimulatedTwoLevel(self.ranks, size, make)
        except OneHost:
            return self._flat(policy)

    def part_of(
        self, all_ranks: SimulatedRanks | SimulatedTwoLevel, policy: Policy, group: dist.ProcessGroup | None, **_: Any
    ) -> SimulatedRanks | SimulatedTwoLevel:
        """Return the collectives of a group: of `all_ranks`, or of a part of them, whose bytes count as theirs."""
        if group is None or group.size() == self.ranks:
            return all_ranks
        part = replace(self, ranks=group.size())._flat(policy)
        part.calls = all_ranks.calls
        return part

    def _flat(self, policy: Policy) -> SimulatedRanks:
        shards = 1  # see [Note: ranks and shards]
        if policy.optimizer.sharded or self.ranks <= _FEW:
            shards = self.ranks
        return self._simulated(self.ranks, shards)

    def _simulated(self, ranks: int, shards: int) -> SimulatedRanks:
        # One rank has no backend (see `Alone`).
        return SimulatedRanks(ranks, shards, self.ledger, sums=self.sums and self.ranks > 1)


# ---------------------------------------------------------------------- storages


@final
class _CountedBuffer(FlatBuffer):
    """A buffer in torch's memory, whose size the ledger tracks."""

    has_address = False

    def __init__(self, label: str, tensor: Tensor, ledger: Ledger) -> None:
        super().__init__(label, tensor)
        self._ledger = ledger

    def _give_back(self) -> None:
        super()._give_back()
        self._ledger.resized(self.tensor)

    def _take(self) -> None:
        super()._take()
        self._ledger.resized(self.tensor)


def _purpose_of(label: str) -> str:
    """Return the category of a slot or buffer, from its label."""
    if label.startswith("gradients"):
        return GRADIENTS
    if "master weights" in label:
        return OPTIMIZER
    return PARAMETERS


@final
class _Device(AcceleratorStorage):
    """The memory of the device that computes."""

    def __init__(self, ledger: Ledger, copies: Copies, machine: Machine) -> None:
        super().__init__(CPU, copies)
        self._ledger = ledger
        self._memory = machine.memory - machine.unseen.context - machine.unseen.collectives - machine.unseen.workspaces

    def has_room(self, nbytes: int) -> bool:
        return nbytes + self._memory * FREE_SHARE <= self._memory - self._ledger.peak.nbytes

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self.nbytes += numel * dtype.itemsize
        with self._ledger.purpose(_purpose_of(label)):
            return self.around(label, torch.zeros(numel, dtype=dtype))

    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype) -> FlatBuffer:
        with self._ledger.purpose(_purpose_of(label)):
            return _CountedBuffer(label, torch.zeros(numel, dtype=dtype), self._ledger)


@final
class _Host(MemoryStorage):
    """The CPU memory of an accelerator's host."""

    def __init__(self, ledger: Ledger, copies: Copies) -> None:
        super().__init__(CPU, copies)
        self._ledger = ledger

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._ledger.purpose("frames", on_host=True):
            return torch.empty(numel, dtype=dtype)

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        nbytes = in_pages(numel * dtype.itemsize)
        self.nbytes += numel * dtype.itemsize
        with self._ledger.purpose(_purpose_of(label), on_host=True):
            memory = torch.zeros(nbytes, dtype=torch.uint8)
        return self.around(label, memory[: numel * dtype.itemsize].view(dtype))


class _Copies(Copies):
    """Copies between the device and CPU memory, which only convert."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(CPU)
        self._ledger = ledger

    def copy(self, target: Tensor, source: Tensor, after: Transfer = LANDED) -> Transfer:
        if self._ledger.is_on_host(target) == self._ledger.is_on_host(source):
            return super().copy(target, source, after)
        if target.dtype != source.dtype:
            source.to(target.dtype)
        return LANDED


class _File(DirectFile):
    """A file that does not write anything."""

    def __init__(self, offload: Offload) -> None:
        self.buffers_nbytes = offload.requests * min(offload.block_nbytes, 1 << 20)
        self._nbytes = 0
        self._released = {}

    def allocate(self, nbytes: int, label: str) -> int:
        start = self._nbytes
        self._nbytes += in_pages(nbytes)
        return start

    def write(self, start: int, flat: Tensor, label: str, after: Transfer = LANDED) -> Transfer:
        return LANDED

    def read(self, start: int, flat: Tensor, label: str) -> Transfer:
        return LANDED

    def close(self) -> None:
        return


class SimulatedStorages(Storages):
    """The storages of one dry run."""

    def __init__(
        self, policy: Policy, device: torch.device, param_itemsize: int, ledger: Ledger, machine: Machine
    ) -> None:
        self._ledger = ledger
        self._machine = machine
        super().__init__(policy, device, param_itemsize)

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._ledger.purpose(BUFFERS):
            return torch.empty(numel, dtype=dtype)

    def host_copies(self) -> saved_tensors_hooks:
        """Return hooks that keep recomputation's inputs in CPU memory, as torch's `save_on_cpu` does."""

        def pack(tensor: Tensor) -> Tensor:
            with self._ledger.purpose(ACTIVATIONS, on_host=True):
                memory = torch.empty_like(tensor)
            self._copies.copy(memory, tensor)
            return memory

        def unpack(memory: Tensor) -> Tensor:
            with self._ledger.purpose(ACTIVATIONS):
                back = torch.empty_like(memory)
            self._copies.copy(back, memory).wait(CPU)
            return back

        return saved_tensors_hooks(pack, unpack)

    def _make_copies(self, device: torch.device) -> Copies:
        return _Copies(self._ledger)

    def _make_accelerator(self, device: torch.device) -> AcceleratorStorage:
        return _Device(self._ledger, self._copies, self._machine)

    def _make_host(self, device: torch.device) -> MemoryStorage:
        if self._machine.computes_on_cpu:
            return self.accelerator
        return _Host(self._ledger, self._copies)

    def _make_file(self, offload: Offload) -> DirectFile:
        return _File(offload)

    def _make_staging(self, count: int, nbytes: int, *, pin: bool) -> Staging:
        def make(size: int) -> Tensor:
            with self._ledger.purpose("staging", on_host=True):
                return torch.empty(size, dtype=torch.uint8)

        return Staging(count, nbytes, make)
