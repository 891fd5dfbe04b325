"""Owns the rendezvous of one host's ranks: they connect, or agree on the reason why they cannot.

They find each other by addresses in the store, and a secret in the store keeps other programs out. If one rank may not share
memory, none does, and every rank gets the same reason.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.collectives.members import Members
from zeroshard.collectives.neighbours import LIMIT, Neighbours
from zeroshard.collectives.shared_file import SharedFile, Window

VARIABLE = "ZEROSHARD_SHARED_MEMORY"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
SEVERAL_HOSTS = "the ranks are on several hosts"
TURNED_OFF = f"{VARIABLE} turns it off"
_HELLO_NBYTES = 256
"""The most bytes that are read from a caller: more than a rank sends, and a limit for any other program."""
_LOOK_SECONDS = 0.2
"""The seconds between checks of the store for an awaited rank that has given up."""


class _Forsaken(OSError):
    """Raised when another rank gave up. That rank reports the reason."""


class Met(NamedTuple):
    """The connections between ranks that share a host: this rank's memory, the other ranks' memory by rank, and the messages."""

    file: SharedFile
    windows: dict[int, Window]
    neighbours: Neighbours


class NotShared(Exception):
    """Raised when ranks cannot share memory. Its reason is the same sentence on every rank."""

    def __init__(self, why: str, hosts: list[list[int]]) -> None:
        super().__init__(why)
        self.hosts = hosts
        """The members of each host, if the number of hosts is the only reason; otherwise empty."""


def meet(members: Members) -> Met:
    """Connect with the other members, all on this host, or raise NotShared. Every member must call it."""
    store = PrefixStore(members.counted_name("neighbours"), members.store)
    told = {"host": host_id(), "secret": secrets.token_hex(16), "address": "", "why_not": _refusal()}
    sockets: dict[int, socket.socket] = {}
    windows: dict[int, Window] = {}
    with ExitStack() as undo:
        if not told["why_not"]:
            try:
                file = SharedFile()
                undo.callback(file.close)
                listener = undo.enter_context(_listener())
                told["address"] = listener.getsockname().decode("latin-1")
            except (OSError, ValueError) as error:
                told["why_not"] = f"rank {members.own} may not share memory ({_reason(error)})"
        everyone = _agree(store, members, "here", told)
        for one in everyone:
            if one["why_not"]:
                raise NotShared(one["why_not"], [])
        hosts = _grouped([one["host"] for one in everyone])
        if len(hosts) > 1:
            raise NotShared(SEVERAL_HOSTS, hosts)
        problem: tuple[bool, str] | None = None
        with listener:
            try:
                _connect(listener, members, everyone, store, sockets)
                _hand_over(sockets, file.descriptor, windows)
            except (OSError, ValueError) as error:
                why = f"rank {members.own} could not connect to the other ranks here ({_reason(error)})"
                # A rank's own reason sorts before those of the ranks that it left waiting.
                problem = (isinstance(error, _Forsaken), why)
        undo.callback(_close_all, [*sockets.values(), *windows.values()])
        if problem:
            undo.close()  # ranks that wait for this one then fail too
        problems = [one for one in _agree(store, members, "met", problem) if one]
        if problems:
            raise NotShared(min(problems)[1], [])
        undo.pop_all()
    file.hand_over()
    return Met(file, windows, Neighbours(sockets, members.timeout.total_seconds()))


def hosts_of(members: Members) -> list[list[int]]:
    """Return each host's members, in the group's order. Every member must call it."""
    store = PrefixStore(members.counted_name("hosts"), members.store)
    return _grouped(_agree(store, members, "host", host_id()))


def _grouped(host_of: list[str]) -> list[list[int]]:
    return [[place for place, host in enumerate(host_of) if host == one] for one in dict.fromkeys(host_of)]


def refusal_here() -> str:
    """Return why this process cannot share memory with others of its host, or "". `zeroshard doctor` prints the reason."""
    why_not = _refusal()
    if why_not:
        return why_not
    try:
        file = SharedFile()
        Window(os.dup(file.descriptor)).close()
        file.close()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.close()
        there.close()
    except (OSError, ValueError) as error:
        return _reason(error)
    return ""


def _refusal() -> str:
    if os.environ.get(VARIABLE, "1").lower() in ("0", "false", "off", "no"):
        return TURNED_OFF
    needed = {"memfd_create": os, "AF_UNIX": socket, "SOCK_SEQPACKET": socket, "send_fds": socket}
    missing = [name for name, module in needed.items() if not hasattr(module, name)]
    return f"this system has no {missing[0]}" if missing else ""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _close_all(held: Iterable[socket.socket | Window]) -> None:
    for one in held:
        one.close()


def host_id() -> str:
    """Return an id of the boot and the network namespace (the scope of socket addresses); if unreadable, the host's name."""
    with suppress(OSError):
        return f"{_BOOT_ID.read_text(encoding='utf-8').strip()} {_NETWORK.stat().st_ino}"
    return socket.gethostname()


def _agree(store: PrefixStore, members: Members, what: str, value: Any) -> list[Any]:
    store.set(f"{what}/{members.rank}", json.dumps(value))
    keys = [f"{what}/{rank}" for rank in range(len(members.ranks))]
    store.wait(keys, members.timeout)
    return [json.loads(store.get(key)) for key in keys]


def _listener() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0zeroshard-{secrets.token_hex(8)}")  # abstract: no file
    listener.listen(socket.SOMAXCONN)  # calls of other programs must not keep ranks out
    listener.settimeout(_LOOK_SECONDS)
    return listener


def _connect(
    listener: socket.socket, members: Members, everyone: list[dict[str, str]], store: PrefixStore,
    sockets: dict[int, socket.socket],
) -> None:  # fmt: skip
    """Connect to the ranks before this one and accept those after it. Fill `sockets`, by rank."""
    deadline = time.monotonic() + members.timeout.total_seconds()
    for peer in range(members.rank):
        one = sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(members.timeout.total_seconds())
        one.connect(everyone[peer]["address"].encode("latin-1"))
        one.send(json.dumps({"rank": members.rank, "secret": everyone[peer]["secret"]}).encode())
    silent: set[socket.socket] = set()
    looked = time.monotonic()
    with selectors.DefaultSelector() as callers, ExitStack() as undo:
        undo.callback(_close_all, silent)  # other programs
        callers.register(listener, selectors.EVENT_READ)
        while len(sockets) < len(members.ranks) - 1:
            ready = [key.fileobj for key, _ in callers.select(_LOOK_SECONDS)]
            missing = set(range(len(members.ranks))) - {members.rank, *sockets}
            now = time.monotonic()
            given_up = False
            if now > looked + _LOOK_SECONDS:  # also if another program calls again and again
                looked = now
                given_up = any(store.check([f"met/{peer}"]) for peer in missing)
            if given_up or now > deadline:
                raise _Forsaken(f"rank {members.ranks[min(missing)]} did not connect")
            for one in cast(list[socket.socket], ready):
                if one is listener:
                    with suppress(TimeoutError):  # the caller is gone again
                        silent.add(caller := listener.accept()[0])
                        callers.register(caller, selectors.EVENT_READ)
                else:
                    callers.unregister(one)
                    silent.discard(one)
                    _admit(one, everyone[members.rank]["secret"], members, sockets)


def _admit(caller: socket.socket, secret: str, members: Members, sockets: dict[int, socket.socket]) -> None:
    """Add a caller that sends the secret to `sockets`; close the connection of any other program."""
    hello: Any = {}
    with suppress(OSError, ValueError):
        hello = json.loads(caller.recv(_HELLO_NBYTES) or b"{}")
    if not isinstance(hello, dict) or hello.get("secret") != secret:
        caller.close()
        return
    caller.settimeout(members.timeout.total_seconds())
    sockets[int(hello["rank"])] = caller


def _hand_over(sockets: dict[int, socket.socket], descriptor: int, windows: dict[int, Window]) -> None:
    """Send this rank's descriptor to every other rank and receive theirs. Fill `windows`, by rank."""
    for one in sockets.values():
        with suppress(BrokenPipeError, ConnectionResetError):  # it gave up, which the loop below detects
            socket.send_fds(one, [b"zeroshard"], [descriptor])
    for peer, one in sockets.items():
        try:
            data, numbers, _, _ = socket.recv_fds(one, LIMIT, 1)
        except ConnectionResetError:
            data = b""
            numbers = []
        if not data:
            raise _Forsaken("a rank of this host sent no descriptor")
        if not numbers:
            raise OSError("no file descriptor is free")
        windows[peer] = Window(numbers[0])
