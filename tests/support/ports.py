"""Owns the choice of a port for tests whose processes connect to each other."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path


def free_port() -> int:
    """Return a loopback port on which no process listens now.

    It is below the ports of outgoing connections, which the system might take before the caller listens.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(first // 2, first))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
