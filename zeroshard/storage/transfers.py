"""Owns what is on its way between places: transfers, copies on streams of their own, memory for direct I/O. Called by storages."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from zeroshard.policy import PAGE_NBYTES

CPU = torch.device("cpu")


class Transfer(ABC):
    """A read or a write that was started."""

    @abstractmethod
    def wait(self, device: torch.device) -> None:
        """What `device` does from now on comes after it. For the CPU that means to block."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would not block."""


class Landed(Transfer):
    """One that is over."""

    def wait(self, device: torch.device) -> None:
        return

    @property
    def is_done(self) -> bool:
        return True


LANDED = Landed()


class _Copy(Transfer):
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._event.synchronize()
        else:
            torch.accelerator.current_stream(device).wait_event(self._event)

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())


class InFlight(Transfer):
    """All copies to and from one range of memory that may still be under way."""

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []

    def add(self, transfer: Transfer) -> Transfer:
        """One more."""
        self._transfers = [other for other in self._transfers if not other.is_done]
        if not transfer.is_done:
            self._transfers.append(transfer)
        return transfer

    def wait(self, device: torch.device) -> None:
        for transfer in self._transfers:
            transfer.wait(device)

    @property
    def is_done(self) -> bool:
        return all(transfer.is_done for transfer in self._transfers)


class Copies:
    """Copies between an accelerator and CPU memory, in each direction on a stream of its own. On a CPU: plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._to_device: torch.Stream | None = None
        self._to_host: torch.Stream | None = None
        if device.type != "cpu":
            self._to_device, self._to_host = torch.Stream(device), torch.Stream(device)

    def copy(self, target: Tensor, source: Tensor, after: Transfer = LANDED) -> Transfer:
        """Start to copy `source` to `target`, of any dtype, on any device; not before `after` is over."""
        stream = self._to_host if target.device.type == "cpu" else self._to_device
        if stream is None or target.device == source.device:
            after.wait(target.device)
            target.copy_(source)
            return LANDED
        if target.dtype != source.dtype:
            # Cast where the source lies: half the bytes travel. From pageable memory torch waits for such a copy.
            source = source.to(target.dtype)
        on_device = source if target.device.type == "cpu" else target
        stream.wait_stream(torch.accelerator.current_stream(on_device.device))  # type: ignore[attr-defined]
        with stream:
            after.wait(on_device.device)
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        on_device.record_stream(stream)
        return _Copy(event)


def aligned_bytes(nbytes: int, *, pin: bool) -> Tensor:
    """CPU memory [nbytes] as uint8 that begins at a page. Undefined content."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    if memory.data_ptr() % PAGE_NBYTES:
        memory = torch.empty(nbytes + PAGE_NBYTES, dtype=torch.uint8, pin_memory=pin)
        start = -memory.data_ptr() % PAGE_NBYTES
        memory = memory[start : start + nbytes]
    return memory


def in_pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
