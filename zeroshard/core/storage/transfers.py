"""Owns transfers between places: copies on streams of their own, and the ring of staging buffers that they pass through."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from zeroshard.errors import StorageError
from zeroshard.policy import PAGE_NBYTES

CPU = torch.device("cpu")

STAGED_NBYTES, STAGED_COUNT = 4 << 20, 3
"""The size and the number of buffers for data that is converted on its way to the device."""


class Transfer(ABC):
    """A read or a write that has been started."""

    has_raised: bool = False
    """Whether `wait` has already raised the transfer's error."""

    @abstractmethod
    def wait(self, device: torch.device) -> None:
        """Order the later work of `device` after this transfer. A CPU blocks."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would not block."""


class _Lane:
    """The stream of one direction's copies, and the copies whose memory the allocator must not give out again yet.

    Freed memory is used again in the order of the computing stream. So each copy keeps its tensor on the device until that stream
    waits for the copy, or the host has seen its end. `record_stream` would keep freed memory until the host sees the end. But the
    host runs ahead of the device by a whole forward, so each unit would take separate memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        self._kept: deque[tuple[_Copy, Tensor]] = deque()
        self._lock = threading.Lock()  # threads that write to disk wait for copies too

    def begin(self, copy: _Copy, on_device: Tensor) -> None:
        """Keep the memory of a copy that was started just now."""
        with self._lock:
            while self._kept and self._kept[0][0].is_over():
                self._kept.popleft()
            self._kept.append((copy, on_device))

    def end(self, copy: _Copy) -> None:
        """Drop the memory of `copy`, and of earlier copies, after the computing stream or the host has waited for `copy`."""
        with self._lock:
            if any(copy is kept for kept, _ in self._kept):
                while self._kept.popleft()[0] is not copy:
                    pass


class _Copy(Transfer):
    """A copy on a stream of its own."""

    def __init__(self, event: torch.Event, lane: _Lane, own: Sequence[torch.Stream]) -> None:
        self._event = event
        self._lane = lane
        self._own = own

    def wait(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._event.synchronize()
        else:
            stream = torch.accelerator.current_stream(device)
            stream.wait_event(self._event)
            if stream in self._own:  # only another copy waits: the next computation may still run before this copy ends
                return
        self._lane.end(self)

    def is_over(self) -> bool:
        """Return whether the copy has ended."""
        return bool(self._event.query())

    @property
    def is_done(self) -> bool:
        if not self.is_over():
            return False
        self._lane.end(self)  # nothing waits for it any more, and its memory may be freed
        return True


class InFlight(Transfer):
    """The copies to and from one range of memory that may still be under way."""

    def __init__(self) -> None:
        self._transfers: list[Transfer] = []

    def add(self, transfer: Transfer) -> Transfer:
        """Add a transfer, unless it is over already. Return it."""
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


LANDED: Transfer = InFlight()
"""A transfer that is over."""


class Staging:
    """A ring of at most `count` buffers of `nbytes` in CPU memory, which data passes through between two other places.

    The host takes a buffer, fills it or starts a transfer into it, and releases it with the last transfer that uses it. The host
    waits only while all buffers are in transfers. Buffers are created when they are first needed (by `make`, for a
    number of bytes), and kept.
    """

    def __init__(self, count: int, nbytes: int, make: Callable[[int], Tensor]) -> None:
        self.buffer_nbytes = nbytes
        self._left = count
        self._make = make
        self._free: deque[tuple[Tensor, Transfer]] = deque()
        self.nbytes = 0
        """The number of bytes of all buffers that were created."""

    @property
    def has_buffer(self) -> bool:
        """Whether a buffer is left to take, now or once its transfer is over."""
        return bool(self._free) or self._left > 0

    def take(self) -> Tensor:
        """Take a buffer: one that is free, a new one, or the one whose transfer was started first."""
        if self._free and (self._left <= 0 or self._free[0][1].is_done):
            buffer, after = self._free.popleft()
            with suppress(StorageError):  # a reader of the values gets this error, which names their place
                after.wait(CPU)
            return buffer
        self._left -= 1
        self.nbytes += self.buffer_nbytes
        return self._make(self.buffer_nbytes)

    def release(self, buffer: Tensor, after: Transfer = LANDED) -> None:
        """Take a buffer back; it is used again once `after` is over."""
        self._free.append((buffer, after))


class Copies:
    """An object that copies between an accelerator and CPU memory, on one stream per direction. On a CPU, copies are plain."""

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self.staging = Staging(STAGED_COUNT, STAGED_NBYTES, partial(aligned_bytes, pin=pin and device.type != "cpu"))
        self._to_device: _Lane | None = None
        self._to_host: _Lane | None = None
        self._streams: list[torch.Stream] = []
        if device.type != "cpu":
            self._to_device = _Lane(device)
            self._to_host = _Lane(device)
            self._streams = [self._to_device.stream, self._to_host.stream]

    def copy(self, target: Tensor, source: Tensor, after: Transfer = LANDED) -> Transfer:
        """Start to copy `source` to `target`, of any dtype, on any device, once `after` is over.

        The device's memory is kept until a computing stream or the host waits for the copy. This does not protect storage
        that `FlatBuffer.free` frees under its tensor: its caller must wait for the copy first.
        """
        lane = self._to_host if target.device.type == "cpu" else self._to_device
        if lane is None or target.device == source.device:
            after.wait(target.device)
            target.copy_(source)
            return LANDED
        if target.dtype != source.dtype:  # convert at the source: rounding halves the bytes that travel
            if source.device.type == "cpu":
                return self._staged(target, source, after)
            source = source.to(target.dtype)
        on_device = source if target.device.type == "cpu" else target
        stream = lane.stream
        stream.wait_stream(torch.accelerator.current_stream(on_device.device))  # type: ignore[attr-defined]
        with stream:
            after.wait(on_device.device)
            target.copy_(source, non_blocking=True)
            event = stream.record_event()
        copy = _Copy(event, lane, self._streams)
        lane.begin(copy, on_device)
        return copy

    def _staged(self, target: Tensor, source: Tensor, after: Transfer) -> Transfer:
        """Copy a 1-D tensor and convert it in staging buffers on the way: from memory that is not pinned, torch would wait."""
        copying: Transfer = LANDED
        step = STAGED_NBYTES // target.dtype.itemsize
        for low in range(0, target.numel(), step):
            buffer = self.staging.take()
            try:
                part = target[low : low + step]
                cast = buffer.view(target.dtype)[: part.numel()].copy_(source[low : low + step])
                copying = self.copy(part, cast, after)
            finally:
                self.staging.release(buffer, copying)
        return copying  # the last on its stream


def aligned_bytes(nbytes: int, *, pin: bool) -> Tensor:
    """Return CPU memory [nbytes], as uint8 with undefined content, that begins at a page boundary."""
    memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
    if memory.data_ptr() % PAGE_NBYTES:
        del memory  # before another is allocated
        memory = torch.empty(nbytes + PAGE_NBYTES, dtype=torch.uint8, pin_memory=pin)
        start = -memory.data_ptr() % PAGE_NBYTES
        memory = memory[start : start + nbytes]
    return memory


def in_pages(nbytes: int) -> int:
    """Round a number of bytes up to whole pages."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
