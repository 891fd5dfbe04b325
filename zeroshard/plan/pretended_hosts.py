"""Owns how the ranks of a dry run lie on hosts: which links they talk over, and on how many levels. Called by dry_run.

On two levels it is `TwoLevel` itself that composes two `PretendedRanks`: who owns which row, what scratch a sum takes and what
crosses is as in a real run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from zeroshard.collectives.members import Members
from zeroshard.collectives.two_level import CrossingCount, OneHost, TwoLevel, Within
from zeroshard.collectives.watch import Watch
from zeroshard.errors import UsageError
from zeroshard.plan.clock import Clock, Line
from zeroshard.plan.ledger import Ledger
from zeroshard.plan.machine import Link, Machine
from zeroshard.plan.pretended_ranks import FEW, PretendedRanks

INSIDE, ACROSS = "link", "network"
"""Lines: between ranks of a host, and between hosts."""


@dataclass(frozen=True)
class Hosts:
    """Ranks on hosts, in their order.

    Attributes:
        shards_optimizer: whether ranks hold shards; see [Note: ranks and shards].
    """

    ranks: int
    hosts: int
    machine: Machine
    ledger: Ledger
    clock: Clock
    shards_optimizer: bool

    def collectives(self, predivide_factor: float, within: Within | None) -> PretendedRanks | PretendedTwoLevel:
        """As `create_collectives`.

        Raises:
            UsageError: the ranks cannot be cut so.
        """
        if within is None or self.ranks == 1:
            return self._flat(predivide_factor)
        size = self._ranks_of_a_host() if within == "host" else within
        try:
            return PretendedTwoLevel(self.ranks, size, predivide_factor, self._level(size))
        except OneHost:
            return self._flat(predivide_factor)

    def _ranks_of_a_host(self) -> int:
        size, rest = divmod(self.ranks, self.hosts)
        if rest:
            raise UsageError(
                f'within="host" wants as many ranks on each host: {self.ranks} ranks over {self.hosts} hosts are not.'
            )
        return size

    def _flat(self, predivide_factor: float) -> PretendedRanks:
        shards = self.ranks if self.shards_optimizer or self.ranks <= FEW else 1
        line = self._line(ACROSS, self._whole()) if self.hosts > 1 else self._line(INSIDE, self.machine.inside)
        return self._pretended(self.ranks, shards, predivide_factor, line)

    def _whole(self) -> Link:
        """What one rank's part of a collective over all ranks of several hosts goes through.

        A ring of NCCL's passes each byte across a host's border once, and there is a ring for each of the host's ranks, with a
        network link of its own. Over gloo each rank sends to every other by itself.
        """
        inside, between, here = self.machine.inside, self.machine.between, -(-self.ranks // self.hosts)
        if self.machine.transport == "native":
            return Link(bandwidth=min(inside.bandwidth, here * between.bandwidth), latency=between.latency)
        crosses = (self.ranks - here) / (self.ranks - 1)
        return Link(
            bandwidth=min(between.bandwidth / crosses, inside.bandwidth / (1 - crosses or inf)), latency=between.latency
        )

    def _level(self, size: int) -> Callable[[Members, torch.device, float, Watch], PretendedRanks]:
        """What makes the collectives of one level, where so many neighbours are one host of the policy's."""
        near = self._line(INSIDE, self.machine.inside)
        far = self._line(ACROSS, self.machine.between)
        # A policy's host may be a part of a machine, or several.
        is_together = self.hosts == 1 or (self.ranks % self.hosts == 0 and (self.ranks // self.hosts) % size == 0)

        def make(members: Members, _device: torch.device, predivide_factor: float, _watch: Watch) -> PretendedRanks:
            count = len(members.ranks)
            is_inside = members.ranks == tuple(range(size))
            line = near if self.hosts == 1 or (is_inside and is_together) else far
            return self._pretended(count, count, predivide_factor, line)

        return make

    def _line(self, name: str, link: Link) -> Line:
        is_apart = name == ACROSS or not self.machine.computes_on_cpu
        return Line(self.clock, name, link.bandwidth, link.latency, is_apart=is_apart)

    def _pretended(self, ranks: int, shards: int, predivide_factor: float, line: Line) -> PretendedRanks:
        return PretendedRanks(
            ranks, shards, predivide_factor, self.ledger, line, sums=self.machine.transport == "native"
        )


class PretendedTwoLevel(TwoLevel):
    """`TwoLevel` over ranks that exist on paper.

    Attributes:
        calls: how often each collective was called.
    """

    def __init__(self, ranks: int, within: int, predivide_factor: float, make: Callable[..., PretendedRanks]) -> None:
        store = HashStore()
        group: Any = store  # who belongs to it is all that is asked
        members = Members(tuple(range(ranks)), 0, ranks, timedelta(), "pretended", weakref.ref(group), store, store)
        watch = Watch(store, members.ranks, 0, inf)
        watch.close()  # nobody is waited for
        super().__init__(members, torch.device("cpu"), predivide_factor, watch, within, make)  # type: ignore[arg-type]
        self.calls: Counter[str] = Counter()
        for one, calls in ((self.inside, self.calls), (self.across, CrossingCount(self.calls))):
            if isinstance(one, PretendedRanks):
                one.calls = calls
