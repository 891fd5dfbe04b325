"""Owns the ranks' agreement that a part of a save, load or export succeeded: an error of one rank is raised on all.

Agreements are collected and spread over a tree (core/transport/tree.py): a rank sends at most log2(W) short messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from zeroshard.checkpoint.manifest import cannot_be_written
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.tree import collect, spread
from zeroshard.errors import CheckpointError

_MOST = 8
"""The maximum number of ranks whose errors one message lists."""


class _Problems(NamedTuple):
    """The errors of some ranks."""

    first: list[tuple[int, str]]
    """The errors of the lowest ranks, at most `_MOST`."""
    number: int
    are_same: bool
    """Whether all failing ranks have the same error."""

    @classmethod
    def from_json(cls, data: bytes) -> _Problems:
        return cls(*json.loads(data))

    def joined(self, other: _Problems) -> _Problems:
        first = sorted([*self.first, *other.first])[:_MOST]
        are_same = self.are_same and other.are_same and self.first[0][1] == other.first[0][1]
        return _Problems(first, self.number + other.number, are_same)


def _joined(own: bytes, other: bytes) -> bytes:
    """Join two messages, each empty (no problem) or with the problems of some ranks."""
    if not own or not other:
        return own or other
    return json.dumps(_Problems.from_json(own).joined(_Problems.from_json(other))).encode()


@contextmanager
def together(control: Collectives, what: str, failed: str = "") -> Iterator[None]:
    """Run the block on every rank and wait for all of them. Every rank must enter it.

    `what` names the wait in logs, and `failed` begins the error's message.

    Raises:
        CheckpointError: the block failed on some rank. Every rank raises it, with the same message.
    """
    problem = None
    try:
        yield
    except Exception as error:  # the other ranks are waiting for this rank's answer
        problem = problem_of(error)
    own = b"" if problem is None else json.dumps(_Problems([(control.rank, problem)], 1, True)).encode()
    found = spread(control, collect(control, own, _joined, what))
    if not found:
        return
    problems = _Problems.from_json(found)
    if problems.are_same and problems.number == control.world_size > 1:
        raise CheckpointError(f"{failed}every rank: {problems.first[0][1]}")
    lines = [f"rank {rank}: {text}" for rank, text in problems.first]
    if problems.number > len(lines):
        lines.append(f"and {problems.number - len(lines)} more ranks")
    raise CheckpointError(failed + "\n  ".join(lines))


def problem_of(error: Exception) -> str:
    """Return the text of an error, as the other ranks raise it."""
    if isinstance(error, OSError) and error.strerror is not None:
        return cannot_be_written(error.filename or "a file", error)
    return str(error)


def of_first(control: Collectives, value: Any) -> Any:
    """Return rank 0's value on every rank, converted by JSON. Every rank must call it; the values of the others are ignored."""
    return json.loads(spread(control, json.dumps(value).encode() if control.rank == 0 else None))


def first_two(control: Collectives, value: Any, what: str) -> list[tuple[int, Any]]:
    """Return rank 0's value and, if values differ, that of the first rank with another. Every rank must call it."""

    def joined(own: bytes, other: bytes) -> bytes:
        found = json.loads(own)
        for rank, one in json.loads(other):
            if len(found) == 1 and one != found[0][1]:
                found.append([rank, one])
        return json.dumps(found).encode()

    own = json.dumps([[control.rank, value]]).encode()
    found = json.loads(spread(control, collect(control, own, joined, what)))
    return [(rank, one) for rank, one in found]
