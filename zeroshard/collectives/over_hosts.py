"""Ranks of several hosts, where those of each host share memory: sums in the order of ranks, and each gathered row crosses once.

Composes two others. Of H hosts with S ranks each, which follow one another in the group, rank h * S + s is at place s of host h:

    inside   over the S ranks of its host
    gloo     to all ranks of other hosts

A gathered row crosses to the rank at its owner's place on each other host, which shares it with its neighbours. The rows of a
reduction go to their owners directly: the sum has the order of all ranks, and so the bits that it has over gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, SummedRows, Work, nothing
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.members import Members
from zeroshard.collectives.point_to_point import PointToPoint, control_of
from zeroshard.collectives.watch import Watch


class OverHosts(Grouped):
    """A transport over several hosts: shared memory inside, gloo across, see the module's docstring.

    Args:
        hosts: the members of each, of one size, in the order of ranks.
        make: the collectives for the members of a host.
    """

    def __init__(
        self, members: Members, device: torch.device, watch: Watch,
        hosts: Sequence[Sequence[int]], make: Callable[[Members, torch.device, Watch], Collectives],
    ) -> None:  # fmt: skip
        super().__init__(members, device, watch)
        self._size = len(hosts[0])
        self.host, place = divmod(self.rank, self._size)
        own = hosts[self.host]
        self.inside_host = make(members.only(own), device, watch)
        self._gloo = PointToPoint(members, device, watch, _without(range(self.world_size), own))
        self._gloo.warn_others = self.inside_host.tell_failure
        for one in (self.inside_host, self._gloo):
            one.count_in(self.sent, self._measure_of_both)
        self.twins = [host[place] for host in hosts if host is not own]
        """The ranks at this rank's place on the other hosts."""
        self.others = _without(range(len(hosts)), [self.host])
        """The numbers of the other hosts."""

    def _measure_of_both(self, kind: str) -> AbstractContextManager[None]:
        return self.measure(kind)

    def block(self, rows: Tensor, host: int) -> Tensor:
        """Return the rows of a host's ranks."""
        return rows[host * self._size : (host + 1) * self._size]

    # ------------------------------------------------------------------ operations

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        prepare()
        crossing = self._gloo.gather_from(self.twins, rows, bucket, label)
        return _Gather(self, crossing, rows, bucket, label)

    def gather_inside(self, rows: Tensor, host: int, bucket: int, label: str) -> Work:
        """Gather the rows of one host's ranks, of which each rank of this host has one."""
        number = bucket * (len(self.others) + 1) + host
        return self.inside_host.all_gather(self.block(rows, host), number, f"{label} inside the host")

    def workspace_numel(self, rows: Tensor) -> int:
        return rows.numel()

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        received = workspace.view(rows.shape)
        near = self.block(received, self.host)
        sharing = self.inside_host.scatter_rows(
            self.block(rows, self.host).view(torch.uint8), near.view(torch.uint8), bucket, label
        )
        crossing = self._gloo.scatter_rows(rows, received, bucket, label)
        received[self.rank].copy_(rows[self.rank])
        return SummedRows([sharing, crossing], list(received), divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._gloo.broadcast(tensor, source)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = self._gloo.exchange_with_peers(data, label)
        first = self.host * self._size
        for place, message in enumerate(self.inside_host.exchange(data, label)):
            found[first + place] = message
        return [found[rank] for rank in range(self.world_size)]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        (source_host, source_place), (target_host, target_place) = (
            divmod(source, self._size),
            divmod(target, self._size),
        )
        if source_host == target_host == self.host:
            return self.inside_host.transfer(tensor, source_place, target_place, label)
        if source_host == target_host:  # another host's business
            return self._gloo.transfer(tensor, source, source, label)
        return self._gloo.transfer(tensor, source, target, label)

    # ------------------------------------------------------------------ the rest

    def wait_released(self, memory: Tensor | None = None) -> None:
        self.inside_host.wait_released(memory)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.inside_host.buffer(numel, dtype)

    def sends_in_place(self, tensor: Tensor) -> bool:
        return self.inside_host.sends_in_place(tensor)

    def is_lent_by_system(self, tensor: Tensor) -> bool:
        return self.inside_host.is_lent_by_system(tensor)

    def discard(self, memory: Tensor) -> None:
        self.inside_host.discard(memory)

    @property
    def buffers_nbytes(self) -> int:
        return self.inside_host.buffers_nbytes

    def tell_failure(self) -> None:
        self.inside_host.tell_failure()

    def control(self) -> Collectives:
        return control_of(self)

    def close(self) -> None:
        self.inside_host.close()
        self._gloo.close()
        super().close()


class _Gather(Work):
    def __init__(self, collectives: OverHosts, crossing: Work, rows: Tensor, bucket: int, label: str) -> None:
        self._collectives = collectives
        self._crossing = crossing
        self._rows = rows
        self._bucket = bucket
        self._label = label
        self._sharing = [collectives.gather_inside(rows, collectives.host, bucket, label)]

    def wait(self) -> None:
        self._crossing.wait()
        if len(self._sharing) == 1:
            for host in self._collectives.others:
                self._sharing.append(self._collectives.gather_inside(self._rows, host, self._bucket, self._label))
        for work in self._sharing:
            work.wait()

    def push(self) -> None:  # a row that came across is shared with the host when it is waited for
        self.wait()


def _without(ranks: Iterable[int], left_out: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank not in left_out]
