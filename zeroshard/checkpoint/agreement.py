"""Owns the ranks' agreement that a part of a save, load or export succeeded: an error of one rank is raised on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.checkpoint.manifest import cannot_be_written
from zeroshard.collectives.base import Collectives
from zeroshard.errors import CheckpointError

_MOST = 8
"""The maximum number of ranks whose errors one message lists."""


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
        problem = str(error)
        if isinstance(error, OSError) and error.strerror is not None:
            problem = cannot_be_written(error.filename or "a file", error)
    everyone = control.exchange_json(problem, what)
    failing = [rank for rank, one in enumerate(everyone) if one is not None]
    if not failing:
        return
    if len(failing) > 1 and everyone == [problem] * len(everyone):
        raise CheckpointError(f"{failed}every rank: {problem}")
    lines = [f"rank {rank}: {everyone[rank]}" for rank in failing[:_MOST]]
    if len(failing) > _MOST:
        lines.append(f"and {len(failing) - _MOST} more ranks")
    raise CheckpointError(failed + "\n  ".join(lines))
