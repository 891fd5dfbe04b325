"""Owns the choice of a port for a test whose processes meet at one."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now.

    It is below the ports that the system gives to connections: one of those might be taken before the caller listens.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(first // 2, first))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
