"""Owns the connections between the ranks of one host: over them go descriptors once, and words for each operation. Called by
shared_memory.

A connection is a pair of unix sockets. The kernel orders what is written before a word is sent, and what is read after it came, on every
processor; and it tells at once of a process that is gone, whoever may look at whom.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import struct
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
