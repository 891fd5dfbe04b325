"""Owns figures that an accelerator is still computing. They are copied in batches, and read when the copies are complete.

The host does not wait for the device. A figure arrives about half a second after its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zeroshard.storage.transfers import CPU, Copies, Transfer

Number = float | Tensor
Key = TypeVar("Key")
_Kind = tuple[torch.device, torch.dtype]


class Readings(Generic[Key]):
    """Numbers by key, in the order in which they were added. A number may be a tensor of one element."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Key, list[Number]]] = []
        self._in_flight: list[tuple[Key, list[Number]]] = []
        self._arriving: dict[_Kind, tuple[Tensor, Transfer]] = {}
        self._copies: dict[torch.device, Copies] = {}

    def add(self, key: Key, numbers: Sequence[Number]) -> None:
        """Add numbers to the next batch. An accelerator's tensors are copied only with that batch, and must not change before."""
        kept: list[Number] = []
        for number in numbers:
            if isinstance(number, Tensor) and number.device.type != "cpu":
                kept.append(number.detach().reshape(()))
            else:
                kept.append(float(number))
        self._waiting.append((key, kept))

    def forget_waiting(self) -> None:
        """Drop the numbers that were added since the last batch."""
        self._waiting.clear()

    def take(self, *, wait: bool = False) -> list[tuple[Key, list[float]]]:
        """Return the numbers that have arrived, and start the copies of the next batch.

        Args:
            wait: whether to block until all numbers have arrived.
        """
        found: list[tuple[Key, list[float]]] = []
        while wait or all(transfer.is_done for _, transfer in self._arriving.values()):
            found += self._land()
            if not self._waiting:
                break
            self._start()
        return found

    def _start(self) -> None:
        self._in_flight = self._waiting
        self._waiting = []
        alike: dict[_Kind, list[Tensor]] = {}
        for _, numbers in self._in_flight:
            for number in numbers:
                if isinstance(number, Tensor):
                    alike.setdefault((number.device, number.dtype), []).append(number)
        for (device, dtype), tensors in alike.items():
            if device not in self._copies:
                self._copies[device] = Copies(device)
            host = torch.empty(len(tensors), dtype=torch.float32, pin_memory=True)
            self._arriving[device, dtype] = (host, self._copies[device].copy(host, torch.stack(tensors)))

    def _land(self) -> list[tuple[Key, list[float]]]:
        """Wait for the batch in flight, and return its numbers."""
        arrived = {}
        for kind, (host, transfer) in self._arriving.items():
            if not transfer.is_done:
                transfer.wait(CPU)
            arrived[kind] = iter(host.tolist())
        found: list[tuple[Key, list[float]]] = []
        for key, numbers in self._in_flight:
            values = []
            for number in numbers:
                if isinstance(number, Tensor):
                    values.append(next(arrived[number.device, number.dtype]))
                else:
                    values.append(number)
            found.append((key, values))
        self._arriving = {}
        self._in_flight = []
        return found
