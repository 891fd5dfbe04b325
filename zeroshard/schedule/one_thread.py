"""Owns the rule that one thread at a time runs a model whose parameters come and go."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

from zeroshard.errors import UsageError
from zeroshard.schedule.unit import Unit


class OneThread:
    """The check that only one thread runs a forward: another would reshard parameters that the first reads.

    Args:
        units: of the model.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._is_asked = any(unit.comes_and_goes for unit in units)
        self._lock = threading.Lock()
        self._running: tuple[int, Hashable] | None = None
        """The thread that runs, and the outermost forward that it began."""

    def begin(self, forward: Hashable, *, is_outermost: bool) -> None:
        """Record that a forward begins on this thread; raise if another thread's runs.

        Args:
            is_outermost: it is the whole model's. One that this thread began before, and did not end, broke off.
        """
        if not self._is_asked:
            return
        own = threading.get_ident()
        with self._lock:
            running = self._running
            if running is not None and running[0] != own and _is_alive(running[0]):
                raise UsageError(
                    "a forward began while one of another thread runs, or broke off there. Under this policy parameters have "
                    "memory only while a forward uses them: run the model on one thread at a time, or at stage 2 or below."
                )
            if is_outermost or running is None or running[0] != own:
                self._running = own, forward

    @property
    def is_another(self) -> bool:
        """Whether another thread runs a forward."""
        running = self._running
        return running is not None and running[0] != threading.get_ident()

    def end(self, forward: Hashable) -> None:
        """Record that a forward has ended."""
        if self._running is not None and self._running[1] is forward:
            self._running = None


def _is_alive(ident: int) -> bool:
    return any(thread.ident == ident for thread in threading.enumerate())
