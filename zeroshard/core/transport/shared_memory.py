"""Owns the collectives of CPU ranks that share a host, in memory that all of them map.

The four parts: the file of a rank, with what it sends; messages between ranks, which say where data is and that it was read;
the rendezvous, in which ranks connect or agree on the reason why they cannot; and the transport.

What a rank sends, it copies into its own file once. Each reader gets two messages: the place of the copy, and later the sender
gets the report that it was read. So the sent memory may be written at once, and no rank waits for its readers. Sums are
computed in the order of ranks, so they are bit-identical to sums over gloo.

The file has no name (memfd), so nothing is left behind however a process ends, and a container's small /dev/shm does not
matter. It is sparse: a page exists from its first use on, and until no rank maps the file.

A connection is a pair of unix sockets. On every processor, memory written before a message is sent can be read after the message
has arrived. The kernel also reports an ended process at once.

Ranks find each other by addresses in the store, and a secret in the store keeps other programs out. If one rank may not share
memory, none does, and every rank gets the same reason.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import select
import selectors
import socket
import struct
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.core.transport.base import Collectives, Done, SummedRows, Work
from zeroshard.core.transport.grouped import CLOSED, Grouped, Lost
from zeroshard.core.transport.members import Members, grouped
from zeroshard.core.transport.rounds import Swap
from zeroshard.core.transport.watch import Watch
from zeroshard.errors import CollectiveError, UsageError

# ---------------------------------------------------------------- the file of a rank

_PAGE = mmap.PAGESIZE
_NO_RESERVE = 0x4000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Room(NamedTuple):
    """A range of a file, in bytes."""

    start: int
    size: int


class SharedFile:
    """The memory of this process that others may read: rooms, each with copies for some ranks. A forked process does not have it.

    Raises:
        OSError: the system does not allow it.
    """

    def __init__(self) -> None:
        self._size = os.sysconf("SC_PHYS_PAGES") * _PAGE  # this host's memory: unused addresses cost nothing
        self.descriptor = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        """The file descriptor that other ranks receive; -1 once it is closed."""
        try:
            os.ftruncate(self.descriptor, self._size)
            self._base = _mapped(self.descriptor, self._size, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self.descriptor)
            raise
        _unmap_with(self, self._base, self._size)
        self._end = 0
        self._used: dict[Room, int] = {}
        """The most bytes that each room has held."""
        self._free: list[Room] = []
        self._lent: dict[int, tuple[Room, set[int]]] = {}
        """By tag: the room that is lent, and the ranks that have not read it."""

    def lend(self, tag: int, readers: Iterable[int], nbytes: int) -> int:
        """Keep a room for these ranks until each of them `was_read`, and return where it starts."""
        fitting = [room for room in self._free if room.size >= nbytes]
        if fitting:
            room = min(fitting, key=lambda room: room.size)
            self._free.remove(room)
        else:
            room = Room(
                self._end, max(1 << max(nbytes - 1, 0).bit_length(), _PAGE)
            )  # few sizes, so that rooms fit again
            if room.start + room.size > self._size:
                raise MemoryError(f"ranks of one host share at most the host's memory ({self._size:,} bytes)")
            self._end += room.size
        self._used[room] = max(self._used.get(room, 0), nbytes)
        self._lent[tag] = room, set(readers)
        return room.start

    def was_read(self, tag: int, reader: int) -> None:
        """Record that a rank has read its copies in the room that is lent under a tag."""
        if tag in self._lent:
            room, readers = self._lent[tag]
            readers.discard(reader)
            if not readers:
                del self._lent[tag]
                self._free.append(room)

    def is_read(self, tag: int, reader: int) -> bool:
        """Return whether a rank has read its copies."""
        return tag not in self._lent or reader not in self._lent[tag][1]

    @property
    def nbytes(self) -> int:
        """The bytes of all rooms that have held data."""
        return sum(self._used.values())

    def view(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return elements of the file as a 1-D tensor, valid as long as this object."""
        return _view(self._base + start, numel, dtype)

    def close(self) -> None:
        """Close the descriptor, at the latest once every rank has received it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Window:
    """Another rank's file, as this process reads it. The window closes the file's descriptor.

    Raises:
        OSError: the system does not allow it.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            self._base = _mapped(descriptor, size, mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self.close = _unmap_with(self, self._base, size)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the other rank's elements as a 1-D tensor, to be read only, valid as long as the window."""
        return _view(self._base + offset, numel, dtype)


def _view(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    nbytes = numel * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype)


def _mapped(descriptor: int, size: int, protection: int) -> int:
    """Map the whole file and return its address. Forked children do not have the mapping.

    A child's writes would change this process's memory, and a child that outlives the process would keep it allocated.
    """
    map_file = _LIBC.mmap
    map_file.restype = ctypes.c_void_p
    map_file.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address: int | None = map_file(None, size, protection, mmap.MAP_SHARED | _NO_RESERVE, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTFORK)
    return address


def _unmap_with(owner: object, address: int, size: int) -> weakref.finalize[..., object]:
    """Unmap the file when its owner is deleted, or when the returned finalizer is called."""
    finalizer = weakref.finalize(owner, _unmap, os.getpid(), address, size)
    finalizer.atexit = False
    return finalizer


def _unmap(process: int, address: int, size: int) -> None:
    if os.getpid() == process:  # in a child, other data may be there
        _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


# ---------------------------------------------------------------- messages

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


# ---------------------------------------------------------------- the rendezvous

VARIABLE = "ZEROSHARD_SHARED_MEMORY"
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
    told = {"host": members.host, "secret": secrets.token_hex(16), "address": "", "why_not": _refusal()}
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
        everyone = members.agree(store, "here", told)
        for one in everyone:
            if one["why_not"]:
                raise NotShared(one["why_not"], [])
        hosts = grouped([one["host"] for one in everyone])
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
        problems = [one for one in members.agree(store, "met", problem) if one]
        if problems:
            raise NotShared(min(problems)[1], [])
        undo.pop_all()
    file.close()
    return Met(file, windows, Neighbours(sockets, members.timeout.total_seconds()))


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


# ---------------------------------------------------------------- the transport

_GATHER, _REDUCE, _EXCHANGE, _MOVE = range(4)
_SEQUENCE_BITS = 20
_OPERATION_SHIFT = 56
_OFFER = struct.Struct("<QQ")
_MESSAGE_NBYTES = 32 << 10
_ALIGNED_NBYTES = 64
_PIECE_NBYTES = 4 << 20
"""The bytes of a long transfer that pass through the file at once."""


class SharedMemory(Grouped):
    """A transport through shared memory (see the module's docstring).

    Raises:
        NotShared: these ranks cannot share memory.
    """

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__(members, device, watch)
        self._process = os.getpid()
        met = self._made(lambda: meet(members))
        self._met: Met | None = met
        met.neighbours.was_read = met.file.was_read
        self._sequence: Counter[int] = Counter()
        self.on_failure = [met.neighbours.tell_failure]

    @property
    def _here(self) -> Met:
        if self._met is None:
            raise UsageError(CLOSED)
        if os.getpid() != self._process:  # it would take the messages that are for its parent
            raise UsageError(
                "a forked process used a model that its parent trains: only ranks can use it. Pass it a copy of the "
                "values, or make the call in the parent."
            )
        return self._met

    def numel_in_flight(self, units: Sequence[int]) -> int:
        return super().numel_in_flight(units) // 2  # nothing progresses during computation

    def control(self) -> Collectives:
        # Existing connections report a dead rank at once; for new ones there is only the timeout.
        self.agree(b"\0", "connections for small messages")
        try:
            return SharedMemory(self.members, torch.device("cpu"), self.watch)
        except NotShared as error:
            raise CollectiveError(
                f"the ranks have no connections for small messages: {error}. It was permitted when the model was "
                "sharded: look for a limit of memory, descriptors or files that was set since."
            ) from error

    @property
    def buffers_nbytes(self) -> int:
        return 0 if self._met is None else self._met.file.nbytes

    def close(self) -> None:
        if self._met is not None:
            self._met.neighbours.close()
            for window in self._met.windows.values():
                window.close()
        self._met = None
        super().close()

    # ------------------------------------------------------------------ copies for others

    def tag(self, bucket: int, kind: int) -> int:
        """Return the next tag of an operation on a bucket, the same on every rank."""
        channel = bucket * 4 + kind
        self._sequence[channel] += 1
        number = channel << _SEQUENCE_BITS | self._sequence[channel] % (1 << _SEQUENCE_BITS)
        return self.watch.operation_code << _OPERATION_SHIFT | number

    def offer(self, tensors: Mapping[int, Tensor], tag: int, label: str) -> None:
        """Copy a contiguous tensor for each rank, and send it the place. One tensor for several ranks is copied once."""
        here = self._here
        starts: dict[int, int] = {}
        end = 0
        for tensor in tensors.values():
            if id(tensor) not in starts:
                starts[id(tensor)] = end
                end += -(-tensor.nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
        first = here.file.lend(tag, tensors, end)
        copied = set[int]()
        for peer, tensor in tensors.items():
            start = first + starts[id(tensor)]
            if start not in copied:
                copied.add(start)
                here.file.view(start, tensor.numel(), tensor.dtype).copy_(tensor.detach().reshape(-1))
            with self.guarded(label, peer):
                if not here.neighbours.send_if_there(peer, tag, _OFFER.pack(start, tensor.nbytes)):
                    here.file.was_read(tag, peer)

    def _wait_read(self, tag: int, readers: Sequence[int], label: str) -> None:
        """Block until these ranks have read their copies, so that no more of them lie in the file."""
        label = f"the readers of {label}"
        for peer in readers:  # while one is waited for, others end
            with self.guarded(label, peer):
                self._here.neighbours.block(peer, partial(self._here.file.is_read, tag, peer), label)

    def lent_by(self, peer: int, tag: int, numel: int, dtype: torch.dtype, label: str) -> Tensor:
        """Wait until a rank lends this many elements, and return them. They must be read, and not written, before `release`."""
        expected = numel * dtype.itemsize
        with self.guarded(label, peer):
            offset, nbytes = _OFFER.unpack(self._here.neighbours.receive(peer, tag, label))
            if nbytes != expected:
                raise RuntimeError(f"rank {peer} offers {nbytes} bytes, but this rank expects {expected}")
        return self._here.windows[peer].view(offset, numel, dtype)

    def release(self, peer: int, tag: int, label: str) -> None:
        """Report to a rank, which may have ended, that the memory that it lent was read."""
        with self.guarded(label, peer), suppress(Lost):
            self._here.neighbours.send(peer, tag | READ)

    # ------------------------------------------------------------------ operations

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        own = rows[self.rank]
        self.sent["all_gather"] += own.nbytes * len(self.peers)
        tag = self.tag(bucket, _GATHER)
        self.offer(dict.fromkeys(self.peers, own), tag, label)
        return SharedGather(self, tag, rows, label)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> SummedRows:
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * len(self.peers)
        tag = self.tag(bucket, _REDUCE)
        self.offer({peer: rows[peer] for peer in self.peers}, tag, label)
        return SharedRows(self, tag, rows[self.rank], label, divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        label = f"a broadcast of rank {self.members.ranks[source]}"
        self._move(tensor, source, [peer for peer in range(self.world_size) if peer != source], "broadcast", label)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        if source != target:
            self._move(tensor, source, [target], "transfer", label)
        return Done()

    def _move(self, tensor: Tensor, source: int, targets: Sequence[int], kind: str, label: str) -> None:
        """Copy one rank's tensor to others, piece by piece, and wait until it has arrived."""
        if tensor.numel() == 0 or (self.rank != source and self.rank not in targets):
            return
        # Ranks that take no part in a transfer do not count it, so a broadcast has a channel of its own.
        channel = source * self.world_size + (targets[0] if kind == "transfer" else source)
        if self.rank == source:
            self.sent[kind] += tensor.nbytes
        flat = tensor.detach().reshape(-1)
        last = None
        for piece in flat.split(max(_PIECE_NBYTES // flat.dtype.itemsize, 1)):
            tag = self.tag(channel, _MOVE)
            if self.rank == source:
                self.offer(dict.fromkeys(targets, piece), tag, label)
                if last is not None:  # so that at most two pieces are in the file
                    self._wait_read(last, targets, label)
                last = tag
            else:
                with self.measure(kind):
                    found = self.lent_by(source, tag, piece.numel(), piece.dtype, label)
                piece.copy_(found)
                self.release(source, tag, label)
        if last is not None:
            self._wait_read(last, targets, label)
        if self.rank != source and not tensor.is_contiguous():
            tensor.detach().copy_(flat.view(tensor.shape))

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        tag = self.tag(0, _EXCHANGE)
        for peer in self.peers:
            self._send(data, peer, tag, label)
        found = {peer: self._receive(len(data), peer, tag, label) for peer in self.peers}
        return [data if rank == self.rank else found[rank] for rank in range(self.world_size)]

    def swaps(self, label: str) -> Swap:
        tag = self.tag(0, _EXCHANGE)

        def swap(data: bytes, receiver: int | None, sender: int | None) -> bytes:
            if receiver is not None:
                self._send(data, receiver, tag, label)
            return b"" if sender is None else self._receive(len(data), sender, tag, label)

        return swap

    def _send(self, data: bytes, peer: int, tag: int, label: str) -> None:
        """Send a message of any length to a rank."""
        self.sent["exchange"] += len(data)
        with self.guarded(label, peer):
            for at in range(0, max(len(data), 1), _MESSAGE_NBYTES):
                self._here.neighbours.send(peer, tag, data[at : at + _MESSAGE_NBYTES])

    def _receive(self, nbytes: int, peer: int, tag: int, label: str) -> bytes:
        """Wait for a rank's message of this length."""
        with self.guarded(label, peer), self.measure("exchange"):
            pieces = range(0, max(nbytes, 1), _MESSAGE_NBYTES)
            found = b"".join([self._here.neighbours.receive(peer, tag, label) for _ in pieces])
            if len(found) != nbytes:
                raise RuntimeError(f"rank {peer} sent {len(found)} bytes, but this rank expects {nbytes}")
        return found


# ---------------------------------------------------------------- operations in flight


@dataclass(eq=False)
class SharedGather(Work):
    """An all-gather that copies each row from its owner's file."""

    _collectives: SharedMemory
    _tag: int
    _rows: Tensor
    _label: str
    _failed: CollectiveError | None = None

    def __post_init__(self) -> None:
        self._left = list(self._collectives.peers)

    def wait(self) -> None:
        if self._failed is not None:  # the missing data has not arrived since then
            raise self._failed
        try:
            with self._collectives.measure("gather"):
                self._read(wanted=True)
        except CollectiveError as error:
            self._failed = error
            raise

    push = wait

    def abandon(self) -> None:
        with suppress(CollectiveError):
            self._read(wanted=False)

    def _read(self, *, wanted: bool) -> None:
        rows = self._rows
        while self._left:
            peer = self._left[0]
            found = self._collectives.lent_by(peer, self._tag, rows.shape[1], rows.dtype, self._label)
            if wanted:
                rows[peer].copy_(found)
            self._collectives.release(peer, self._tag, self._label)
            del self._left[0]


@dataclass(eq=False)
class SharedRows(SummedRows):
    """Rows that are summed where they lie, in the files of the ranks that sent them."""

    _collectives: SharedMemory
    _tag: int
    _own: Tensor
    _label: str
    divisor: float

    def rows(self) -> list[Tensor]:
        collectives = self._collectives
        own = self._own
        found = {collectives.rank: own}
        with collectives.measure("reduce"):
            for peer in collectives.peers:
                found[peer] = collectives.lent_by(peer, self._tag, own.numel(), own.dtype, self._label)
        return [found[rank] for rank in range(collectives.world_size)]

    def release(self) -> None:
        for peer in self._collectives.peers:
            self._collectives.release(peer, self._tag, self._label)
