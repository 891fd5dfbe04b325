"""Owns the watch over waits: it logs long ones, and shares through the store what each rank waits for.

Each watch has one thread beside the training. Only this thread uses the store, over a connection of its own, so that a store that
does not answer never blocks a rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from zeroshard.collectives.report import Told, sentence
from zeroshard.collectives.waits import Pairing, Wait, Waits
from zeroshard.errors import UsageError
from zeroshard.uncaught import is_users

NOTICE_SECONDS = 30.0
NOTICE_VARIABLE = "ZEROSHARD_NOTICE_SECONDS"
REPEAT_SECONDS = 300.0
"""The seconds until a continuing wait is logged again."""
REPORT_SECONDS = 5.0
"""How long a rank whose wait failed waits for the others' word."""

GONE_SECONDS = 0.4
"""The same if the dead rank is known."""

_LOOKS = 6
"""Looks at the waits in the time to the first notice."""
_CLOSE_SECONDS = 2.0
_POLL_SECONDS = 0.05


def notice_seconds() -> float:
    """Return the seconds until a wait is logged: from the environment, or 30. Infinity means never.

    Raises:
        UsageError: they are not a positive number.
    """
    text = os.environ.get(NOTICE_VARIABLE, NOTICE_SECONDS)
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise UsageError(f"{NOTICE_VARIABLE} is {text!r}: give seconds as a positive number, or inf for never.")


def place_of(thread: int) -> str:
    """Return the innermost line of the user's program that a thread runs, as `train.py:12`; "" if there is none."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def make_current(device: torch.device | None) -> None:
    """Make an accelerator the current one of this thread.

    A new thread begins with the first accelerator of the host, and would allocate memory there when it uses an event.
    """
    if device is not None and device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


@dataclass
class _Question:
    told: Told
    gone: Sequence[int] = ()
    found: dict[int, Told] = field(default_factory=dict)
    is_heard: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


class Watch(Waits):
    """A watch over the waits of this rank, see the module's docstring.

    Args:
        store: a store that all members reach. Messages are kept by global rank, so that they cover other groups, too.
        ranks: the members, by rank of all.
        own: this process.
        notice_seconds: the length from which a wait is logged.
        device: the accelerator on whose events the members wait; None: on none.
    """

    def __init__(
        self, store: Store, ranks: Sequence[int], own: int, notice_seconds: float, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        self._own = own
        self._notice_seconds = notice_seconds
        self._question: _Question | None = None
        self.reaches_store = True
        """Whether it did at the last check."""
        self._is_posted = self._has_failed = self._is_closed = False
        self._posts = 0
        """The number of messages about waits that have a pairing."""
        self._seen: tuple[Pairing, int, int] | None = None
        """A wait of this rank, the rank that it waits for, and the number of that one's last message."""
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

    def told_of(self, label: str) -> Told:
        """Return this thread's message about a wait that failed."""
        wait = Wait(self.operation_name, label, time.monotonic())
        return Told(wait.text, True, wait.operation, place_of(threading.get_ident()))

    def ask(self, told: Told, gone: Sequence[int] = ()) -> dict[int, Told]:
        """Report a failed wait to the others, and return their messages by global rank.

        It takes a few seconds if they or the store do not answer; ranks that sent nothing are not in the result.

        Args:
            gone: the ranks that cannot answer. Then the other ranks detect that at once too, and the waits are short.
        """
        question = _Question(told, gone)
        if self._thread.is_alive():
            self._question = question
            self._wake.set()
            # The store may be gone with a rank: the thread then waits for it in vain, and nobody for the thread.
            question.answered.wait(GONE_SECONDS + 0.2 if gone else REPORT_SECONDS + 1)
        self.reaches_store = question.is_heard
        return dict(question.found)

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)  # it may hang in the store

    # ------------------------------------------------------------------ the thread

    def _run(self, store: Store, device: torch.device | None) -> None:
        make_current(device)
        while not self._is_closed:
            self._wake.wait(self._nap())
            self._wake.clear()
            question = self._question
            self._question = None
            try:
                if question is None and not self.present() and not self._is_posted:
                    continue
                if not self._is_connected:
                    self._connect(store)
                if question is not None:
                    self._answer(question)
                elif not self._has_failed:
                    self._look()
            except (RuntimeError, ValueError):
                return  # the store is gone: this rank's wait fails with its own error
            finally:
                if question is not None:
                    question.answered.set()

    _store: Store
    _is_connected = False

    def _connect(self, store: Store) -> None:
        """Make a connection of its own: a client that waits for a key blocks all others on its connection."""
        try:
            self._store = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, RuntimeError):
            self._store = store
        self._is_connected = True

    @property
    def _tick(self) -> float:
        return min(self._notice_seconds, NOTICE_SECONDS) / _LOOKS

    def _stagger(self) -> float:
        """Return this rank's delay. Of ranks that began to wait together, only the first then logs."""
        return self._tick * self.ranks.index(self._own) / len(self.ranks)

    def _nap(self) -> float:
        now = time.monotonic()
        due = self._notice_seconds + self._stagger()
        soon = [wait.since + due - now for wait in self.present()]
        return min([self._tick, *(one for one in soon if one > 0)])

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
        places = [place for place in map(place_of, self.threads()) if place]
        told = Told(" and ".join(wait.text for wait in long), False, long[0].operation, next(iter(places), ""))
        pairing = next((wait.pairing for wait in long if wait.pairing is not None), None)
        if pairing is None:
            self._post(told)
        else:
            self._posts += 1
            self._post(told._replace(pairing=[self._posts, *pairing.report()]))
            self._interrupt_in_vain(pairing)
        self._is_posted = True
        overdue = [wait for wait in long if now - wait.since >= self._notice_seconds + self._stagger()]
        if overdue and now >= self._quiet_until and self._may_speak():
            self._quiet_until = now + REPEAT_SECONDS
            logging.getLogger("zeroshard").warning(
                sentence(self._own, now - overdue[0].since, overdue[0].text, self.ranks, self._read_others())
            )

    def _interrupt_in_vain(self, pairing: Pairing) -> None:
        """End a wait for a rank that waits for this one meanwhile."""
        rank = pairing.awaited
        text = self._read(self._key(rank))
        other = Told(*json.loads(text)) if text else None
        if other is None or not other.pairing:
            return
        post, *reported = other.pairing
        # A message may be of an earlier wait. One that was posted again since is of a wait that is still in progress.
        before = self._seen
        self._seen = pairing, rank, post
        is_present = before is not None and before[:2] == (pairing, rank) and before[2] < post
        if is_present and pairing.is_in_vain(self._own, reported):
            pairing.interrupt(f"rank {rank} waits for this one meanwhile, for {other.text}")

    def _may_speak(self) -> bool:
        """Return whether this rank may log: no other rank of the group has just done so."""
        before = self._read(self._notice_key)
        if before and time.time() - json.loads(before)["time"] < REPEAT_SECONDS:
            return False
        mine = json.dumps({"rank": self._own, "time": time.time()})
        return bool(self._store.compare_set(self._notice_key, before, mine).decode() == mine)

    def _answer(self, question: _Question) -> None:
        self._has_failed = True  # the word stays: others read it as long as this group is of use to anyone
        self._post(question.told)
        deadline = time.monotonic() + (GONE_SECONDS if question.gone else REPORT_SECONDS)
        while time.monotonic() < deadline and not self._is_closed:
            # A rank may have sent the message of a wait before it died; the message of a failed wait is always its
            # last.
            heard = [rank for rank, told in question.found.items() if told.has_failed]
            question.found.update(self._read_others(heard))
            question.is_heard = True
            if len({*heard, *question.gone}) == len(self.ranks) - 1:
                break
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ the store

    @classmethod
    def forget(cls, store: Store, rank: int) -> None:
        """Drop a rank's message from before the group was made."""
        store.set(cls._key(rank), "")

    @staticmethod
    def _key(rank: int) -> str:
        return f"zeroshard/waits/{rank}"

    def _post(self, told: Told) -> None:
        self._store.set(self._key(self._own), json.dumps(told))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_others(self, known: Sequence[int] = ()) -> dict[int, Told]:
        """Return the other members' messages, except of `known` ranks."""
        found = {}
        for rank in self.ranks:
            if rank != self._own and rank not in known:
                told = self._read(self._key(rank))
                if told:
                    found[rank] = Told(*json.loads(told))
        return found
