"""Owns the collectives of several hosts: rows of the ranks of a host are gathered or summed before anything crosses.

Composes two others. Of H hosts with S ranks each, a rank is at place s of host h:

    inside   over the S ranks of its host
    across   over the H ranks at the same place s, one on each host

It owns row s * H + h, so that the rows of the H ranks at one place lie together: rows [W, n] are also blocks [S, H * n], and a
block is what `inside` reduces and gathers. A sum is that over hosts of the sums inside, which cross in fp32: (g0 + g1) + (g2 + g3)
for two hosts of two. It is the topology's, and the same for every policy.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zeroshard.collectives.base import Alone, Collectives, Done, Reduction, Work, nothing
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.meeting import hosts_of
from zeroshard.collectives.members import Members
from zeroshard.collectives.over_hosts import Composed, ComposedGather
from zeroshard.collectives.quantized import QuantizedGradients
from zeroshard.collectives.watch import Watch
from zeroshard.errors import UsageError

Within = int | Literal["host"]
Make = Callable[[Members, torch.device, Watch], Grouped]


class OneHost(Exception):
    """The error when there is only one host, so that nothing crosses."""


class TwoLevel(Composed):
    """A transport on two levels, inside hosts and across them, see the module's docstring.

    Args:
        within: how many ranks are one host, in the group's order; or "host", for those that share a machine.
        make: the collectives for some of the members. Each of those must call it.
        bits: the number of bits of rounded gradients across hosts; None sends them as they are.

    Raises:
        OneHost: all of them are.
        UsageError: the hosts are not of one size.
    """

    def __init__(
        self, members: Members, device: torch.device, watch: Watch, within: Within, make: Make,
        bits: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(members, device, watch)
        self._hosts = self._made(lambda: hosts_of(members)) if within == "host" else cut(self.world_size, within)
        """The members of each host."""
        _refuse_uneven(self._hosts, members)
        if len(self._hosts) == 1:
            raise OneHost
        self._host = next(number for number, host in enumerate(self._hosts) if self.rank in host)
        own = self._hosts[self._host]
        self._place = own.index(self.rank)
        there = [host[self._place] for host in self._hosts]
        near = make(members.only(own), device, watch) if len(own) > 1 else Alone()
        far = make(members.only(there), device, watch)
        self.compose(near, far)
        far.count_in(CrossingCount(self.sent), self._measure_of_both)
        self._reducer = far if bits is None else QuantizedGradients(far, bits)
        self._latest: Callable[[], _Mean | None] = lambda: None
        """The last reduction, as long as somebody waits for it."""

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

    def by_shard(self, by_rank: Tensor) -> Tensor:
        return torch.stack([by_rank[self.owner(shard)] for shard in range(self.world_size)])

    def resting_memory(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._near.resting_memory(numel, dtype)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._far.sum_dtype(self._near.sum_dtype(dtype))

    def numel_in_flight(self, units: Sequence[int]) -> int:
        return max(self._near.numel_in_flight(units), self._far.numel_in_flight(units))

    # ------------------------------------------------------------------ rows

    def _blocks(self, rows: Tensor) -> Tensor:
        return rows.view(self._near.world_size, -1)

    def _row(self, block: Tensor) -> Tensor:
        return block.view(len(self._hosts), -1)

    def all_gather(
        self, rows: Tensor, bucket: int, label: str, own: Tensor | None = None, prepare: Callable[[], None] = nothing
    ) -> Work:
        prepare()
        blocks = self._blocks(rows)
        crossing = self._far.all_gather(self._row(blocks[self._place]), bucket, f"{label} across hosts")
        return ComposedGather(crossing, lambda: [self._near.all_gather(blocks, bucket, f"{label} inside the host")])

    def workspace_numel(self, rows: Tensor) -> int:
        if self._near.world_size == 1:
            return self._reducer.workspace_numel(rows)
        partial = self._row(torch.empty(self._blocks(rows).shape[1], dtype=_wide(rows), device="meta"))
        wide = partial.numel() + self._reducer.workspace_numel(partial)
        return self._near.workspace_numel(self._blocks(rows)) + wide * _wide(rows).itemsize // rows.dtype.itemsize

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        if self._near.world_size == 1:  # there is no sum that would need more digits than the rows have
            return self._reducer.reduce_scatter(rows, workspace, bucket, label, divisor)
        blocks = self._blocks(rows)
        cut_at = self._near.workspace_numel(blocks)
        # The division comes last: the sum inside is not divided.
        pending = self._near.reduce_scatter(blocks, workspace[:cut_at], bucket, f"{label} inside the host", 1.0)
        wide = workspace[cut_at:].view(_wide(rows))
        partial = self._row(wide[: blocks.shape[1]])
        mean = _Mean(self._reducer, pending, partial, wide[blocks.shape[1] :], bucket, label, divisor)
        before = self._latest()
        self._latest = weakref.ref(mean)
        if before is not None:
            before.cross()
        return mean

    # ------------------------------------------------------------------ messages, in the order of ranks

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        found = [b""] * self.world_size
        of_places = self._near.exchange(b"".join(self._far.exchange(data, label)), label)
        for place, joined in enumerate(of_places):
            for host, members in enumerate(self._hosts):
                found[members[place]] = joined[host * len(data) : (host + 1) * len(data)]
        return found

    def _where(self, rank: int) -> tuple[int, int]:
        """Return a rank's (host, place)."""
        return next((number, host.index(rank)) for number, host in enumerate(self._hosts) if rank in host)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        host, place = self._where(source)
        if self._place == place:
            self._far.broadcast(tensor, host)
        self._near.broadcast(tensor, place)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        # Two hops: across at the source's place, then inside the target's host. A rank in between receives the size
        # first.
        lengths = self.exchange(tensor.nbytes.to_bytes(8, "little"), f"the length of {label}")
        nbytes = int.from_bytes(lengths[source], "little")
        (host, place), (to_host, to_place) = self._where(source), self._where(target)
        is_end = self.rank in (source, target)
        passing = tensor if is_end else tensor.new_empty(nbytes, dtype=torch.uint8)
        if host != to_host and self._place == place:
            # no test can miss this wait: no transfer between two levels is of an accelerator's memory.
            self._far.transfer(passing, host, to_host, label).wait()
        if place == to_place or self._host != to_host:
            return Done()
        return self._near.transfer(passing, place, to_place, label)


class CrossingCount(Counter[str]):
    """A counter of bytes between hosts, which it adds to another counter under names of its own."""

    def __init__(self, whole: Counter[str]) -> None:
        super().__init__()
        self._whole = whole

    def __getitem__(self, kind: str) -> int:
        return self._whole[f"{kind} across"]

    def __setitem__(self, kind: str, nbytes: int) -> None:
        self._whole[f"{kind} across"] = nbytes


@dataclass(eq=False)
class _Mean(Reduction):
    """A reduction that crosses hosts when the next one has started, or when it is waited for."""

    _across: Grouped | QuantizedGradients
    _inside: Reduction
    _partial: Tensor
    _workspace: Tensor
    _bucket: int
    _label: str
    _divisor: float
    _crossing: Reduction | None = None

    def cross(self) -> None:
        """Wait for the sum inside the host, and start to reduce it across hosts."""
        if self._crossing is None:
            self._inside.finish(self._partial.view(-1), accumulate=False)
            self._crossing = self._across.reduce_scatter(
                self._partial, self._workspace, self._bucket, f"{self._label} across hosts", self._divisor
            )

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self.cross()
        assert self._crossing is not None
        self._crossing.finish(out, accumulate=accumulate)

    @property
    def is_released(self) -> bool:
        return self._inside.is_released and (self._crossing is None or self._crossing.is_released)

    def wait_released(self) -> None:
        self._inside.wait_released()
        if self._crossing is not None:
            self._crossing.wait_released()


def _wide(rows: Tensor) -> torch.dtype:
    """Return the dtype in which sums cross."""
    return torch.promote_types(rows.dtype, torch.float32)


def cut(world_size: int, within: Within) -> list[list[int]]:
    """Return the members of each host, if `within` neighbours are one host.

    Raises:
        UsageError: there are not as many.
    """
    if within == "host":
        return [list(range(world_size))]
    if world_size % within:
        raise UsageError(
            f"within={within} (zero_hpz_partition_size, mics_shard_size in a config) does not divide the {world_size} "
            "ranks of the group: give the number of ranks of a host, or a divisor of it."
        )
    return [list(range(start, start + within)) for start in range(0, world_size, within)]


def _refuse_uneven(hosts: Sequence[Sequence[int]], members: Members) -> None:
    if len({len(host) for host in hosts}) > 1:
        told = ", ".join(str([members.ranks[place] for place in host]) for host in hosts)
        raise UsageError(
            f'within="host" needs the same number of ranks on each host, and they are {told}: start as many on each, '
            "or leave it out."
        )
