"""Owns every byte that leaves this rank: the only user of torch.distributed at run time. Called by bucket and optimizer.

`Collectives` has three final classes. `PointToPoint` is for gloo, whose own reduce-scatter moves twice the bytes that
are needed: each pair of ranks exchanges exactly the rows that the other one owns, straight from and into the bucket's
storage, under a tag of its own, so two ranks that diverge never mistake one transfer for another. `Native` is for
backends whose collectives are right as they are (NCCL and its kin). `Alone` is one rank.

All of them sum over ranks in rank order and divide by the world size after, so a result does not depend on who asks.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.errors import CollectiveError

CHUNK_NUMEL = 1 << 16
"""Elements that are summed and divided at once: small enough that the second pass finds them in the cache."""

_SEQUENCE_BITS = 8
_TRANSFER_TAG = (1 << 30) + 1
"""Transfers from one rank to another keep their order, so one tag does for all; no bucket has this number."""
_REPORT_SECONDS = 5.0


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

    @property
    def _divisor(self) -> float:
        return self.world_size / self.predivide_factor

    def close(self) -> None:
        """Give back what the operating system lent: sockets, threads."""


def create_collectives(
    group: dist.ProcessGroup | None, device: torch.device, predivide_factor: float = 1.0
) -> Collectives:
    """The collectives for `group` (None: all ranks, or this one alone when torch.distributed is not initialised)."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone(predivide_factor)
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    if dist.get_world_size(parent) == 1:
        return Alone(predivide_factor)
    config = dist.distributed_c10d.get_backend_config(parent)
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    # Tensors on the CPU travel over gloo, also where the group's backend serves accelerators alone.
    backend = backends.get(device.type, "gloo" if device.type == "cpu" else config)
    return (PointToPoint if backend == "gloo" else Native)(parent, device, predivide_factor)


def create_control(group: dist.ProcessGroup | None) -> Collectives:
    """Connections of their own for small messages, over gloo whatever the group's backend: for a thread beside the training."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    return Alone() if dist.get_world_size(parent) == 1 else PointToPoint(parent, torch.device("cpu"), 1.0)


class Alone(Collectives):
    """One rank: nothing to send."""

    rank = 0
    world_size = 1

    class _Nothing(Pending):
        def wait(self) -> None:
            return

    class _Mean(PendingReduction):
        def __init__(self, rows: Tensor, divisor: float) -> None:
            self._rows, self._divisor = rows, divisor

        def finish(self, out: Tensor, *, accumulate: bool) -> None:
            _sum_into(list(self._rows), self._divisor, out, accumulate)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        return self._Nothing()

    def workspace_numel(self, rows: Tensor) -> int:
        return 0

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        return self._Mean(rows, self._divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        return [data]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        return self._Nothing()


class _Grouped(Collectives):
    """What the two multi-rank classes share: a process group of our own, and the report when a wait fails."""

    _backend: str | None = None
    """Of the process group; None is that of the group it is made from."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, predivide_factor: float) -> None:
        super().__init__(predivide_factor)
        self._device = device
        self._ranks = dist.get_process_group_ranks(parent)
        # The group's own timeout is the user's word on how long to wait; torch has no public reader of it.
        known = [one for one in parent._device_types if one.type == device.type] or parent._device_types
        self._timeout: timedelta = parent._get_backend(known[0]).options._timeout
        self._group = self._new_group()
        self._store = self._group.get_group_store()
        self.rank = dist.get_rank(self._group)
        self.world_size = len(self._ranks)

    def _new_group(self) -> dist.ProcessGroup:
        """A group of our own: our tags and our order of collectives never meet the user's."""
        group: dist.ProcessGroup | None = dist.new_group(
            self._ranks,
            timeout=self._timeout,
            backend=self._backend,
            use_local_synchronization=self._is_subgroup,
        )
        assert group is not None
        return group

    @property
    def _is_subgroup(self) -> bool:
        return len(self._ranks) < dist.get_world_size()

    def _destroy(self, group: dist.ProcessGroup) -> None:
        # torch names a subgroup by how many groups there are: one that is gone gives its name, and its stale addresses in
        # the store, to the next. So subgroups stay until the process ends.
        if dist.is_initialized() and not self._is_subgroup:
            dist.destroy_process_group(group)

    def close(self) -> None:
        self._destroy(self._group)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        self.sent["broadcast"] += tensor.nbytes if self.rank == source else 0
        dist.broadcast(tensor, src=self._ranks[source], group=self._group)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        works: list[dist.Work | None] = []
        if self.rank == source:
            self.sent["transfer"] += tensor.nbytes
            works = [self._group.send([tensor], target, _TRANSFER_TAG)]
        elif self.rank == target:
            works = [self._group.recv([tensor], source, _TRANSFER_TAG)]
        return _Transfer(self, works, "transfer", label)

    def _guarded(self, wait: Callable[[], Any], label: str) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise CollectiveError(self._report(label, error)) from error

    def _report(self, label: str, error: RuntimeError) -> str:
        """Say what every rank was doing. A failed wait closes gloo's connections, so all blocked ranks get here."""
        self._store.set(f"stuck/{self.rank}", json.dumps({"label": label}))
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        deadline = time.monotonic() + _REPORT_SECONDS
        doing: dict[int, str] = {}
        while len(doing) < len(others) and time.monotonic() < deadline:
            for rank in others:
                if rank not in doing and self._store.check([f"stuck/{rank}"]):
                    doing[rank] = json.loads(self._store.get(f"stuck/{rank}"))["label"]
            time.sleep(0.05)
        lines = [f"rank {self.rank} waited for {label}"]
        for rank in others:
            lines.append(
                f"rank {rank} waited for {doing[rank]}"
                if rank in doing
                else f"rank {rank} was not waiting for any rank (dead, finished, or still in other code)"
            )
        return (
            f"the ranks no longer do the same thing, or one of them is gone (timeout {self._timeout}):\n  "
            + "\n  ".join(lines)
            + "\nEvery rank must run the same units in the same order, and take the same number of microbatches and "
            "steps. Declare a module that runs only a part of itself, by its input, as a leaf: Units(leaf_classes=...), or "
            f"zero_optimization.leaf_module in a config. The backend said: {str(error).splitlines()[0]}"
        )


class PointToPoint(_Grouped):
    """Pairwise transfers over gloo."""

    _backend = "gloo"

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, predivide_factor: float) -> None:
        super().__init__(parent, device, predivide_factor)
        self._sequence: Counter[int] = Counter()

    def _tag(self, bucket: int, kind: int) -> int:
        """A number that only the same operation of the same bucket carries, on every rank."""
        channel = bucket * 3 + kind
        self._sequence[channel] += 1
        return channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)

    def _peers(self) -> list[int]:
        # Each rank starts with its neighbour, so that not everybody sends to rank 0 first.
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _transfer(
        self, send: dict[int, Tensor], receive: dict[int, Tensor], tag: int, kind: str, label: str
    ) -> _Transfer:
        # The group's own methods: dist.isend and irecv cost 20 times their microseconds in checks, 200 times a step.
        try:
            works = [self._group.recv([tensor], peer, tag) for peer, tensor in receive.items()]
            works += [self._group.send([tensor], peer, tag) for peer, tensor in send.items()]
        except RuntimeError as error:
            raise CollectiveError(self._report(label, error)) from error
        return _Transfer(self, works, kind, label)

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        peers = self._peers()
        own = rows[self.rank]
        self.sent["all_gather"] += own.nbytes * len(peers)
        send = dict.fromkeys(peers, own)
        return self._transfer(send, {peer: rows[peer] for peer in peers}, self._tag(bucket, 0), "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return (self.world_size - 1) * rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        peers = self._peers()
        received = dict(zip(peers, workspace.view(len(peers), rows.shape[1]), strict=True))
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(peers)
        send = {peer: rows[peer] for peer in peers}
        transfer = self._transfer(send, received, self._tag(bucket, 1), "reduce", label)
        contributions = [received[rank] if rank != self.rank else rows[rank] for rank in range(self.world_size)]
        return _PairwiseMean(transfer, contributions, self._divisor)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        peers = self._peers()
        received = {peer: torch.empty_like(own) for peer in peers}
        self.sent["exchange"] += own.nbytes * len(peers)
        self._transfer(dict.fromkeys(peers, own), received, self._tag(0, 2), "exchange", label).wait()
        received[self.rank] = own
        return [received[rank].numpy().tobytes() for rank in range(self.world_size)]


class _Transfer(Pending):
    def __init__(self, collectives: _Grouped, works: Sequence[dist.Work | None], kind: str, label: str) -> None:
        self._collectives, self._works, self._kind, self._label = collectives, works, kind, label

    def wait(self) -> None:
        works, self._works = self._works, ()
        with self._collectives.measure(self._kind):
            for work in works:
                if work is not None:
                    self._collectives._guarded(work.wait, self._label)


class _PairwiseMean(PendingReduction):
    def __init__(self, transfer: _Transfer, contributions: list[Tensor], divisor: float) -> None:
        self._transfer, self._contributions, self._divisor = transfer, contributions, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._transfer.wait()
        _sum_into(self._contributions, self._divisor, out, accumulate)


def _sum_into(contributions: Sequence[Tensor], divisor: float, out: Tensor, accumulate: bool) -> None:
    """out (+)= (c0 + c1 + ... ) / divisor, in this order, in fp32 at least. `out` may be one of the contributions."""
    dtype = torch.promote_types(contributions[0].dtype, torch.float32)
    for low in range(0, out.numel(), CHUNK_NUMEL):
        high = min(low + CHUNK_NUMEL, out.numel())
        parts = [contribution[low:high].to(dtype) for contribution in contributions]
        total = torch.add(parts[0], parts[1]) if len(parts) > 1 else parts[0]
        for part in parts[2:]:
            total.add_(part)
        if accumulate:
            out[low:high].add_(torch.div(total, divisor))
        else:
            torch.div(total, divisor, out=out[low:high])


class Native(_Grouped):
    """The backend's own collectives, reduce and gather on groups of their own so that neither waits for the other."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, predivide_factor: float) -> None:
        super().__init__(parent, device, predivide_factor)
        self._gather_group = self._new_group()
        # torch 2.13 renamed them; 2.11 has the old names only.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def close(self) -> None:
        self._destroy(self._gather_group)
        super().close()

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        self.sent["all_gather"] += rows[self.rank].nbytes * (self.world_size - 1)
        work = self._all_gather(rows.view(-1), rows[self.rank], group=self._gather_group, async_op=True)
        return _Transfer(self, [work], "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * (self.world_size - 1)
        work = self._reduce_scatter(workspace, rows.view(-1), group=self._group, async_op=True)
        return _NativeMean(_Transfer(self, [work], "reduce", label), workspace, self._divisor)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        everyone = own.new_empty(self.world_size * own.numel())
        self.sent["exchange"] += own.nbytes * (self.world_size - 1)
        work = self._all_gather(everyone, own, group=self._group, async_op=True)
        _Transfer(self, [work], "exchange", label).wait()
        return [row.numpy().tobytes() for row in everyone.view(self.world_size, -1).cpu()]


class _NativeMean(PendingReduction):
    def __init__(self, transfer: _Transfer, total: Tensor, divisor: float) -> None:
        self._transfer, self._total, self._divisor = transfer, total, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._transfer.wait()
        if accumulate:
            out.add_(self._total.to(out.dtype).div_(self._divisor))
        else:
            out.copy_(self._total).div_(self._divisor)
