"""Owns the watchdog: it logs long waits, reports failed ones, and shares each rank's current wait through the store.

Each watchdog has its own thread. Except in `begin`, only this thread uses the store, over its own connection, so a
store that does not answer does not block waits for other ranks.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from zeroshard.core.transport.members import values_of
from zeroshard.core.transport.waits import Wait, Waits
from zeroshard.errors import UsageError
from zeroshard.errors.uncaught import is_users
from zeroshard.launch import NOTICE_SECONDS

REPEAT_SECONDS = 300.0
"""The seconds until a continuing wait is logged again."""
REPORT_SECONDS = 5.0
"""The seconds that a rank whose wait failed waits for the others' messages."""

GONE_SECONDS = 0.4
"""The seconds that such a rank waits after each message if another is known to be dead."""

_POSTED = "zeroshard/waits/posted"
"""The key of the ranks that have posted messages: others read only these, in one request."""
_LOOKS = 6
"""The number of checks of the waits before the first notice."""
_CLOSE_SECONDS = 2.0
_POLL_SECONDS = 0.05


def place_of(thread: int) -> str:
    """Return the innermost line of the user's program that a thread is running, as `train.py:12`; "" if there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def make_current(device: torch.device | None) -> None:
    """Make an accelerator this thread's current one.

    A new thread begins with the first accelerator of the host, and would allocate memory there when it uses an event.
    """
    if device is not None and device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


# ---------------------------------------------------------------------- the messages of ranks about themselves


class Told(NamedTuple):
    """A rank's message about the operation that it is waiting for, or that failed while it waited.

    Attributes:
        operation: the user's call that this belongs to, such as `save "step_10"`; None for a forward, a backward or a step.
        place: the line of the user's program, as `train.py:12`, or "".
        closed: the ranks whose closed connections ended the wait.
    """

    text: str
    has_failed: bool
    operation: str | None = None
    place: str = ""
    closed: Sequence[int] = ()


def spell(ranks: Iterable[int]) -> str:
    """Return text such as `rank 3` or `ranks 0, 2-5`."""
    ordered = sorted(ranks)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    runs = [ordered[low:high] for low, high in pairwise(cuts)]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {text}"


def _subject(ranks: Sequence[int], one: str, several: str) -> str:
    """Return the ranks in words, followed by `one` or `several`, the verb's forms for one rank and for several."""
    return f"{spell(ranks)} {several if len(ranks) > 1 else one}"


def describe_failure(
    own: int, ranks: Sequence[int], mine: Told, others: Mapping[int, Told], gone: Iterable[int],
    timeout: timedelta, error: BaseException, *, awaited: int | None = None, reaches_store: bool = True,
) -> str:  # fmt: skip
    """Return the message about a failed wait: the operation that each rank waited for, if it is known. Ranks are global.

    Args:
        gone: ranks whose connections are closed.
        awaited: the rank whose message did not come.
        reaches_store: whether this rank reaches the store, which has the messages of `others`.
    """
    closed = {rank for rank in gone if rank not in others or not others[rank].has_failed}
    waiting = {own: mine} | {rank: told for rank, told in others.items() if rank not in closed}
    lines = []
    for rank, told in sorted(waiting.items()):
        place = f", at {told.place}" if told.place else ""
        lines.append(f"rank {rank} waited for {told.text}{place}")
    remedy = ""
    if closed:
        lines.append(f"{spell(closed)} closed the connection without a message: it died, or finished")
        remedy = (
            f"Read the output of {spell(closed)} first: an error or a signal (such as the out-of-memory killer's: see dmesg) may "
            "have ended it. "
        )
    silent = [rank for rank in ranks if rank not in waiting and rank not in closed]
    if silent and not reaches_store:
        if awaited in silent:
            lines.append(f"rank {awaited} did not answer")
        lines.append(
            f"no answer from {spell(silent)} or from the store: their hosts, or this one, may have lost the network"
        )
        remedy = f"Check that the host of {spell(silent)} runs, and that this one reaches it. {remedy}"
    elif silent:
        subject = _subject(silent, "was", "were")
        lines.append(f"{subject} not waiting for any rank (dead, finished, cut off, or still in other code)")
    return (
        f"the ranks no longer do the same thing, or one of them is gone (timeout {timeout}):\n  "
        + "\n  ".join(lines)
        + f"\n{remedy}{_advice(waiting)} The backend reported: {(str(error) or repr(error)).splitlines()[0]}"
    )


def _advice(waiting: Mapping[int, Told]) -> str:
    """Return the likely remedy, by the operations that the ranks waited for."""
    named = {told.operation for told in waiting.values()} - {None}
    if named:
        return (
            f"Every rank must make the same calls: call {' and '.join(sorted(filter(None, named)))} on every rank or on none, and "
            "move code that runs the model out of `if rank == 0:`."
        )
    advice = (
        "Every rank must make the same calls: move the code that runs the model out of `if rank == 0:`, and give every rank the "
        "same number of batches."
    )
    texts = {told.text for told in waiting.values()}
    # Forwards that are waiting for different units.
    if len(texts) > 1 and all(text.startswith("all-gather") for text in texts):
        advice += (
            " Declare a module a leaf if its input decides what it runs: Units(leaf_classes=...), or "
            "zero_optimization.leaf_module. If the whole model decides, keep small alternatives in the root unit: "
            "Units(min_numel=...)."
        )
    return advice


@dataclass
class _Question:
    """The message about a failed wait, and the others' answers to it."""

    told: Told
    dead: Collection[int]
    found: dict[int, Told] = field(default_factory=dict)
    is_posted: bool = False
    is_heard: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


class Watch(Waits):
    """A watchdog for this rank's blocking operations (see the module's docstring).

    Args:
        store: a store that all members reach. Messages are keyed by global rank, so ranks see each other's waits in
            other groups, too.
        ranks: the global ranks of the members.
        own: this process's global rank.
        notice_seconds: the seconds until a wait is logged; infinity means never.
        device: the accelerator whose events are watched, if there is one.
    """

    def __init__(
        self, store: Store, ranks: Sequence[int], own: int, notice_seconds: float, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        self._own = own
        self._tick = min(notice_seconds, NOTICE_SECONDS) / _LOOKS
        # Each rank has its own delay, so of ranks that began to wait together only the first one logs.
        self._due_seconds = notice_seconds + self._tick * self.ranks.index(own) / len(self.ranks)
        self._question: _Question | None = None
        self._is_posted = False
        self._has_posted = False
        """Whether this rank is among those whose messages others read."""
        self._has_failed = False
        self._is_closed = False
        self._quiet_until = 0.0
        self._notice_key = f"zeroshard/notice/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(store, device), name="zeroshard watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise UsageError(
                f"the thread that watches over waits could not start: {error}. Raise the limit on processes and threads "
                "(`ulimit -u`, a container's pids limit), or on memory (`ulimit -v`)."
            ) from error

    # ------------------------------------------------------------------ a wait that failed

    def ask(self, label: str, closed: Sequence[int], dead: Collection[int] = ()) -> tuple[Told, dict[int, Told], bool]:
        """Report this thread's failed wait. Return its message, the others' by global rank, and whether the store answered.

        The call takes a few seconds if the other ranks or the store do not answer. Ranks that sent nothing are not in the result.

        Args:
            closed: the ranks whose connections are closed. If there are any, the other ranks detect this at once too, and the wait
                ends soon after the last message.
            dead: those of them whose processes have ended. A rank that only closed its connections may be about to report.
        """
        wait = Wait(self._of_thread.operation, label, time.monotonic())
        told = Told(wait.text, True, wait.operation, place_of(threading.get_ident()), closed)
        question = _Question(told, dead)
        if self._thread.is_alive():
            self._question = question
            self._wake.set()
            # The store may have ended with a rank: then the watchdog's thread waits in vain, and this thread stops
            # waiting for it.
            if question.answered.wait(GONE_SECONDS + 0.2) or question.is_posted or not closed:
                question.answered.wait(REPORT_SECONDS + 1)
        reaches_store = question.is_heard  # read before `found` is copied: it is complete if the store has answered
        return told, dict(question.found), reaches_store

    def close(self) -> None:
        """End the thread and wait at most `_CLOSE_SECONDS` for its end."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)  # it may hang in the store

    def begin(self, store: Store) -> None:
        """Delete this rank's last message, and watch again after a wait that failed, since ranks open new connections."""
        store.set(self._key(self._own), "")
        self._has_failed = False

    # ------------------------------------------------------------------ the thread

    def _run(self, store: Store, device: torch.device | None) -> None:
        make_current(device)
        is_connected = False
        while not self._is_closed:
            now = time.monotonic()
            soon = [wait.since + self._due_seconds - now for wait in self.present()]
            self._wake.wait(min([self._tick, *(one for one in soon if one > 0)]))
            self._wake.clear()
            question = self._question
            self._question = None
            try:
                if question is None and not self.present() and not self._is_posted:
                    continue
                if not is_connected:
                    # A connection of its own: a client that waits for a key blocks all others on its connection.
                    with suppress(AttributeError, NotImplementedError, RuntimeError):
                        store = store.clone()  # type: ignore[attr-defined]
                    self._store = store
                    is_connected = True
                if question is not None:
                    self._answer(question)
                elif not self._has_failed:
                    self._look()
            except (RuntimeError, ValueError):
                return  # the store is gone: this rank's wait fails with its own error
            finally:
                if question is not None:
                    question.answered.set()

    def _look(self) -> None:
        now = time.monotonic()
        long = [wait for wait in self.present() if now - wait.since >= self._tick]
        if not long:
            if self._is_posted:
                self._store.set(self._key(self._own), "")
                if self._quiet_until:
                    self._store.set(self._notice_key, "")
                self._is_posted = False
                self._quiet_until = 0.0
            return
        place = next(filter(None, map(place_of, [*self._waits])), "")
        self._post(Told(" and ".join(wait.text for wait in long), False, long[0].operation, place))
        self._is_posted = True
        overdue = [wait for wait in long if now - wait.since >= self._due_seconds]
        if overdue and now >= self._quiet_until and self._may_log():
            self._quiet_until = now + REPEAT_SECONDS
            self._log(overdue[0], now - overdue[0].since)

    def _may_log(self) -> bool:
        """Return whether no other rank of the group has logged lately, and record that this one does."""
        before = self._read(self._notice_key)
        if before and time.time() - json.loads(before)["time"] < REPEAT_SECONDS:
            return False
        mine = json.dumps({"rank": self._own, "time": time.time()})
        return bool(self._store.compare_set(self._notice_key, before, mine).decode() == mine)

    def _log(self, wait: Wait, seconds: float) -> None:
        """Log a long wait in one line, with the waits of the other ranks."""
        others = self._read_others()
        waiting = defaultdict[str, list[int]](list)
        for rank, told in others.items():
            waiting[told.text].append(rank)
        with_us = sorted([self._own, *waiting.pop(wait.text, [])])
        parts = [f"{_subject(with_us, 'has', 'have')} waited {seconds:.0f} s for {wait.text}"]
        parts += [f"{_subject(them, 'has', 'have')} waited for {what}" for what, them in waiting.items()]
        silent = [rank for rank in self.ranks if rank != self._own and rank not in others]
        if silent:
            parts.append(f"{_subject(silent, 'is', 'are')} not waiting for any rank (still in other code?)")
        logging.getLogger("zeroshard").warning("; ".join(parts))

    def _answer(self, question: _Question) -> None:
        # The message stays in the store: others read it as long as this group is in use.
        self._has_failed = True
        self._post(question.told)
        question.is_posted = True
        deadline = latest = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline and not self._is_closed:
            # A rank may have died after the message of a wait. Only the message of a failed wait is always its last.
            heard = {rank for rank, told in question.found.items() if told.has_failed}
            question.found.update(self._read_others(heard))
            failed = {rank: told for rank, told in question.found.items() if told.has_failed}
            is_gone = bool(question.told.closed) or any(told.closed for told in failed.values())
            if is_gone and (len(failed) > len(heard) or not question.is_heard):
                deadline = min(time.monotonic() + GONE_SECONDS, latest)
            question.is_heard = True
            if len({*failed, *question.dead}) == len(self.ranks) - 1:
                break
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ the store

    @staticmethod
    def _key(rank: int) -> str:
        return f"zeroshard/waits/{rank}"

    def _post(self, told: Told) -> None:
        self._store.set(self._key(self._own), json.dumps(told))
        extended: Any = self._store  # torch's stubs lack these methods
        if not self._has_posted and extended.has_extended_api():
            extended.append(_POSTED, f"{self._own} ")
        self._has_posted = True

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_others(self, known: Collection[int] = ()) -> dict[int, Told]:
        """Return the other members' messages, except those of `known` ranks."""
        left = [rank for rank in self.ranks if rank != self._own and rank not in known]
        extended: Any = self._store
        if extended.has_extended_api():
            posted = set(map(int, self._read(_POSTED).split()))
            left = [rank for rank in left if rank in posted]
        else:
            left = [rank for rank in left if self._store.check([self._key(rank)])]
        values = values_of(self._store, [self._key(rank) for rank in left])
        return {rank: Told(*json.loads(told)) for rank, told in zip(left, values, strict=True) if told}
