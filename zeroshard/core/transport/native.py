"""Owns the transport for backends whose own collectives can be used: NCCL and similar ones.

Tensors go over the backend, and the host waits for none of them. Small messages go from CPU to CPU over gloo, so a step does
not wait for the device to receive them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions  # type: ignore[attr-defined]

from zeroshard.core.transport.base import Reduction, Work
from zeroshard.core.transport.grouped import TRANSFER_TAG, Grouped, GroupedTransfer, PointToPoint
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.rounds import Merge
from zeroshard.core.transport.watch import Watch

T = TypeVar("T")

_GATHER = "gather"
_REDUCE = "reduce"
_METHODS = {
    (_GATHER, False): ("all_gather_single", "_allgather_base"),
    (_GATHER, True): ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    (_REDUCE, False): ("reduce_scatter_single", "_reduce_scatter_base"),
    (_REDUCE, True): ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
}
"""By kind, and whether there are several tensors: the name of a group's method in torch 2.13, and in earlier releases."""
_WITHOUT_AVG = ("gloo", "mpi")
"""Backends without ReduceOp.AVG."""


class _Launch(NamedTuple):
    """A collective that will be launched."""

    output: Tensor
    input: Tensor
    transfer: GroupedTransfer
    averages: bool
    """Whether the backend divides the sum."""


class _Move(NamedTuple):
    """One end of a transfer that will be started."""

    operation: dist.P2POp
    peer: int
    transfer: GroupedTransfer


class _OnDevice(GroupedTransfer):
    """A transfer for which only the device waits, under the watchdog, while the host continues."""

    def wait(self) -> None:
        super().wait()
        collectives = self._collectives
        if collectives.device.type != "cpu":  # a CPU has no streams
            event = torch.accelerator.current_stream(collectives.device).record_event()
            collectives.watch.follow(self._label, event.query)


class Native(Grouped):
    """The backend's own collectives. Reductions and gathers have separate groups, so that neither waits for the other.

    A device may be able to run only one of the two communicators' operations at a time, so all ranks use one order.

    Args:
        lasting: if False, all operations use the user's own group.
    """

    def __init__(self, members: Members, device: torch.device, watch: Watch, *, lasting: bool = True) -> None:
        super().__init__(members, device, watch)
        self._group = self._gather_group = members.group
        if lasting:
            self._group = self._made(members.registered)
            self._gather_group = self._made(members.registered)
        self._is_lasting = lasting
        self._messages: PointToPoint | None = None
        backend = self._group._get_backend(device)  # torch has no public reader
        self._launches_together = bool(getattr(backend, "supports_coalescing", False))
        self._is_open = False
        """Whether operations that begin now are launched later, together."""
        self._options: dict[str, Any] = {_GATHER: AllgatherOptions(), _REDUCE: ReduceScatterOptions()}
        for options in self._options.values():
            options.asyncOp = True
        self._begun: dict[str, list[_Launch]] = {_GATHER: [], _REDUCE: []}
        self._moves: list[_Move] = []
        if lasting:  # a group's first operation must involve all its ranks; a transfer does not
            self.broadcast(torch.zeros(1, device=device))
            self.sent.clear()

    def close(self) -> None:
        super().close()
        if self._messages is not None:
            self._messages.close()
        # torch names a subgroup by the number of groups. A destroyed subgroup would pass its name, and its stale addresses
        # in the store, on to the next, so subgroups stay until the process ends.
        if self._is_lasting and dist.is_initialized() and not self.members.is_subgroup:
            dist.destroy_process_group(self._gather_group)
            dist.destroy_process_group(self._group)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # The backend rounds after each addition, to the dtype that is sent.
        return torch.promote_types(dtype, torch.float32)

    # ------------------------------------------------------------------ launches

    def launches(self, operations: Sequence[T]) -> list[tuple[T, ...]]:
        return [tuple(operations)] if self._launches_together else super().launches(operations)

    @contextmanager
    def together(self) -> Iterator[None]:
        if self._is_open or not self._launches_together:
            yield
            return
        self._is_open = True
        try:
            yield
        finally:  # also after an error, since this rank and others may be waiting for operations that have begun
            self._is_open = False
            self._start("transfers between ranks")

    def _begin(
        self, kind: str, output: Tensor, source: Tensor, label: str, *, averages: bool = False
    ) -> GroupedTransfer:
        transfer = _OnDevice(self, None, kind, label)
        launch = _Launch(output, source, transfer, averages)
        if self._is_open:
            self._begun[kind].append(launch)
        else:
            self._launch(kind, [launch])
        return transfer

    def _start(self, label: str) -> None:
        """Launch the operations that have begun: gathers, then reductions, then transfers, each kind at once."""
        begun = self._begun
        moves = self._moves
        self._begun = {_GATHER: [], _REDUCE: []}
        self._moves = []
        for kind, launches in begun.items():
            if launches:
                self._launch(kind, launches)
        if moves:
            # All at once: for single transfers, each pair of ranks would need its own communicator.
            with self.guarded(label):
                works = dist.batch_isend_irecv([move.operation for move in moves])
            one_each = len(works) == len(moves)  # or one for all
            for number, move in enumerate(moves):
                own = works[number : number + 1] if one_each else works
                move.transfer.works = [(work, move.peer) for work in own]

    def _launch(self, kind: str, launches: list[_Launch]) -> None:
        group: dist.ProcessGroup = self._gather_group
        options = self._options[kind]
        if kind == _REDUCE:
            group = self._group
            options.reduceOp = dist.ReduceOp.AVG if launches[0].averages else dist.ReduceOp.SUM
        # The group's own method, as in `PointToPoint`: torch has no public function for several tensors.
        newer, older = _METHODS[kind, len(launches) > 1]
        method = getattr(group, newer, None) or getattr(group, older)
        if len(launches) == 1:
            work = method(launches[0].output, launches[0].input, options)
        else:
            work = method([one.output for one in launches], [one.input for one in launches], options)
        for launch in launches:
            launch.transfer.works = [(work, None)]

    # ------------------------------------------------------------------ operations

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        self.sent["all_gather"] += rows.nbytes // self.world_size * (self.world_size - 1)
        return self._begin(_GATHER, rows.view(-1), rows[self.rank], label)

    def workspace_numel(self, rows: Tensor) -> int:
        return rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        self.sent["reduce_scatter"] += rows.nbytes // self.world_size * (self.world_size - 1)
        # If possible, the backend divides while it adds, so that no sum grows with the number of ranks.
        averages = divisor == self.world_size and self.members.backend not in _WITHOUT_AVG
        arriving = self._begin(_REDUCE, workspace, rows.view(-1), label, averages=averages)
        return NativeMean(arriving, workspace, 1.0 if averages else divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        self.sent["broadcast"] += tensor.nbytes if self.rank == source else 0
        with self.guarded(f"a broadcast of rank {self.members.ranks[source]}"):
            dist.broadcast(tensor, src=self.members.ranks[source], group=self._group)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        transfer = _OnDevice(self, (), "transfer", label)
        if self.rank not in (source, target) or source == target:
            return transfer
        self.sent["transfer"] += tensor.nbytes if self.rank == source else 0
        operation, peer = (dist.isend, target) if self.rank == source else (dist.irecv, source)
        end = dist.P2POp(operation, tensor, self.members.ranks[peer], self._group, TRANSFER_TAG)
        self._moves.append(_Move(end, peer, transfer))
        if not self._is_open:
            self._start(label)
        return transfer

    # ------------------------------------------------------------------ messages

    def _between_cpus(self) -> PointToPoint:
        """Return the connections for messages, opened at first use. Every rank must call it."""
        if self._messages is None:
            self._messages = PointToPoint(self.members, torch.device("cpu"), self.watch, only_messages=True)
            self._messages.sent = self.sent
        return self._messages

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        with self.measure("exchange"):
            return self._between_cpus().exchange(data, label)

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        with self.measure("exchange"):
            return self._between_cpus().combine(own, merge, label)

    @property
    def adds_on_device(self) -> bool:
        return self.device.type != "cpu"

    def added(self, value: Tensor, label: str) -> Tensor:
        # In its own group's order of operations, as reductions; one sum for all ranks, so all get the same bits.
        total = value.detach().reshape(1).clone()
        self.sent["exchange"] += total.nbytes
        transfer = _OnDevice(self, [(self._group.allreduce([total], AllreduceOptions()), None)], _REDUCE, label)
        transfer.wait()
        return total[0]


@dataclass(eq=False)
class NativeMean(Reduction):
    """A reduce-scatter of the backend, whose result `finish` divides if the backend did not."""

    _transfer: Work
    _total: Tensor
    _divisor: float

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._transfer.wait()
        if self._divisor == 1.0:
            out.add_(self._total) if accumulate else out.copy_(self._total)
        elif accumulate:
            out.add_(self._total.to(out.dtype).div_(self._divisor))
        else:
            out.copy_(self._total).div_(self._divisor)
