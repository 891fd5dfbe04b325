"""Ranks of several hosts, where those of each host share memory: sums in the order of ranks, and each gathered row crosses once.

Composes two others. Of H hosts with S ranks each, which follow one another in the group, rank h * S + s is at place s of host h:

    inside   over the S ranks of its host
    gloo     to all ranks of other hosts

A gathered row crosses to the rank at its owner's place on each other host, which shares it with its neighbours. The rows of a
reduction go to their owners directly: the sum has the order of all ranks, and so the bits that it has over gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Reduction, SummedRows, Work, nothing
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.members import Members
from zeroshard.collectives.point_to_point import PointToPoint, control_of
from zeroshard.collectives.watch import Watch


class Composed(Grouped):
    """A transport that is made of two: one inside hosts, whose memory it uses, and one between them."""

    def compose(self, near: Collectives, far: Grouped) -> None:
        """Send through `near` inside the host, and through `far` to other hosts."""
        self._near = near
        self._far = far
        far.warn_others = near.tell_failure
        self.count_in(self.sent, self.measure)

    def count_in(self, sent: Counter[str], measure: Callable[[str], AbstractContextManager[None]]) -> None:
        super().count_in(sent, measure)
        for one in (self._near, self._far):
            one.count_in(sent, self._measure_of_both)

    def _measure_of_both(self, kind: str) -> AbstractContextManager[None]:
        return self.measure(kind)

    def wait_released(self, memory: Tensor | None = None) -> None:
        self._near.wait_released(memory)
        self._far.wait_released(memory)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._near.buffer(numel, dtype)

    def sends_in_place(self, tensor: Tensor) -> bool:
        return self._near.sends_in_place(tensor)

    def is_lent_by_system(self, tensor: Tensor) -> bool:
        return self._near.is_lent_by_system(tensor)

    def discard(self, memory: Tensor) -> None:
        self._near.discard(memory)

    @property
    def buffers_nbytes(self) -> int:
        return self._near.buffers_nbytes + self._far.buffers_nbytes

    def tell_failure(self) -> None:
        self._near.tell_failure()

    def control(self) -> Collectives:
        return control_of(self)

    def close(self) -> None:
        self._near.close()
        self._far.close()
        super().close()


class ComposedGather(Work):
    """An all-gather whose rows cross hosts first, and are passed on inside the host when it is waited for.

    Args:
        pass_on: starts to pass on what has crossed.
        started: what is passed on already.
    """

    def __init__(self, crossing: Work, pass_on: Callable[[], Iterable[Work]], started: Iterable[Work] = ()) -> None:
        self._crossing = crossing
        self._pass_on = pass_on
        self._started = [*started]
        self._has_crossed = False

    def wait(self) -> None:
        if not self._has_crossed:
            self._crossing.wait()
            self._started += [*self._pass_on()]  # if this raises, so does the next wait
            self._has_crossed = True
        for work in self._started:
            work.wait()

    def push(self) -> None:
        # no test can miss this wait: it starts early what readers wait for themselves.
        self.wait()


class OverHosts(Composed):
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
        self._host, place = divmod(self.rank, self._size)
        own = hosts[self._host]
        near = make(members.only(own), device, watch)
        self._gloo = PointToPoint(members, device, watch, _without(range(self.world_size), own))
        self.compose(near, self._gloo)
        self._twins = [host[place] for host in hosts if host is not own]
        """The ranks at this rank's place on the other hosts."""
        self._others = _without(range(len(hosts)), [self._host])
        """The numbers of the other hosts."""

    def _block(self, rows: Tensor, host: int) -> Tensor:
        """Return the rows of a host's ranks."""
        return rows[host * self._size : (host + 1) * self._size]

    # ------------------------------------------------------------------ operations

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        prepare()
        crossing = self._gloo.gather_from(self._twins, rows, bucket, label)

        def gather_inside(host: int) -> Work:
            number = bucket * (len(self._others) + 1) + host
            return self._near.all_gather(self._block(rows, host), number, f"{label} inside the host")

        return ComposedGather(crossing, lambda: map(gather_inside, self._others), [gather_inside(self._host)])

    def workspace_numel(self, rows: Tensor) -> int:
        return rows.numel()

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        received = workspace.view(rows.shape)
        near = self._block(received, self._host)
        sharing = self._near.scatter_rows(
            self._block(rows, self._host).view(torch.uint8), near.view(torch.uint8), bucket, label
        )
        crossing = self._gloo.scatter_rows(rows, received, bucket, label)
        received[self.rank].copy_(rows[self.rank])
        return SummedRows([sharing, crossing], list(received), divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._gloo.broadcast(tensor, source)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = self._gloo.exchange_with_peers(data, label)
        first = self._host * self._size
        found.update(enumerate(self._near.exchange(data, label), first))
        return [found[rank] for rank in range(self.world_size)]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        source_host, source_place = divmod(source, self._size)
        target_host, target_place = divmod(target, self._size)
        if source_host == target_host == self._host:
            return self._near.transfer(tensor, source_place, target_place, label)
        if source_host == target_host:  # another host's business
            return self._gloo.transfer(tensor, source, source, label)
        return self._gloo.transfer(tensor, source, target, label)


def _without(ranks: Iterable[int], left_out: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank not in left_out]
