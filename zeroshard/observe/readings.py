"""Owns figures that an accelerator is still computing. They are copied in batches and read when the copies are complete.

The host waits for the device only in `take(wait=True)`. Otherwise a figure usually arrives one `take` after its copy began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zeroshard.storage.transfers import CPU, LANDED, Copies, Transfer

Number = float | Tensor
Key = TypeVar("Key")


class Readings(Generic[Key]):
    """Numbers by key, in the order in which they were added. A number may be a tensor of one element."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Key, list[Number]]] = []
        self._in_flight: list[tuple[Key, list[Number]]] = []
        self._host = torch.empty(0)
        """The accelerator's numbers of the batch in flight, valid once `_transfer` is done."""
        self._transfer: Transfer = LANDED
        self._copies: Copies | None = None

    def add(self, key: Key, numbers: Sequence[Number]) -> None:
        """Add numbers to the next batch. Do not change an accelerator's tensors before `take` starts the copies of that batch."""
        kept: list[Number] = []
        for number in numbers:
            if isinstance(number, Tensor) and number.device.type != "cpu":
                kept.append(number.detach().reshape(()))
            else:
                kept.append(float(number.detach() if isinstance(number, Tensor) else number))
        self._waiting.append((key, kept))

    def forget_waiting(self) -> None:
        """Drop the numbers that were added since the last batch."""
        self._waiting.clear()

    def take(self, *, wait: bool = False) -> list[tuple[Key, list[float]]]:
        """Return the numbers that have arrived. Start the copies of the next batch unless earlier copies are in flight.

        Args:
            wait: whether to block until all numbers have arrived.
        """
        found: list[tuple[Key, list[float]]] = []
        while wait or self._transfer.is_done:
            if not self._transfer.is_done:
                self._transfer.wait(CPU)
            arrived = iter(self._host.tolist())
            for key, numbers in self._in_flight:
                found.append((key, [next(arrived) if isinstance(one, Tensor) else one for one in numbers]))
            self._host = torch.empty(0)
            self._transfer = LANDED
            self._in_flight = self._waiting
            self._waiting = []
            there = [one for _, numbers in self._in_flight for one in numbers if isinstance(one, Tensor)]
            if there:
                device = there[0].device
                self._copies = self._copies or Copies(device)
                self._host = torch.empty(len(there), dtype=torch.float32, pin_memory=True)
                packed = torch.stack([one.to(device, torch.float32) for one in there])
                self._transfer = self._copies.copy(self._host, packed)
            if not self._in_flight:
                break
        return found
