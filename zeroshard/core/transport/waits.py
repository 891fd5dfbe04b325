"""Owns the record of this rank's waits. A training step only writes the record; the watchdog's thread reads it (`watch.py`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from zlib import crc32


class Wait(NamedTuple):
    """A wait in progress."""

    operation: str | None
    label: str
    since: float

    @property
    def text(self) -> str:
        """A description of the wait: the outermost operation, if any, and in brackets the part of it that waits."""
        return f"{self.operation} ({self.label})" if self.operation else self.label


def code_of(name: str) -> int:
    """Return a number from 1 to 15 for a name. Ignore its part from the first quote on, which may differ between ranks."""
    return 1 + crc32(name.split('"', maxsplit=1)[0].encode()) % 15


class _OfThread(threading.local):
    """The values of each thread."""

    operation: str | None = None
    """The outermost operation, by name."""


class Waits:
    """The waits in progress: of this process's threads, and of its device."""

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self._waits: dict[int, Wait] = {}
        """The waits of threads, by the thread's identifier."""
        self._behind: deque[tuple[Wait, Callable[[], bool]]] = deque()
        """The waits of the device, in its order."""
        self._behind_lock = threading.Lock()

    @property
    def operation_code(self) -> int:
        """A number from 0 to 15 for the kind of this thread's operation, 0 for none: messages with different numbers never pair."""
        name = self._of_thread.operation
        return 0 if name is None else code_of(name)

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Attribute this thread's waits inside the block to the operation `name`. The outermost name counts."""
        if self._of_thread.operation is not None:
            yield
            return
        self._of_thread.operation = name
        try:
            yield
        finally:
            self._of_thread.operation = None

    def enter(self, label: str) -> None:
        """Record that this thread begins to wait."""
        self._waits[threading.get_ident()] = Wait(self._of_thread.operation, label, time.monotonic())

    def leave(self) -> None:
        """Record that this thread no longer waits."""
        self._waits.pop(threading.get_ident(), None)

    def follow(self, label: str, is_over: Callable[[], bool]) -> None:
        """Record that the device waits for `label` while this thread continues, until `is_over` returns True.

        A backend that gives up may end the process, so the wait must be reported beforehand.
        """
        wait = Wait(self._of_thread.operation, label, time.monotonic())
        with self._behind_lock:
            self._drop_what_is_over()
            self._behind.append((wait, is_over))

    def _drop_what_is_over(self) -> None:
        while self._behind and self._behind[0][1]():
            self._behind.popleft()

    def present(self) -> list[Wait]:
        """Return the waits of all threads, and the first wait of the device, if any."""
        with self._behind_lock:
            self._drop_what_is_over()
            behind = [self._behind[0][0]] if self._behind else []
        return [*self._waits.values(), *behind]
