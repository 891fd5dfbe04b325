"""Owns the connections between the ranks of one host: over them go descriptors once, and words for each operation. Called by
shared_memory.

A connection is a pair of unix sockets. The kernel orders what is written before a word is sent, and what is read after it came, on every
processor; and it tells at once of a process that is gone, whoever may look at whom.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore

from zeroshard.collectives.members import Members

_WORD = struct.Struct("<QQQ")
_LIMIT = 1 << 16
"""Bytes of one message at most."""
_SPINS = 200
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Word(NamedTuple):
    """What one rank tells another of an operation.

    Attributes:
        tag: which operation; the same on every rank.
        offset: where the data lies in its arena.
        nbytes: how much of it, to find out ranks that diverge.
    """

    tag: int
    offset: int
    nbytes: int


class Neighbours:
    """The other ranks of a group, all on this host."""

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout: float) -> None:
        self._rank, self._sockets, self._timeout = rank, sockets, timeout
        self._inbox: dict[int, dict[int, deque[bytes]]] = {peer: defaultdict(deque) for peer in sockets}
        self._selector = selectors.DefaultSelector()
        for peer, one in sockets.items():
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, peer)

    def tell(self, peer: int, word: Word) -> None:
        """Send a word."""
        self.send(peer, word.tag, _WORD.pack(*word))

    def send(self, peer: int, tag: int, data: bytes) -> None:
        """Send bytes under a tag: at most 64 KiB less some."""
        message = tag.to_bytes(8, "little") + data
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._sockets[peer].send(message)
                return
            except BlockingIOError:
                self._take_in(0.001)  # it may wait for room here, too
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out: rank {peer} takes no messages") from None
            except OSError as error:
                raise RuntimeError(f"Connection closed by peer [{peer}] ({error.strerror})") from error

    def receive(self, peer: int, tag: int) -> bytes:
        """Block until bytes under this tag have come.

        Raises:
            RuntimeError: the other process is gone, or the timeout is over.
        """
        waiting, spins = self._inbox[peer], 0
        deadline = time.monotonic() + self._timeout
        while not waiting[tag]:
            if spins < _SPINS:
                spins += 1
                self._take_in(0)
            elif not self._take_in(max(deadline - time.monotonic(), 0.0)):
                raise RuntimeError(f"timed out after {self._timeout:g} s")
        found = waiting[tag].popleft()
        if not waiting[tag]:
            del waiting[tag]
        return found

    def hear(self, peer: int, tag: int) -> Word:
        """Block until a word under this tag has come."""
        return Word(*_WORD.unpack(self.receive(peer, tag)))

    def _take_in(self, timeout: float) -> bool:
        """Read what has come; wait for something for so many seconds. Returns whether anything came."""
        events = self._selector.select(timeout)
        for key, _ in events:
            peer = key.data
            while True:
                try:
                    message = self._sockets[peer].recv(_LIMIT)
                except BlockingIOError:
                    break
                except OSError as error:
                    raise RuntimeError(f"Connection reset by peer [{peer}] ({error.strerror})") from error
                if not message:
                    raise RuntimeError(f"Connection closed by peer [{peer}]")
                self._inbox[peer][int.from_bytes(message[:8], "little")].append(message[8:])
        return bool(events)

    def close(self) -> None:
        """Give the sockets back."""
        self._selector.close()
        for one in self._sockets.values():
            one.close()


class Met(NamedTuple):
    """What a meeting came to.

    Attributes:
        neighbours: the connections; None where some ranks do not share a host, or may not meet.
        descriptors: by rank, what each handed over. Ours to close.
        why_not: why there are none, the same sentence on every rank.
    """

    neighbours: Neighbours | None
    descriptors: dict[int, int]
    why_not: str


def meet(members: Members, descriptor: int | None, why_not: str = "") -> Met:
    """Connect with all members, where all are on this host, and hand each a descriptor. Every member must call it.

    They find each other by addresses that the store tells; a word that only the store knows keeps strangers out.

    Args:
        descriptor: what the others get; None: this rank cannot, for the reason `why_not`.
    """
    store = members.counted_store("neighbours")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    secret = secrets.token_hex(16)
    try:
        listener.bind(f"\0zeroshard-{secrets.token_hex(8)}")
        listener.listen(len(members.ranks))
        listener.settimeout(members.timeout.total_seconds())
        here = {
            "host": _host(),
            "address": listener.getsockname().decode("latin-1"),
            "secret": secret,
            "why_not": why_not,
        }
    except OSError as error:
        here = {"host": "", "address": "", "secret": "", "why_not": f"unix sockets are not allowed ({error.strerror})"}
    told = _agree(store, members, "here", here)
    first = next((one["why_not"] for one in told if one["why_not"]), "")
    if not first and len({one["host"] for one in told}) > 1:
        first = "the ranks are on several hosts"
    sockets: dict[int, socket.socket] = {}
    descriptors: dict[int, int] = {}
    problem = ""
    if not first:
        try:
            sockets = _connect(listener, members.rank, told, members.timeout.total_seconds())
            assert descriptor is not None
            descriptors = _hand_over(sockets, descriptor)
        except OSError as error:
            problem = f"rank {members.own} could not connect to ranks of its own host ({error.strerror or error})"
        first = next((one for one in _agree(store, members, "met", problem) if one), "")
    listener.close()
    if first:
        for one in sockets.values():
            one.close()
        for number in descriptors.values():
            os.close(number)
        return Met(None, {}, first)
    return Met(Neighbours(members.rank, sockets, members.timeout.total_seconds()), descriptors, "")


def _agree(store: PrefixStore, members: Members, what: str, value: Any) -> list[Any]:
    store.set(f"{what}/{members.rank}", json.dumps(value))
    return [json.loads(store.get(f"{what}/{rank}")) for rank in range(len(members.ranks))]


def _host() -> str:
    """One boot of one kernel; and its network namespace, in which such addresses are known."""
    with suppress(OSError):
        return f"{_BOOT_ID.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    return socket.gethostname()


def _connect(
    listener: socket.socket, rank: int, told: list[dict[str, str]], timeout: float
) -> dict[int, socket.socket]:
    """Each rank calls those before it, and is called by those after it."""
    sockets = {}
    for peer in range(rank):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(timeout)
        one.connect(told[peer]["address"].encode("latin-1"))
        one.send(json.dumps({"rank": rank, "secret": told[peer]["secret"]}).encode())
        sockets[peer] = one
    while len(sockets) < len(told) - 1:
        one, _ = listener.accept()
        one.settimeout(timeout)
        try:
            hello = json.loads(one.recv(_LIMIT) or b"{}")
        except ValueError:
            hello = {}
        if hello.get("secret") != told[rank]["secret"]:
            one.close()  # a stranger
            continue
        sockets[int(hello["rank"])] = one
    return sockets


def _hand_over(sockets: dict[int, socket.socket], descriptor: int) -> dict[int, int]:
    """Every rank's descriptor to every other."""
    for one in sockets.values():
        socket.send_fds(one, [b"zeroshard"], [descriptor])
    found = {}
    for peer, one in sockets.items():
        _, (number,), _, _ = socket.recv_fds(one, _LIMIT, 1)
        found[peer] = number
    return found
