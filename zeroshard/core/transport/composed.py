"""Transports that combine two others: one inside hosts and one across them, or one for each dimension of a mesh."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.core.transport.base import Alone, Collectives, Done, Reduction, SummedRows, Work
from zeroshard.core.transport.grouped import Grouped, PointToPoint
from zeroshard.core.transport.members import Members, hosts_of
from zeroshard.core.transport.rounds import Merge, Swap
from zeroshard.core.transport.watch import Watch
from zeroshard.errors import UsageError

Within = int | Literal["host"]
Make = Callable[[Members, torch.device, Watch], Grouped]


class OneHost(Exception):
    """Raised when there is only one host, so that nothing crosses hosts."""


class Composed(Grouped):
    """A transport that consists of two: one inside hosts, and one between them."""

    def compose(self, near: Collectives, far: Grouped) -> None:
        """Send through `near` inside the host, and through `far` to other hosts."""
        self._near = near
        self._far = far
        self.on_failure = near.on_failure = far.on_failure = [*near.on_failure, *far.on_failure]
        self.count_in(self.sent, self.measure)

    def count_in(self, sent: Counter[str], measure: Callable[[str], AbstractContextManager[None]]) -> None:
        super().count_in(sent, measure)
        for one in (self._near, self._far):
            one.count_in(sent, self._measure_of_both)

    def _measure_of_both(self, kind: str) -> AbstractContextManager[None]:
        return self.measure(kind)  # a different clock may be set later

    @property
    def buffers_nbytes(self) -> int:
        return self._near.buffers_nbytes + self._far.buffers_nbytes

    def close(self) -> None:
        self._near.close()
        self._far.close()
        super().close()


class ComposedGather(Work):
    """An all-gather that first sends rows between hosts. Its `wait` then passes the rows on inside each host."""

    def __init__(self, crossing: Work, pass_on: Callable[[], Iterable[Work]], started: Iterable[Work] = ()) -> None:
        self._crossing = crossing
        self._pass_on: Callable[[], Iterable[Work]] | None = pass_on
        """A function that starts to pass on the rows that have crossed; None once it has returned."""
        self._started = [*started]
        """The works that are passing on rows."""

    def wait(self) -> None:
        if self._pass_on is not None:
            self._crossing.wait()
            self._started += [*self._pass_on()]  # if this raises, so does the next wait
            self._pass_on = None
        for work in self._started:
            work.wait()

    def push(self) -> None:
        # no test needs this wait: without it, the works that readers wait for would only start later.
        self.wait()


class OverHosts(Composed):
    """A transport over several hosts: shared memory inside them, gloo between them.

    With H hosts of S ranks each, which follow one another in the group, rank h * S + s is at place s of host h. A gathered row
    crosses to the rank at its owner's place on each other host, which shares it with the other ranks of that host. The
    rows of a reduction go to their owners directly, so a sum is in the order of all ranks and is bit-identical to the
    sum over gloo.

    Args:
        hosts: the members of each host, in the order of ranks. All hosts have the same number.
        make: creates the collectives for the members of a host.
    """

    _far: PointToPoint

    def __init__(
        self, members: Members, device: torch.device, watch: Watch, hosts: Sequence[Sequence[int]], make: Make
    ) -> None:
        super().__init__(members, device, watch)
        self._size = len(hosts[0])
        self._host, place = divmod(self.rank, self._size)
        own = hosts[self._host]
        near = make(members.only(own), device, watch)
        far = PointToPoint(members, device, watch, [rank for rank in range(self.world_size) if rank not in own])
        self.compose(near, far)
        self._others = [number for number in range(len(hosts)) if number != self._host]
        """The numbers of the other hosts."""
        self._twins = [hosts[number][place] for number in self._others]
        """The ranks at this rank's place on the other hosts."""

    def _block(self, rows: Tensor, host: int) -> Tensor:
        return rows[host * self._size : (host + 1) * self._size]

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        crossing = self._far.gather_from(self._twins, rows, bucket, label)

        def gather_inside(host: int) -> Work:
            number = bucket * (len(self._others) + 1) + host
            return self._near.all_gather(self._block(rows, host), number, f"{label} inside the host")

        return ComposedGather(crossing, lambda: map(gather_inside, self._others), [gather_inside(self._host)])

    def workspace_numel(self, rows: Tensor) -> int:
        return self._near.workspace_numel(self._block(rows, self._host)) + self._far.workspace_numel(rows)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> SummedRows:
        here = self._block(rows, self._host)
        cut_at = self._near.workspace_numel(here)
        inside = self._near.reduce_scatter(here, workspace[:cut_at], bucket, label, divisor)
        crossing = self._far.reduce_scatter(rows, workspace[cut_at:], bucket, label, divisor)
        assert isinstance(inside, SummedRows), "CPU ranks of a host send over shared memory or gloo, which deliver rows"
        return _RowsOverHosts(inside, crossing, self._host * self._size, divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._far.broadcast(tensor, source)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = self._far.exchange_with_peers(data, label)
        found.update(enumerate(self._near.exchange(data, label), self._host * self._size))
        return [found[rank] for rank in range(self.world_size)]

    def swaps(self, label: str) -> Swap:
        inside = self._near.swaps(label)
        crossing = self._far.swaps(label)
        assert inside is not None, "CPU ranks of a host send over shared memory or gloo, which swap messages"
        first = self._host * self._size
        here = range(first, first + self._size)

        def swap(data: bytes, receiver: int | None, sender: int | None) -> bytes:
            if (sender if receiver is None else receiver) not in here:
                return crossing(data, receiver, sender)
            return inside(data, *(None if one is None else one - first for one in (receiver, sender)))

        return swap

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        source_host, source_place = divmod(source, self._size)
        target_host, target_place = divmod(target, self._size)
        if source_host == target_host == self._host:
            return self._near.transfer(tensor, source_place, target_place, label)
        if source_host == target_host:  # inside another host: this rank only takes part in the call
            return self._far.transfer(tensor, source, source, label)
        return self._far.transfer(tensor, source, target, label)


@dataclass(eq=False)
class _RowsOverHosts(SummedRows):
    """The rows of all ranks: those of this host and, around them, those of the hosts before and after it."""

    _inside: SummedRows
    _crossing: SummedRows
    _first: int
    """The first rank of this host. In the rows that cross, this rank's own row is in the place of its host's."""
    divisor: float

    def rows(self) -> list[Tensor]:
        found = self._crossing.rows()
        found[self._first : self._first + 1] = self._inside.rows()
        return found

    def release(self) -> None:
        self._inside.release()


class TwoLevel(Composed):
    """A transport with two levels: a reduction sums inside each host before it crosses, and a gather crosses first.

    With H hosts of S ranks each, a rank is at place s of host h:

        inside   over the S ranks of its host
        across   over the H ranks at the same place s, one on each host

    The rank owns row s * H + h, so the rows of the H ranks at one place lie together. Rows [H * S, n] are also blocks [S, H * n],
    and `inside` reduces and gathers blocks. Each host is summed first: (g0 + g1) + (g2 + g3) for two hosts of two ranks. Sums of
    several ranks cross in fp32 at least. The order of a sum depends on the hosts but not on the policy.

    Args:
        within: the number of ranks that count as a host, in the group's order; or "host" for the ranks of each machine.
        make: creates the collectives for some of the members. Each of these must call it.

    Raises:
        OneHost: all members are on one host.
        UsageError: the hosts have different numbers of ranks, or `within` does not divide the number of ranks.
    """

    def __init__(self, members: Members, device: torch.device, watch: Watch, within: Within, make: Make) -> None:
        super().__init__(members, device, watch)
        self._hosts = self._made(lambda: hosts_of(members)) if within == "host" else cut(self.world_size, within)
        """The members of each host."""
        if len({len(host) for host in self._hosts}) > 1:
            uneven = ", ".join(str([members.ranks[place] for place in host]) for host in self._hosts)
            raise UsageError(
                f'within="host" needs the same number of ranks on each host, and they are {uneven}: start as many on '
                "each, or leave it out."
            )
        if len(self._hosts) == 1:
            raise OneHost
        self._host, self._place = self._where(self.rank)
        own = self._hosts[self._host]
        near = make(members.only(own), device, watch) if len(own) > 1 else Alone()
        far = make(members.only([host[self._place] for host in self._hosts]), device, watch)
        self.compose(near, far)
        far.count_in(CrossingCount(self.sent), self._measure_of_both)
        self._latest: Callable[[], _Mean | None] = lambda: None
        """Returns the last reduction; None once no other code refers to it."""

    @property
    def inside(self) -> Collectives:
        return self._near

    @property
    def across(self) -> Collectives:
        return self._far

    @property
    def shard(self) -> int:
        return self._place * len(self._hosts) + self._host

    def owner(self, shard: int) -> int:
        place, host = divmod(shard, len(self._hosts))
        return self._hosts[host][place]

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._far.sum_dtype(self._near.sum_dtype(dtype))

    def numel_in_flight(self, units: Sequence[int]) -> int:
        return max(self._near.numel_in_flight(units), self._far.numel_in_flight(units))

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        blocks = rows.view(self._near.world_size, -1)
        block = blocks[self._place].view(len(self._hosts), -1)
        crossing = self._far.all_gather(block, bucket, f"{label} across hosts")
        return ComposedGather(crossing, lambda: [self._near.all_gather(blocks, bucket, f"{label} inside the host")])

    def workspace_numel(self, rows: Tensor) -> int:
        if self._near.world_size == 1:
            return self._far.workspace_numel(rows)
        wide = torch.promote_types(rows.dtype, torch.float32)
        block = torch.empty(len(self._hosts), rows.shape[1], dtype=wide, device="meta")
        crossing = (block.numel() + self._far.workspace_numel(block)) * wide.itemsize // rows.dtype.itemsize
        return self._near.workspace_numel(rows.view(self._near.world_size, -1)) + crossing

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        if self._near.world_size == 1:  # there is no sum inside, so the rows cross in their own dtype
            return self._far.reduce_scatter(rows, workspace, bucket, label, divisor)
        blocks = rows.view(self._near.world_size, -1)
        # The workspace has three parts: for the reduction inside, the sum inside (wide), and the reduction across (wide).
        cut_at = self._near.workspace_numel(blocks)
        # The division comes last: the sum inside is not divided.
        pending = self._near.reduce_scatter(blocks, workspace[:cut_at], bucket, f"{label} inside the host", 1.0)
        wide = workspace[cut_at:].view(torch.promote_types(rows.dtype, torch.float32))
        block = wide[: blocks.shape[1]].view(len(self._hosts), -1)
        mean = _Mean(self._far, pending, block, wide[blocks.shape[1] :], bucket, label, divisor)
        before = self._latest()
        self._latest = weakref.ref(mean)
        if before is not None:
            before.cross()
        return mean

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = [b""] * self.world_size
        of_places = self._near.exchange(b"".join(self._far.exchange(data, label)), label)
        for place, joined in enumerate(of_places):
            for host, members in enumerate(self._hosts):
                found[members[place]] = joined[host * len(data) : (host + 1) * len(data)]
        return found

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        # The shards of the ranks at one place are adjacent.
        return self._near.combine(self._far.combine(own, merge, label), merge, label)

    @property
    def adds_on_device(self) -> bool:
        return self._near.adds_on_device and self._far.adds_on_device

    def added(self, value: Tensor, label: str) -> Tensor:
        return self._near.added(self._far.added(value, label), label)

    def _where(self, rank: int) -> tuple[int, int]:
        """Return a rank's (host, place)."""
        return next((number, host.index(rank)) for number, host in enumerate(self._hosts) if rank in host)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        host, place = self._where(source)
        if self._place == place:
            self._far.broadcast(tensor, host)
        self._near.broadcast(tensor, place)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        # Two hops: across at the source's place, then inside the target's host. A rank in between needs the size first.
        lengths = self.exchange(tensor.nbytes.to_bytes(8, "little"), f"the length of {label}")
        nbytes = int.from_bytes(lengths[source], "little")
        host, place = self._where(source)
        to_host, to_place = self._where(target)
        is_end = self.rank in (source, target)
        passing = tensor if is_end else tensor.new_empty(nbytes, dtype=torch.uint8)
        if host != to_host and self._place == place:
            # no test needs this wait: no transfer between two levels is of an accelerator's memory.
            self._far.transfer(passing, host, to_host, label).wait()
        if place == to_place or self._host != to_host:
            return Done()
        return self._near.transfer(passing, place, to_place, label)


class CrossingCount(Counter[str]):
    """A counter of bytes between hosts, which adds them to another counter under separate names."""

    def __init__(self, whole: Counter[str]) -> None:
        super().__init__()
        self._whole = whole

    def __getitem__(self, kind: str) -> int:
        return self._whole[f"{kind} across"]

    def __setitem__(self, kind: str, nbytes: int) -> None:
        self._whole[f"{kind} across"] = nbytes


@dataclass(eq=False)
class _Mean(Reduction):
    """A reduction whose part between hosts starts once the next reduction has started, or when this one is waited for."""

    _across: Grouped
    _inside: Reduction
    _block: Tensor
    """The sum inside the host, [hosts, n]."""
    _workspace: Tensor
    _bucket: int
    _label: str
    _divisor: float
    _crossing: Reduction | None = None

    def cross(self) -> Reduction:
        """Wait for the sum inside the host and start to reduce it across hosts. Later calls return the same reduction."""
        if self._crossing is None:
            self._inside.finish(self._block.view(-1), accumulate=False)
            self._crossing = self._across.reduce_scatter(
                self._block, self._workspace, self._bucket, f"{self._label} across hosts", self._divisor
            )
        return self._crossing

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self.cross().finish(out, accumulate=accumulate)


def cut(world_size: int, within: Within) -> list[list[int]]:
    """Return the members of each host, if `within` adjacent ranks count as one host. With "host", all are on one host.

    Raises:
        UsageError: `within` does not divide the number of ranks.
    """
    if within == "host":
        return [list(range(world_size))]
    if world_size % within:
        raise UsageError(
            f"within={within} (zero_hpz_partition_size, mics_shard_size in a config) does not divide the {world_size} "
            "ranks of the group: give the number of ranks of a host, or a divisor of it."
        )
    return [list(range(start, start + within)) for start in range(0, world_size, within)]


# ---------------------------------------------------------------------- two dimensions of a mesh

_SMALL = "ranks of two dimensions exchange small messages only: send tensors over the data-parallel transport."


class Everyone(Collectives):
    """All ranks of a mesh of two dimensions, in the order of their global ranks.

    They send only small messages. Each goes over `data`, the data-parallel ranks, first. Then the messages of these ranks go over
    `others`, the ranks of the mesh's other dimension, as a single message.
    """

    def __init__(self, data: Collectives, others: Collectives) -> None:
        super().__init__()
        self._data = data
        self._others = others
        self.world_size = data.world_size * others.world_size
        place = others.rank * data.world_size + data.rank
        own = bytearray(8 * self.world_size)
        own[8 * place : 8 * place + 8] = dist.get_rank().to_bytes(8, "little")
        numbers = self.agree(bytes(own), "the ranks of a mesh").some
        ranks = [int.from_bytes(numbers[at : at + 8], "little") for at in range(0, len(numbers), 8)]
        self._places = sorted(range(self.world_size), key=ranks.__getitem__)
        """The place of each rank: others.rank * data.world_size + data.rank."""
        self.rank = self._places.index(place)

    def _by_place(self, data: bytes, label: str) -> list[bytes]:
        rows = self._others.exchange(b"".join(self._data.exchange(data, label)), label)
        return [row[start : start + len(data)] for row in rows for start in range(0, len(row), max(len(data), 1))]

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        if not data:
            return [data] * self.world_size
        messages = self._by_place(data, label)
        return [messages[place] for place in self._places]

    def data_rank(self, rank: int) -> int:
        return self._places[rank] % self._data.world_size

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        other, own = divmod(self._places[source], self._data.world_size)
        if self._others.rank == other:
            self._data.broadcast(tensor, own)
        self._others.broadcast(tensor, other)

    def combine(self, own: bytes, merge: Merge, label: str) -> bytes:
        return self._others.combine(self._data.combine(own, merge, label), merge, label)

    @property
    def adds_on_device(self) -> bool:
        return self._data.adds_on_device and self._others.adds_on_device

    def added(self, value: Tensor, label: str) -> Tensor:
        return self._others.added(self._data.added(value, label), label)

    def operation(self, name: str) -> AbstractContextManager[None]:
        return self._data.operation(name)

    def control(self) -> Collectives:
        return Everyone(self._data.control(), self._others.control())

    def close(self) -> None:
        self._data.close()
        self._others.close()

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        raise NotImplementedError(_SMALL)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        raise NotImplementedError(_SMALL)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        raise NotImplementedError(_SMALL)
