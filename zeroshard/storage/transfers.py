"""Owns what is on its way between places: transfers, copies on streams of their own, memory for direct I/O. Called by storages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

import torch
from torch import Tensor

from zeroshard.policy import PAGE_NBYTES

CPU = torch.device("cpu")

STAGED_NBYTES, STAGED_COUNT = 4 << 20, 3
"""What is cast on its way to the device passes through so many buffers of so many bytes."""


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
    """Copies between an accelerator and CPU memory, in each direction on a stream of its own. On a CPU: plain copies.

    Args:
        pin: buffers of its own are pinned.
    """

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self._pin = pin and device.type != "cpu"
        self._staging: deque[tuple[Tensor, Transfer]] = deque()
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
        if target.dtype != source.dtype:  # cast where the source lies: half the bytes travel
            if source.device.type == "cpu":
                return self._staged(target, source, after)
            source = source.to(target.dtype)
        on_device = source if target.device.type == "cpu" else target
        stream.wait_stream(torch.accelerator.current_stream(on_device.device))  # type: ignore[attr-defined]
        with stream:
            after.wait(on_device.device)
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        on_device.record_stream(stream)
        return _Copy(event)

    def _staged(self, target: Tensor, source: Tensor, after: Transfer) -> Transfer:
        """As `copy`, of 1-D tensors. From memory that is not pinned torch would wait for each copy."""
        copying: Transfer = LANDED
        step = STAGED_NBYTES // target.dtype.itemsize
        for low in range(0, target.numel(), step):
            buffer, busy = self._staging.popleft() if len(self._staging) == STAGED_COUNT else (self._buffer(), LANDED)
            busy.wait(CPU)
            part = target[low : low + step]
            cast = buffer.view(target.dtype)[: part.numel()].copy_(source[low : low + step])
            copying = self.copy(part, cast, after)
            self._staging.append((buffer, copying))
        return copying  # the last on its stream

    def _buffer(self) -> Tensor:
        return aligned_bytes(STAGED_NBYTES, pin=self._pin)

    @property
    def nbytes(self) -> int:
        """Bytes of buffers that were made."""
        return sum(buffer.numel() for buffer, _ in self._staging)


def aligned_bytes(nbytes: int, *, pin: bool) -> Tensor:
    """CPU memory [nbytes] as uint8 that begins at a page. Undefined content."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    if memory.data_ptr() % PAGE_NBYTES:
        del memory  # before there is another
        memory = torch.empty(nbytes + PAGE_NBYTES, dtype=torch.uint8, pin_memory=pin)
        start = -memory.data_ptr() % PAGE_NBYTES
        memory = memory[start : start + nbytes]
    return memory


def in_pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
