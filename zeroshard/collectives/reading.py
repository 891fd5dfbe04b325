"""Owns operations in flight of ranks that share memory: each waits for the others' offers, reads them, and reports it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zeroshard.collectives.base import Reduction, Work, nothing, sum_into
from zeroshard.errors import CollectiveError


class Offer(NamedTuple):
    """The message of one rank to another about an operation.

    Attributes:
        offset: where the data lies in its file.
        nbytes: how much of it, to find out ranks that diverge.
    """

    offset: int
    nbytes: int


class Shared(Protocol):
    """The part of the collectives that an operation uses, see SharedMemory."""

    rank: int
    world_size: int
    near: list[int]
    measure: Callable[[str], AbstractContextManager[None]]

    @property
    def divisor(self) -> float: ...

    def offered(self, peer: int, tag: int, nbytes: int, label: str) -> Offer: ...

    def view(self, peer: int, offer: Offer, start: int, numel: int, dtype: torch.dtype) -> Tensor: ...

    def release(self, peer: int, tag: int, label: str) -> None: ...

    def is_lent(self, tag: int) -> bool: ...

    def wait_read(self, tag: int) -> None: ...

    def was_read(self, gather: Any) -> None: ...


class SharedGather(Work):
    """An all-gather."""

    def __init__(
        self, collectives: Shared, rows: Tensor, tag: int, label: str,
        own: Tensor | None, prepare: Callable[[], None], *, waits_for_readers: bool,
    ) -> None:  # fmt: skip
        self._collectives = collectives
        self._rows = rows
        self._tag = tag
        self._label = label
        self._waits_for_readers = waits_for_readers
        self._own = own
        self._prepare = prepare
        self._early: dict[int, Tensor] = {}
        self._failed: CollectiveError | None = None
        self._left = list(collectives.near)

    def wait(self) -> None:
        if self._failed is not None:  # what did not arrive has not arrived since
            raise self._failed
        try:
            prepare = self._prepare
            self._prepare = nothing
            prepare()
            with self._collectives.measure("gather"):
                self._read(wanted=True)
                if self._waits_for_readers:
                    self._collectives.wait_read(self._tag)
        except CollectiveError as error:
            self._failed = error
            raise

    def abandon(self) -> None:
        with suppress(CollectiveError):
            self._read(wanted=False)

    def rests_in(self, memory: Tensor) -> bool:
        """Whether this rank's own row lies in this memory."""
        return self._own is not None and overlap(self._own, memory)

    def read_early(self) -> None:
        """Read the others' rows now, to be put where they belong in `wait`: that place may have no memory yet."""
        for peer in [peer for peer in self._left if peer not in self._early]:
            self._early[peer] = self._view(peer).clone()
            self._collectives.release(peer, self._tag, self._label)

    def _view(self, peer: int) -> Tensor:
        """Wait for a rank's row, where that rank has it. It needs only the rows' shape: they may have no memory."""
        numel = self._rows.shape[1]
        dtype = self._rows.dtype
        offer = self._collectives.offered(peer, self._tag, numel * dtype.itemsize, self._label)
        return self._collectives.view(peer, offer, 0, numel, dtype)

    def _read(self, *, wanted: bool) -> None:
        collectives = self._collectives
        while self._left:
            peer = self._left[0]
            early = self._early.pop(peer, None)
            found = self._view(peer) if early is None else early
            if wanted:
                self._rows[peer].copy_(found)
            if early is None:
                collectives.release(peer, self._tag, self._label)
            del self._left[0]
        collectives.was_read(self)


class SharedMean(Reduction):
    """A reduce-scatter."""

    def __init__(self, collectives: Shared, rows: Tensor, tag: int, label: str) -> None:
        self._collectives = collectives
        self._rows = rows
        self._tag = tag
        self._label = label

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        collectives = self._collectives
        rows = self._rows
        rank = self._collectives.rank
        numel = rows.shape[1]
        contributions = {rank: rows[rank]}
        with collectives.measure("reduce"):
            for peer in collectives.near:
                offer = collectives.offered(peer, self._tag, rows.nbytes, self._label)
                contributions[peer] = collectives.view(peer, offer, rank * numel, numel, rows.dtype)
        ordered = [contributions[one] for one in range(collectives.world_size)]
        sum_into(ordered, collectives.divisor, out, accumulate)
        for peer in collectives.near:
            collectives.release(peer, self._tag, self._label)

    @property
    def is_released(self) -> bool:
        return not self._collectives.is_lent(self._tag)

    def wait_released(self) -> None:
        self._collectives.wait_read(self._tag)


class SharedRows(Work):
    """Rows from each rank to each."""

    def __init__(self, collectives: Shared, received: Tensor, tag: int, label: str) -> None:
        self._collectives = collectives
        self._received = received
        self._tag = tag
        self._label = label
        self._left = list(collectives.near)

    def wait(self) -> None:
        collectives = self._collectives
        received = self._received
        with collectives.measure("reduce"):
            while self._left:
                peer = self._left[0]
                numel = received.shape[1]
                offer = collectives.offered(peer, self._tag, received.nbytes, self._label)
                received[peer].copy_(collectives.view(peer, offer, collectives.rank * numel, numel, received.dtype))
                collectives.release(peer, self._tag, self._label)
                del self._left[0]

    @property
    def is_released(self) -> bool:
        return not self._collectives.is_lent(self._tag)

    def wait_released(self) -> None:
        self._collectives.wait_read(self._tag)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
