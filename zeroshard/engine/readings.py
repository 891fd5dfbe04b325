"""Owns figures that an accelerator is still computing. They are copied in batches and read when the copies are complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Number = float | Tensor
Key = TypeVar("Key")


class Readings(Generic[Key]):
    """Numbers by key, in the order in which they were added. A number may be a tensor of one element."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Key, Sequence[Number]]] = []
        self._in_flight: list[tuple[Key, Sequence[Number]]] = []
        self._host = torch.empty(0)
        """The accelerator's numbers of the batch in flight, valid once `_copied` has happened."""
        self._copied: torch.Event | None = None

    def add(self, key: Key, numbers: Sequence[Number], *, only_last: bool = False) -> None:
        """Add numbers to the next batch, or replace it if `only_last`. Do not change an accelerator's tensors before `take`."""
        if only_last:
            self._waiting.clear()
        own = [one.detach().reshape(()) if isinstance(one, Tensor) else float(one) for one in numbers]
        self._waiting.append((key, [float(one) if not _is_elsewhere(one) else one for one in own]))

    def take(self, *, wait: bool = False) -> list[tuple[Key, list[float]]]:
        """Return the numbers that have arrived, and start the copies of the next batch unless earlier ones are in flight.

        Args:
            wait: whether to block until all numbers have arrived.
        """
        found: list[tuple[Key, list[float]]] = []
        while wait or self._copied is None or self._copied.query():
            if self._copied is not None:
                self._copied.synchronize()
            arrived = iter(self._host.tolist())
            for key, numbers in self._in_flight:
                found.append((key, [next(arrived) if _is_elsewhere(one) else float(one) for one in numbers]))
            self._in_flight, self._waiting = self._waiting, []
            self._host, self._copied = torch.empty(0), None
            there = [one for _, numbers in self._in_flight for one in numbers if isinstance(one, Tensor)]
            if there:
                packed = torch.stack([one.to(there[0].device, torch.float32) for one in there])
                self._host = packed.to("cpu", non_blocking=True)  # into pinned memory
                self._copied = torch.Event(packed.device)
                self._copied.record()
            if not self._in_flight:
                break
        return found


def _is_elsewhere(number: Number) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"
