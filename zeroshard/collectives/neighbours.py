"""Owns the connections between the ranks of one host: messages under tags, and reports of ended processes.

A connection is a pair of unix sockets. On every processor, memory written before a message is sent can be read after the message
has arrived. The kernel also reports an ended process at once.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

_NUMBER = struct.Struct("<Q")
"""The format of tags and counts. A message begins with its tag."""
LIMIT = 1 << 16
"""The maximum size of a message in bytes."""
READ = 1 << 63
"""The bit that turns the tag of an offer into the tag of the report that the offered memory was read."""
_GOODBYE, _FAILED, _STUCK = (READ | 1 << 62 | kind for kind in range(3))
"""The tags of a rank's messages about itself: it has finished; a wait failed; it is waiting for the receiver.

A waiting rank adds the number of messages that it has received from the receiver, the number of a wait, and the label of its
operation. It also passes on the numbers in reports that it has received: a rank whose own number comes back is deadlocked.
"""
_STUCK_SECONDS = 1.0
_LONGEST_POLL = 3600.0
"""The most seconds of one wait for messages: `poll` takes milliseconds in 32 bits."""


class Lost(RuntimeError):
    """Raised when ranks of this host no longer send messages; `peers` are those whose processes have ended."""

    def __init__(self, text: str, peers: frozenset[int]) -> None:
        super().__init__(text)
        self.peers = peers


@dataclass
class _Stuck:
    """A report of a peer that waits for this rank."""

    heard: int
    """The number of our messages that the peer had received by then."""
    label: str
    waits: set[int] = field(default_factory=set)
    """The numbers of the waits that lead to this one, the peer's own among them."""


class Neighbours:
    """The other ranks of a group that are on this host: their sockets by rank, and the timeout of a wait, in seconds."""

    def __init__(self, sockets: dict[int, socket.socket], timeout: float) -> None:
        self.was_read: Callable[[int, int], None] | None = None
        """A function that is called with the tag of an offer and the peer that has read it."""
        self._sockets = sockets
        self._timeout = timeout
        self._inbox: dict[int, dict[int, deque[bytes]]] = {peer: defaultdict(deque) for peer in sockets}
        self._sent = dict.fromkeys(sockets, 0)
        self._heard = dict.fromkeys(sockets, 0)
        self._stuck: dict[int, _Stuck] = {}
        """The latest report of each peer that is waiting for this rank, by peer."""
        self._finished: set[int] = set()
        self._dead: set[int] = set()
        self._failed: set[int] = set()
        self._poll = select.poll()
        self._peer_of: dict[int, int] = {}
        self._processes: list[int] = []
        for peer, one in sockets.items():
            one.setblocking(False)
            self._watch(one.fileno(), peer)
            # A socket that a forked child also holds stays open when the process ends.
            with suppress(OSError):
                pid = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                self._processes.append(os.pidfd_open(pid))
                self._watch(self._processes[-1], peer)
        self.close = weakref.finalize(self, _close, os.getpid(), sockets, self._processes)

    def _watch(self, descriptor: int, peer: int) -> None:
        self._poll.register(descriptor, select.POLLIN)
        self._peer_of[descriptor] = peer

    def send(self, peer: int, tag: int, data: bytes = b"") -> None:
        """Send bytes under a tag: at most LIMIT, including the tag.

        Raises:
            Lost: the peer no longer takes part, or a process of this host has ended.
            RuntimeError: the timeout has passed.
        """
        self._put(peer, tag, data)
        self._sent[peer] += 1

    def send_if_there(self, peer: int, tag: int, data: bytes) -> bool:
        """Send; return False if the peer has finished and does not need anything more. Its earlier messages can still be read."""
        try:
            self.send(peer, tag, data)
        except Lost:
            if peer not in self._finished:
                raise
            return False
        return True

    def _put(self, peer: int, tag: int, data: bytes) -> None:
        message = _NUMBER.pack(tag) + data
        deadline = 0.0
        while True:
            try:
                self._sockets[peer].send(message)
                return
            except BlockingIOError:
                deadline = deadline or time.monotonic() + self._timeout
                self._take_in(0.001)  # the peer may be waiting for room here, too
                self._refuse_absent(peer)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out: rank {peer} receives nothing") from None
            except OSError as error:
                self._drain(peer)
                raise self._lost(peer, error.strerror or str(error)) from error

    def receive(self, peer: int, tag: int, label: str) -> bytes:
        """Block until bytes under this tag have arrived, and return them.

        Args:
            label: the operation that this rank waits for; the peer's error names it.

        Raises:
            Lost: the peer no longer takes part, or a process of this host has ended.
            RuntimeError: the timeout has passed, or ranks are waiting for each other: these two, or several in a circle.
        """
        self.block(peer, lambda: bool(self._inbox[peer].get(tag)), label)
        waiting = self._inbox[peer][tag]
        found = waiting.popleft()
        if not waiting:
            del self._inbox[peer][tag]
        return found

    def block(self, peer: int, is_over: Callable[[], bool], label: str) -> None:
        """Block until `is_over`, which checks the received messages, returns True. Raise as `receive` does."""
        if is_over():
            return
        self._drain(peer)
        start = time.monotonic()
        own = int.from_bytes(os.urandom(_NUMBER.size))
        told = set[int]()
        while not is_over():
            self._refuse_absent(peer)
            waits = self._blocked_by_this(peer, own)
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise RuntimeError(f"timed out after {self._timeout:g} s")
            if waited > _STUCK_SECONDS:
                waits.add(own)
            for wait in waits - told:
                numbers = _NUMBER.pack(self._heard[peer]) + _NUMBER.pack(wait)
                self._put(peer, _STUCK, numbers + label.encode()[: LIMIT // 2])
            told |= waits
            self._take_in(min(self._timeout - waited, self._timeout if own in told else _STUCK_SECONDS) + 0.001)

    def _blocked_by_this(self, awaited: int, own: int) -> set[int]:
        """Return the numbers of waits that last until this rank sends.

        Raise if `awaited` is waiting for this rank, or if `own` is among these numbers. A peer that has not received all messages
        yet may go on.
        """
        waits = set[int]()
        for peer, stuck in self._stuck.items():
            if stuck.heard == self._sent[peer]:
                if peer == awaited or own in stuck.waits:
                    raise RuntimeError(f"rank {peer} is itself waiting for this one, for {stuck.label}")
                waits |= stuck.waits
        return waits

    def _refuse_absent(self, peer: int) -> None:
        """Raise if a process has ended, or if this peer no longer takes part."""
        if self._dead:
            raise self._lost(min(self._dead), "its process is gone")
        if peer in self._finished | self._failed:
            raise self._lost(peer, "it has finished" if peer in self._finished else "one of its waits failed")

    def _lost(self, peer: int, why: str) -> Lost:
        return Lost(f"Connection closed by peer [{peer}] ({why})", frozenset(self._dead))

    def _take_in(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for messages and read them."""
        for descriptor, _ in self._poll.poll(min(timeout, _LONGEST_POLL) * 1000):
            peer = self._peer_of.get(descriptor)
            if peer is None:
                continue
            self._drain(peer)
            if descriptor in self._processes:
                self._ended(descriptor)

    def _ended(self, descriptor: int) -> None:
        """Record that a peer's socket or process has ended."""
        self._poll.unregister(descriptor)
        peer = self._peer_of.pop(descriptor)
        if peer not in self._finished:
            self._dead.add(peer)

    def _drain(self, peer: int) -> None:
        """Read all messages that a peer has sent."""
        one = self._sockets[peer]
        while one.fileno() in self._peer_of:
            try:
                message = one.recv(LIMIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # raised once, before earlier messages are read: the peer closed and left messages of ours unread
            except OSError:
                message = b""
            if not message:
                self._ended(one.fileno())
                return
            tag, data = _split(message)
            if tag == _GOODBYE:
                self._finished.add(peer)
            elif tag == _FAILED:
                self._failed.add(peer)
            elif tag == _STUCK:
                heard, data = _split(data)
                wait, label = _split(data)
                if peer not in self._stuck or self._stuck[peer].heard != heard:
                    self._stuck[peer] = _Stuck(heard, label.decode(errors="replace"))
                self._stuck[peer].waits.add(wait)
            else:
                self._heard[peer] += 1
                if tag & READ:
                    assert self.was_read is not None
                    self.was_read(tag & ~READ, peer)
                else:
                    self._inbox[peer][tag].append(data)

    def tell_failure(self) -> None:
        """Notify peers that a wait of this rank failed, so that they stop waiting for this rank before the timeout."""
        for peer, one in self._sockets.items():
            if peer not in self._dead:
                with suppress(OSError):
                    one.send(_NUMBER.pack(_FAILED))


def _split(message: bytes) -> tuple[int, bytes]:
    return _NUMBER.unpack_from(message)[0], message[_NUMBER.size :]


def _close(process: int, sockets: dict[int, socket.socket], processes: list[int]) -> None:
    for one in sockets.values():
        if os.getpid() == process:  # otherwise it is a forked child, which sends nothing
            with suppress(OSError):
                one.send(_NUMBER.pack(_GOODBYE))
        one.close()
    for number in processes:
        os.close(number)
