"""Owns the parts that multi-rank classes share: an engine (a process group of our own), works in flight, and guarded waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from zeroshard.collectives.base import Collectives, Work, nothing
from zeroshard.collectives.members import Members
from zeroshard.collectives.report import describe_failure
from zeroshard.collectives.waits import Pairing
from zeroshard.collectives.watch import Watch
from zeroshard.errors import CollectiveError, UsageError, ZeroshardError

T = TypeVar("T")

TRANSFER_TAG = (1 << 30) + 1
"""Transfers from one rank to another keep their order, so one tag does for all; no bucket has this number."""
_PROBE = timedelta(milliseconds=1)
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")


Posted = tuple[dist.Work, int | None]
"""One work of the engine's, and the member at its other end where there is one."""


class Grouped(Collectives):
    """The collectives of several ranks.

    Args:
        members: the group's ranks.
        device: the device that holds the tensors.
        watch: over the waits; may be shared.
    """

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__()
        self.members = members
        self.watch = watch
        self._device = device
        self.rank = members.rank
        self.world_size = len(members.ranks)
        self._end_watch: Callable[[], object] = lambda: None
        self.warn_others: Callable[[], None] = lambda: None
        """Warns the ranks that wait for this one over other connections that a wait failed."""

    def owns_watch(self) -> None:
        """End the watch when this object ends."""
        self._end_watch = weakref.finalize(self, self.watch.close)

    def close(self) -> None:
        self._end_watch()

    def operation(self, name: str) -> AbstractContextManager[None]:
        return self.watch.operation(name)

    @contextmanager
    def guarded(self, label: str, peer: int | None = None) -> Iterator[None]:
        """Watch a wait for other ranks, or for one `peer`; raise its failure as a `CollectiveError`."""
        self.watch.enter(label)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZeroshardError):
                raise
            raise self.failure(label, error, peer) from error
        finally:
            self.watch.leave()

    def follow(self, label: str) -> None:
        """Let the watch observe that the device's current stream waits for `label`. A CPU has none."""
        if self._device.type != "cpu":
            event = torch.accelerator.current_stream(self._device).record_event()
            self.watch.follow(label, event.query)

    def _made(self, make: Callable[[], T]) -> T:
        """Make an engine. Every member must call it."""
        with self.guarded("the others, to make connections"):
            Watch.forget(self.members.root, self.members.own)
            return make()

    def failure(
        self, label: str, error: BaseException, peer: int | None = None, works: Sequence[Posted] = (),
        gone: Collection[int] = (),
    ) -> CollectiveError:  # fmt: skip
        """Return the error to raise for a wait that failed.

        Args:
            peer: the member at the other end.
            works: the other parts of the same operation.
            gone: members whose processes have ended; no rank waits for them.
        """
        self.warn_others()
        ranks = self.members.ranks
        closed = _closed_peers(works) | set(gone)
        if peer is not None and _says_closed(error) and not gone:
            closed.add(peer)
        mine = self.watch.told_of(label)
        others = self.watch.ask(mine, [ranks[one] for one in gone])
        return CollectiveError(
            describe_failure(
                self.members.own,
                self.watch.ranks,
                mine,
                others,
                {ranks[one] for one in closed},
                self.members.timeout,
                error,
                awaited=None if peer is None else ranks[peer],
                reaches_store=self.watch.reaches_store,
            )
        )


def closed() -> UsageError:
    """Return the error of an operation after `close`."""
    return UsageError("these collectives were closed by remove(), so nothing can be sent. Shard the model again.")


def _says_closed(error: BaseException) -> bool:
    return any(words in str(error) for words in _CLOSED)


def _closed_peers(works: Sequence[Posted]) -> set[int]:
    """Return the members whose connections are closed.

    A wait that times out closes all connections of gloo's, so the others detect the failure at once.
    """
    closed = set()
    for work, peer in works:
        try:
            work.wait(_PROBE)
        except RuntimeError as error:
            if peer is not None and _says_closed(error):
                closed.add(peer)
    return closed


@dataclass(eq=False)
class Transfer(Work):
    """The works of one operation, None until `begin`. `_land` is called when they are done.

    Attributes:
        _pairing: where waits can be in vain without a notice.
    """

    _collectives: Grouped
    _works: Sequence[Posted] | None
    _kind: str
    _label: str
    _land: Callable[[], None] = nothing
    _pairing: Pairing | None = None
    _failed: CollectiveError | None = None

    def begin(self, works: Sequence[Posted]) -> None:
        """Record the works of the launched operations."""
        self._works = works

    def wait(self) -> None:
        if self._failed is not None:  # missing data has not arrived since
            raise self._failed
        collectives = self._collectives
        assert self._works is not None, f"{self._label} was waited for before it was launched"
        works = self._works
        self._works = ()
        pairing = self._pairing
        with collectives.measure(self._kind):
            collectives.watch.enter(self._label, pairing)
            done = 0
            peer = None
            try:
                for work, peer in works:
                    if pairing is not None and peer is not None:
                        pairing.awaited = collectives.members.ranks[peer]
                    work.wait()
                    done += 1
            except RuntimeError as error:
                cause: RuntimeError = error
                if pairing is not None and pairing.why_interrupted:
                    cause = RuntimeError(pairing.why_interrupted)
                self._failed = collectives.failure(self._label, cause, peer, works[done + 1 :])
                raise self._failed from error
            finally:
                collectives.watch.leave()
        land = self._land
        self._land = nothing
        land()
