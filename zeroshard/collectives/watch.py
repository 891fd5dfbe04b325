"""Owns the watch over waits: who has waited for long, and for what, told through the store. Called by grouped.

One thread for each watch, beside the training: it alone speaks with the store, over a connection of its own, so that a
store that does not answer never blocks a rank.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from zeroshard.collectives.report import Told, sentence
from zeroshard.errors import UsageError

NOTICE_SECONDS = 30.0
NOTICE_VARIABLE = "ZEROSHARD_NOTICE_SECONDS"
REPEAT_SECONDS = 300.0
"""A wait that goes on is spoken of again, but not often."""
REPORT_SECONDS = 5.0
"""How long a rank whose wait failed waits for the others' word."""

GONE_SECONDS = 0.4
"""The same where it is known which rank is gone."""

_LOOKS = 6
"""Looks at the waits in the time to the first notice."""
_CLOSE_SECONDS = 2.0
_POLL_SECONDS = 0.05


def notice_seconds_from(given: float | None) -> float:
    """The seconds until a wait is spoken of: as given, or as the environment has it, or 30. Infinity is never.

    Raises:
        UsageError: they are not a positive number.
    """
    text = given if given is not None else os.environ.get(NOTICE_VARIABLE, NOTICE_SECONDS)
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    source = "notice_seconds" if given is not None else NOTICE_VARIABLE
    raise UsageError(f"{source} is {text!r}: give seconds as a positive number, or inf for never.")


class Wait(NamedTuple):
    """One wait in progress."""

    operation: str | None
    label: str
    since: float

    @property
    def text(self) -> str:
        """What is waited for."""
        return spelled(self.operation, self.label)


def spelled(operation: str | None, label: str) -> str:
    """What is waited for: the whole operation, and the part of it."""
    return f"{operation} ({label})" if operation else label


@dataclass
class _Question:
    text: str
    gone: Sequence[int] = ()
    found: dict[int, Told] = field(default_factory=dict)
    is_heard: bool = False
    answered: threading.Event = field(default_factory=threading.Event)


class Watch:
    """See the module's docstring.

    Args:
        store: that all members reach. What is told is kept by rank of all ranks, so that it tells of other groups too.
        ranks: the members, by rank of all.
        own: this process.
        notice_seconds: after so long a wait is told.
    """

    def __init__(self, store: Store, ranks: Sequence[int], own: int, notice_seconds: float) -> None:
        self.ranks, self._own, self._notice_seconds = tuple(ranks), own, notice_seconds
        self._waits: dict[int, Wait] = {}
        self._behind: deque[tuple[Wait, Callable[[], bool]]] = deque()
        """What the device waits for, in its order."""
        self._behind_lock = threading.Lock()
        self._operations = threading.local()
        self._question: _Question | None = None
        self.reaches_store = True
        """Whether it did when it was last asked."""
        self._is_posted = self._has_failed = self._is_closed = False
        self._quiet_until = 0.0
        self._notice_key = f"zeroshard/notice/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}"
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(store,), name="zeroshard watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what a rank that waits calls

    @property
    def operation_name(self) -> str | None:
        """The outermost operation of this thread."""
        name: str | None = getattr(self._operations, "name", None)
        return name

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Waits of this thread inside belong to `name`; the outermost name counts."""
        if self.operation_name is not None:
            yield
            return
        self._operations.name = name
        try:
            yield
        finally:
            self._operations.name = None

    def enter(self, label: str) -> None:
        """This thread begins to wait."""
        self._waits[threading.get_ident()] = Wait(self.operation_name, label, time.monotonic())

    def leave(self) -> None:
        """This thread waits no longer."""
        self._waits.pop(threading.get_ident(), None)

    def follow(self, label: str, is_over: Callable[[], bool]) -> None:
        """The device will wait for `label`, while this thread goes on: told as a wait is, until it `is_over`.

        A backend that gives up may end the process: so this is told before.
        """
        wait = Wait(self.operation_name, label, time.monotonic())
        with self._behind_lock:
            self._drop_what_is_over()
            self._behind.append((wait, is_over))

    def _drop_what_is_over(self) -> None:
        while self._behind and self._behind[0][1]():
            self._behind.popleft()

    def _present(self) -> list[Wait]:
        """The waits of all threads, and what the device waits for, if anything."""
        with self._behind_lock:
            self._drop_what_is_over()
            behind = [self._behind[0][0]] if self._behind else []
        return [*self._waits.values(), *behind]

    def ask(self, text: str, gone: Sequence[int] = ()) -> dict[int, Told]:
        """Tell the others that a wait for `text` failed, and learn what they wait for, by rank of all.

        It takes a few seconds where they do not answer, or the store does not; who is missing in the result said nothing.

        Args:
            gone: who will not answer. Then the rest hears of that at once, too, and there is little to wait for.
        """
        question = _Question(text, gone)
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

    def _run(self, store: Store) -> None:
        while not self._is_closed:
            self._wake.wait(self._nap())
            self._wake.clear()
            question, self._question = self._question, None
            try:
                if question is None and not self._present() and not self._is_posted:
                    continue
                if not self._is_connected:
                    self._connect(store)
                if question is not None:
                    self._answer(question)
                elif not self._has_failed:
                    self._look()
            except (RuntimeError, ValueError):
                return  # the store is gone: what this rank waits for fails by itself, and says so
            finally:
                if question is not None:
                    question.answered.set()

    _store: Store
    _is_connected = False

    def _connect(self, store: Store) -> None:
        """A connection of its own: a client that waits for a key keeps everybody else from the store."""
        try:
            self._store = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, RuntimeError):
            self._store = store
        self._is_connected = True

    @property
    def _tick(self) -> float:
        return min(self._notice_seconds, NOTICE_SECONDS) / _LOOKS

    def _stagger(self) -> float:
        """Ranks that began to wait together speak in their order: the first of them is the only one."""
        return self._tick * self.ranks.index(self._own) / len(self.ranks)

    def _nap(self) -> float:
        now, due = time.monotonic(), self._notice_seconds + self._stagger()
        soon = [wait.since + due - now for wait in self._present()]
        return min([self._tick, *(one for one in soon if one > 0)])

    def _look(self) -> None:
        now = time.monotonic()
        long = [wait for wait in self._present() if now - wait.since >= self._tick]
        if not long:
            if self._is_posted:
                self._store.set(self._key(self._own), "")
                if self._quiet_until:
                    self._store.set(self._notice_key, "")
                self._is_posted, self._quiet_until = False, 0.0
            return
        self._post(Told(" and ".join(wait.text for wait in long), has_failed=False))
        self._is_posted = True
        overdue = [wait for wait in long if now - wait.since >= self._notice_seconds + self._stagger()]
        if overdue and now >= self._quiet_until and self._may_speak():
            self._quiet_until = now + REPEAT_SECONDS
            logging.getLogger("zeroshard").warning(
                sentence(self._own, now - overdue[0].since, overdue[0].text, self.ranks, self._read_others())
            )

    def _may_speak(self) -> bool:
        """Whether no other rank of the group has just spoken."""
        before = self._read(self._notice_key)
        if before and time.time() - json.loads(before)["time"] < REPEAT_SECONDS:
            return False
        mine = json.dumps({"rank": self._own, "time": time.time()})
        return bool(self._store.compare_set(self._notice_key, before, mine).decode() == mine)

    def _answer(self, question: _Question) -> None:
        self._has_failed = True  # the word stays: others read it as long as this group is of use to anyone
        self._post(Told(question.text, has_failed=True))
        deadline = time.monotonic() + (GONE_SECONDS if question.gone else REPORT_SECONDS)
        while time.monotonic() < deadline and not self._is_closed:
            # That a rank waits may have been said before it died; that its wait failed is its last word.
            heard = [rank for rank, told in question.found.items() if told.has_failed]
            question.found.update(self._read_others(heard))
            question.is_heard = True
            if len({*heard, *question.gone}) == len(self.ranks) - 1:
                break
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------ the store

    @classmethod
    def forget(cls, store: Store, rank: int) -> None:
        """What a rank said before the group was made is of no use to it."""
        store.set(cls._key(rank), "")

    @staticmethod
    def _key(rank: int) -> str:
        return f"zeroshard/waits/{rank}"

    def _post(self, told: Told) -> None:
        self._store.set(self._key(self._own), json.dumps(told))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_others(self, known: Sequence[int] = ()) -> dict[int, Told]:
        """What the other members say, but for those that are known."""
        found = {}
        for rank in self.ranks:
            if rank != self._own and rank not in known:
                told = self._read(self._key(rank))
                if told:
                    found[rank] = Told(*json.loads(told))
        return found
