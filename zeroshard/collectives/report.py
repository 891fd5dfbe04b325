"""Owns the messages about ranks that wait: the line of a long wait, and the report of one that failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple


class Told(NamedTuple):
    """A rank's message about itself: the operation that it waits for, or whose wait failed.

    Attributes:
        operation: the whole operation that this belongs to, such as `save "step_10"`, or None: a forward, a backward, a step.
        place: the line of the user's program, as `train.py:12`, or "".
        pairing: the report of the wait's `Pairing`, or ().
    """

    text: str
    has_failed: bool
    operation: str | None = None
    place: str = ""
    pairing: Sequence[Any] = ()

    @property
    def line(self) -> str:
        """The text and the place."""
        return f"{self.text}, at {self.place}" if self.place else self.text


def spell(ranks: Iterable[int]) -> str:
    """Return text such as `rank 3` or `ranks 0, 2-5`."""
    ordered = sorted(ranks)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    runs = [ordered[low:high] for low, high in pairwise(cuts)]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


def sentence(own: int, seconds: float, text: str, ranks: Sequence[int], others: Mapping[int, Told]) -> str:
    """Return the line for a long wait. Ranks are global."""
    waiting = defaultdict[str, list[int]](list)
    for rank, told in others.items():
        waiting[told.text].append(rank)
    with_us = sorted([own, *waiting.pop(text, [])])
    parts = [f"{_subject(with_us, 'has', 'have')} waited {seconds:.0f} s for {text}"]
    parts += [f"{_subject(them, 'has', 'have')} waited for {what}" for what, them in waiting.items()]
    silent = [rank for rank in ranks if rank != own and rank not in others]
    if silent:
        parts.append(f"{_subject(silent, 'is', 'are')} not waiting for any rank (still in other code?)")
    return "; ".join(parts)


def _subject(ranks: Sequence[int], one: str, several: str) -> str:
    """Return the words for ranks, and the verb in the form for one rank or for several."""
    return f"{spell(ranks)} {several if len(ranks) > 1 else one}"


def describe_failure(
    own: int, ranks: Sequence[int], mine: Told, others: Mapping[int, Told], gone: Iterable[int],
    timeout: timedelta, error: BaseException, *, awaited: int | None = None, reaches_store: bool = True,
) -> str:  # fmt: skip
    """Return the message of a wait that failed: the operation that each rank waited for, if it is known. Ranks are
    global.

    Args:
        mine: the operation that this rank waited for.
        others: the reports of other ranks about their waits.
        gone: ranks whose connections are closed.
        awaited: the rank whose message did not come.
        reaches_store: whether this rank reaches the store, with the reports of others.
    """
    closed = {rank for rank in gone if rank not in others or not others[rank].has_failed}
    waiting = {own: mine} | {rank: told for rank, told in others.items() if rank not in closed}
    lines = [f"rank {rank} waited for {told.line}" for rank, told in sorted(waiting.items())]
    if closed:
        lines.append(f"{spell(closed)} closed the connection without a message: it died, or finished")
    ended = f"Read the output of {spell(closed)} first: an error or a signal may have ended it. " if closed else ""
    silent = [rank for rank in ranks if rank not in waiting and rank not in closed]
    if silent and not reaches_store:
        if awaited in silent:
            lines.append(f"rank {awaited} did not answer")
        lines.append(
            f"no answer from {spell(silent)} or from the store: that host, or this one, may have lost its network"
        )
        ended = f"Check that the host of {spell(silent)} runs, and that this one reaches it. {ended}"
    elif silent:
        subject = _subject(silent, "was", "were")
        lines.append(f"{subject} not waiting for any rank (dead, finished, cut off, or still in other code)")
    return (
        f"the ranks no longer do the same thing, or one of them is gone (timeout {timeout}):\n  "
        + "\n  ".join(lines)
        + f"\n{ended}{_advice(waiting)} The backend reported: {(str(error) or repr(error)).splitlines()[0]}"
    )


def _advice(waiting: Mapping[int, Told]) -> str:
    """Return the likely remedy, by the operations that the ranks waited for."""
    named = {told.operation for told in waiting.values()} - {None}
    if named:
        return (
            f"Every rank must call {' and '.join(sorted(filter(None, named)))} at the same point of the program: "
            "take it out of `if rank == 0:`, or leave it out on every rank."
        )
    advice = (
        "Every rank must make the same calls: move the code that runs the model out of `if rank == 0:`, and give every rank the "
        "same number of batches."
    )
    texts = {told.text for told in waiting.values()}
    if len(texts) > 1 and all(
        text.startswith("all-gather") for text in texts
    ):  # forwards that wait for different units
        advice += (
            " A module that runs a part of itself, by its input, is declared a leaf: Units(leaf_classes=...), or "
            "zero_optimization.leaf_module."
        )
    return advice
