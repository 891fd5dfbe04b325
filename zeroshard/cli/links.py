"""Owns what the links between ranks reach: names and addresses of hosts, latency and bandwidth. Called by cli.doctor.

What is measured are transfers of CPU memory as a training over gloo sends them, between two ranks of a host and between the first
ranks of two hosts, with nobody else on the wire.
"""

from __future__ import annotations

import ipaddress
import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.collectives.base import Collectives
from zeroshard.collectives.choose import create_collectives
from zeroshard.launch import join_ranks, read_launch
from zeroshard.storage.transfers import CPU

_ROUNDS = 5


@dataclass(frozen=True)
class Link:
    """Between two ranks, each way in turn: seconds of one way, bytes per second."""

    ranks: tuple[int, int]
    is_across: bool
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Host:
    """One machine: its name, the address that the name resolves to here (None: it does not), and its ranks."""

    name: str
    address: str | None
    ranks: tuple[int, ...]

    @property
    def problem(self) -> str | None:
        """Why others may not reach it by its name."""
        return problem_of(self.name, self.address)


def problem_of(name: str, address: str | None) -> str | None:
    """Why other hosts may not reach a host by its name, and what to do."""
    remedy = "name the device (GLOO_SOCKET_IFNAME=eth0), and torchrun's own address (--local-addr)"
    if address is None:
        return f"{name} does not know an address of its own name: {remedy}"
    if ipaddress.ip_address(address).is_loopback:
        return f"{name} takes its own name for {address}, the loopback, at which no other host reaches it: {remedy}"
    return None


def own_name() -> tuple[str, str | None]:
    """This host's name, and what it resolves to here."""
    name = socket.gethostname()
    try:
        return name, socket.gethostbyname(name)
    except OSError:
        return name, None


def measure_links(nbytes: int) -> tuple[int, list[Host], list[Link]]:
    """This process's rank, the hosts and the links. Every rank of a launcher's must call it.

    Raises:
        UsageError: the ranks cannot be joined.
        CollectiveError: not every rank came.
    """
    join_ranks(CPU, backend="gloo")
    collectives = create_collectives(None, CPU, what="doctor --net")
    hosts = _hosts(collectives)
    pairs = [(host.ranks[0], host.ranks[1], False) for host in hosts if len(host.ranks) > 1]
    pairs += [(one.ranks[0], other.ranks[0], True) for n, one in enumerate(hosts) for other in hosts[n + 1 :]]
    links = []
    for one, other, is_across in pairs:
        there_and_back = [_seconds(collectives, one, other, size) for size in (1, nbytes)]
        # Of the two, the first rank's clock counts.
        told: list[Any] = collectives.exchange_json(there_and_back, "the time of a link")
        latency, whole = (seconds / 2 for seconds in told[one])
        links.append(Link((one, other), is_across, latency, nbytes / max(whole - latency, 1e-9)))
    collectives.close()
    return collectives.rank, hosts, links


def _hosts(collectives: Collectives) -> list[Host]:
    from zeroshard.collectives.meeting import host_id

    everyone = collectives.exchange_json([host_id(), *own_name()], "the names of hosts")
    ranks: dict[str, list[int]] = {}
    for rank, (number, _, _) in enumerate(everyone):
        ranks.setdefault(number, []).append(rank)
    return [Host(everyone[own[0]][1], everyone[own[0]][2], tuple(own)) for own in ranks.values()]


def _seconds(collectives: Collectives, one: int, other: int, nbytes: int) -> float:
    """There and back: the median of a few rounds."""
    memory, taken = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        collectives.transfer(memory, one, other, "doctor --net").wait()
        collectives.transfer(memory, other, one, "doctor --net").wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def has_launcher() -> bool:
    """Whether a launcher started several ranks."""
    return read_launch() is not None


def seconds_across(
    parameters: float, itemsize: int, hosts: int, ranks_per_host: int, bandwidth: float
) -> dict[str, float]:
    """What one host's link takes in a step, by policy, if nothing hid it: the formulas of docs/several_hosts.md.

    Args:
        itemsize: bytes of a parameter and of its gradient on the wire.
        bandwidth: bytes per second of the slowest link across.
    """
    once = parameters * (hosts - 1) / hosts / bandwidth
    return {
        "stages 0 to 2": 2 * itemsize * ranks_per_host * once,
        "stage 3": 3 * itemsize * ranks_per_host * once,
        'any stage, within="host"': (itemsize + 4) * once,
    }
