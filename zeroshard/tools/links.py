"""Owns the measurement of the links between ranks, for `zeroshard doctor --net`."""

from __future__ import annotations

import ipaddress
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.storage.transfers import CPU
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.members import host_id
from zeroshard.launch import join_ranks

_ROUNDS = 5


@dataclass(frozen=True)
class Link:
    """A link between two ranks: its latency in one direction, in seconds, and its bandwidth in bytes per second."""

    ranks: tuple[int, int]
    is_across: bool
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Host:
    """A machine: its name, the address to which the name resolves there (None if it does not), and its ranks."""

    name: str
    address: str | None
    ranks: tuple[int, ...]


def problem_of(name: str, address: str | None) -> str | None:
    """Return the reason why other hosts may not reach a host by its name, and the remedy; None if there is no reason."""
    remedy = "set the network interface (GLOO_SOCKET_IFNAME=eth0), and torchrun's own address (--local-addr)"
    if address is None:
        return f"{name} cannot resolve its own name: {remedy}"
    if ipaddress.ip_address(address).is_loopback:
        return f"{name} resolves its own name to {address}, the loopback, where no other host can reach it: {remedy}"
    return None


def own_name() -> tuple[str, str | None]:
    """Return this host's name, and the address to which this host resolves the name (None if it cannot)."""
    name = socket.gethostname()
    try:
        return name, socket.gethostbyname(name)
    except OSError:
        return name, None


def measure_links(nbytes: int) -> tuple[int, list[Host], list[Link]]:
    """Measure the links between ranks, from CPU memory over gloo. Every rank of the launcher must call it.

    Returns:
        This process's rank, the hosts, and the links: one inside each host that has several ranks, and one between the
        first ranks of each pair of hosts.

    Raises:
        UsageError: the ranks cannot be joined.
        CollectiveError: some ranks did not call it.
    """
    join_ranks(CPU, backend="gloo")
    collectives = create_collectives(None, CPU, what="doctor --net")
    everyone: list[Any] = collectives.exchange_json([host_id(), *own_name()], "the names of hosts")
    ranks: dict[str, list[int]] = {}
    for rank, (number, _, _) in enumerate(everyone):
        ranks.setdefault(number, []).append(rank)
    hosts = [Host(everyone[own[0]][1], everyone[own[0]][2], tuple(own)) for own in ranks.values()]
    pairs = [(host.ranks[0], host.ranks[1], False) for host in hosts if len(host.ranks) > 1]
    pairs += [(one.ranks[0], other.ranks[0], True) for n, one in enumerate(hosts) for other in hosts[n + 1 :]]

    def there_and_back(memory: Tensor, one: int, other: int) -> None:
        collectives.transfer(memory, one, other, "doctor --net").wait()
        collectives.transfer(memory, other, one, "doctor --net").wait()

    links = []
    for one, other, is_across in pairs:
        mine = []
        for size in (1, nbytes):
            memory = torch.zeros(size, dtype=torch.uint8)
            mine.append(_seconds(lambda memory=memory, one=one, other=other: there_and_back(memory, one, other)))  # type: ignore[misc]
        # Use the times that the link's first rank measured.
        latency, whole = (seconds / 2 for seconds in collectives.exchange_json(mine, "the time of a link")[one])
        links.append(Link((one, other), is_across, latency, nbytes / max(whole - latency, 1e-9)))
    collectives.close()
    return collectives.rank, hosts, links


def _seconds(work: Callable[[], Any]) -> float:
    """Return the median seconds of a few rounds, after a warm-up."""
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
