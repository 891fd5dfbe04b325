"""Owns the wall clock of a step's parts. Called by engine, and by collectives for the time spent waiting."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class Timers:
    """Adds up seconds by name. Switched off, it measures nothing and costs a function call.

    Args:
        device: an accelerator is waited for at both ends of a measurement, so switching it on slows the run there.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._synchronize = device.type != "cpu"
        self._enabled = enabled
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside to `name`."""
        return self._measure(name) if self._enabled else nullcontext()

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._synchronize:
            torch.accelerator.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken
