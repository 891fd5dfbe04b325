"""Owns figures that an accelerator still computes: they are copied in batches, and read when they have arrived. Called by progress.

Nobody waits for the device: a figure is known about half a second after its step, and the last ones when the training is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from zeroshard.storage.transfers import CPU, Copies, Transfer

Number = float | Tensor
Key = TypeVar("Key")


class Readings(Generic[Key]):
    """Numbers by key, some of them tensors of one element, in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Key, Sequence[Number]]] = []
        self._flight: _Flight[Key] | None = None
        self._copies: dict[torch.device, Copies] = {}

    def add(self, key: Key, numbers: Sequence[Number]) -> None:
        """Keep them for the next batch. An accelerator's tensors are not copied before: their memory must not be written to."""
        self._waiting.append((key, [number if _is_away(number) else float(number) for number in numbers]))

    def forget_waiting(self) -> None:
        """What was added since the last batch is not wanted."""
        self._waiting.clear()

    def take(self, *, wait: bool = False) -> list[tuple[Key, list[float]]]:
        """What has arrived by now; and the next batch is sent on its way.

        Args:
            wait: block until everything is here.
        """
        found: list[tuple[Key, list[float]]] = []
        while True:
            if self._flight is not None:
                if not (wait or self._flight.is_done):
                    return found
                found += self._flight.land()
                self._flight = None
            if not self._waiting:
                return found
            self._flight = _Flight(self._waiting, self._copies)
            self._waiting = []


def _is_away(number: Number) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"


class _Flight(Generic[Key]):
    """One batch."""

    def __init__(self, entries: list[tuple[Key, Sequence[Number]]], copies: dict[torch.device, Copies]) -> None:
        self._entries = entries
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for _, numbers in entries:
            for number in numbers:
                if isinstance(number, Tensor):
                    alike[number.device, number.dtype].append(number.detach().reshape(()))
        self._arriving: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Transfer]] = {}
        for kind, tensors in alike.items():
            device = kind[0]
            if device not in copies:
                copies[device] = Copies(device)
            host = torch.empty(len(tensors), dtype=torch.float32, pin_memory=True)
            self._arriving[kind] = host, copies[device].copy(host, torch.stack(tensors))

    @property
    def is_done(self) -> bool:
        return all(transfer.is_done for _, transfer in self._arriving.values())

    def land(self) -> list[tuple[Key, list[float]]]:
        """The numbers. Blocks until they are here."""
        for _, transfer in self._arriving.values():
            if not transfer.is_done:
                transfer.wait(CPU)
        arrived = {kind: iter(host.tolist()) for kind, (host, _) in self._arriving.items()}

        def read(number: Number) -> float:
            return float(next(arrived[number.device, number.dtype])) if isinstance(number, Tensor) else number

        return [(key, [read(number) for number in numbers]) for key, numbers in self._entries]
