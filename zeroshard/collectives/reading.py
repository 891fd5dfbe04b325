"""Owns operations of ranks that share memory, under way: each waits for what the others offer, reads it, and says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zeroshard.collectives.base import Pending, PendingReduction, PendingRows
from zeroshard.collectives.grouped import Transfer
from zeroshard.collectives.reduction import sum_into
from zeroshard.errors import CollectiveError


class Offer(NamedTuple):
    """What one rank tells another of an operation.

    Attributes:
        offset: where the data lies in its file.
        nbytes: how much of it, to find out ranks that diverge.
    """

    offset: int
    nbytes: int


class Shared(Protocol):
    """What an operation asks of the collectives, see SharedMemory."""

    rank: int
    world_size: int
    near: list[int]
    measure: Callable[[str], AbstractContextManager[None]]

    @property
    def _divisor(self) -> float: ...

    def offered(self, peer: int, tag: int, nbytes: int, label: str) -> Offer: ...

    def view(self, peer: int, offer: Offer, start: int, numel: int, dtype: torch.dtype) -> Tensor: ...

    def release(self, peer: int, tag: int, label: str) -> None: ...

    def is_lent(self, tag: int) -> bool: ...

    def wait_read(self, tag: int) -> None: ...

    def was_read(self, gather: Any) -> None: ...


class SharedGather(Pending):
    """An all-gather."""

    def __init__(
        self, collectives: Shared, rows: Tensor, tag: int, label: str, far: Pending | None,
        resting: Tensor | None, *, waits_for_readers: bool,
    ) -> None:  # fmt: skip
        self._collectives, self._rows, self._tag, self._label = collectives, rows, tag, label
        self._far, self._waits_for_readers = far, waits_for_readers
        self._resting = resting
        self._early: dict[int, Tensor] = {}
        self._failed: CollectiveError | None = None
        self._left = list(collectives.near)

    def wait(self) -> None:
        if self._failed is not None:  # what did not arrive has not arrived since
            raise self._failed
        try:
            with self._collectives.measure("gather"):
                self._read(wanted=True)
                if self._far is not None:
                    self._far.wait()
                if self._waits_for_readers:
                    self._collectives.wait_read(self._tag)
        except CollectiveError as error:
            self._failed = error
            raise

    def abandon(self) -> None:
        with suppress(CollectiveError):
            self._read(wanted=False)
        if self._far is not None:
            self._far.abandon()

    def rests_in(self, memory: Tensor) -> bool:
        """Whether this rank's own row lies in this memory."""
        return self._resting is not None and overlap(self._resting, memory)

    def read_early(self) -> None:
        """Read the others' rows now, to be put where they belong in `wait`: that place may have no memory yet."""
        for peer in [peer for peer in self._left if peer not in self._early]:
            row = self._rows[peer]
            offer = self._collectives.offered(peer, self._tag, row.nbytes, self._label)
            self._early[peer] = self._collectives.view(peer, offer, 0, row.numel(), row.dtype).clone()
            self._collectives.release(peer, self._tag, self._label)

    def _read(self, *, wanted: bool) -> None:
        collectives = self._collectives
        while self._left:
            peer = self._left[0]
            row = self._rows[peer]
            early = self._early.pop(peer, None)
            if early is None:
                offer = collectives.offered(peer, self._tag, row.nbytes, self._label)
                if wanted:
                    row.copy_(collectives.view(peer, offer, 0, row.numel(), row.dtype))
                collectives.release(peer, self._tag, self._label)
            elif wanted:
                row.copy_(early)
            del self._left[0]
        collectives.was_read(self)


class SharedMean(PendingReduction):
    """A reduce-scatter."""

    def __init__(
        self, collectives: Shared, rows: Tensor, tag: int, label: str,
        far: tuple[Transfer, dict[int, Tensor]] | None,
    ) -> None:  # fmt: skip
        self._collectives, self._rows, self._tag, self._label, self._far = collectives, rows, tag, label, far

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        collectives, rows, rank = self._collectives, self._rows, self._collectives.rank
        numel = rows.shape[1]
        contributions = {rank: rows[rank]}
        with collectives.measure("reduce"):
            for peer in collectives.near:
                offer = collectives.offered(peer, self._tag, rows.nbytes, self._label)
                contributions[peer] = collectives.view(peer, offer, rank * numel, numel, rows.dtype)
            if self._far is not None:
                transfer, received = self._far
                transfer.wait()
                contributions |= received
        ordered = [contributions[one] for one in range(collectives.world_size)]
        sum_into(ordered, collectives._divisor, out, accumulate)
        for peer in collectives.near:
            collectives.release(peer, self._tag, self._label)

    @property
    def has_readers(self) -> bool:
        return self._collectives.is_lent(self._tag)

    def wait_readers(self) -> None:
        self._collectives.wait_read(self._tag)


class SharedRows(PendingRows):
    """Rows from each rank to each."""

    def __init__(self, collectives: Shared, received: Tensor, tag: int, label: str, far: PendingRows | None) -> None:
        self._collectives, self._received, self._tag, self._label = collectives, received, tag, label
        self._far, self._left = far, list(collectives.near)

    def wait(self) -> None:
        collectives, received = self._collectives, self._received
        with collectives.measure("reduce"):
            while self._left:
                peer, numel = self._left[0], received.shape[1]
                offer = collectives.offered(peer, self._tag, received.nbytes, self._label)
                received[peer].copy_(collectives.view(peer, offer, collectives.rank * numel, numel, received.dtype))
                collectives.release(peer, self._tag, self._label)
                del self._left[0]
            if self._far is not None:
                self._far.wait()

    @property
    def has_readers(self) -> bool:
        return self._collectives.is_lent(self._tag)

    def wait_readers(self) -> None:
        self._collectives.wait_read(self._tag)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
