"""Owns where the states of a dry run rest: members of the family of storages that count. Called by shard, as `Storages` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.plan.clock import Clock, Line, arrives_at
from zeroshard.plan.ledger import GRADIENTS, OPTIMIZER, PARAMETERS, Ledger
from zeroshard.plan.machine import Machine
from zeroshard.policy import Offload, Policy
from zeroshard.storage.base import DeviceStorage, MemoryStorage, Slot
from zeroshard.storage.disk import DiskStorage, Staging
from zeroshard.storage.flat_buffer import FlatBuffer
from zeroshard.storage.memory_slot import MemorySlot
from zeroshard.storage.storages import Storages
from zeroshard.storage.transfers import CPU, LANDED, Copies, Transfer, in_pages


@final
class CountedBuffer(FlatBuffer):
    """Memory of torch's own, that tells the ledger how much of it there is."""

    def __init__(self, label: str, tensor: Tensor, ledger: Ledger) -> None:
        super().__init__(label, tensor)
        self._ledger, self._nbytes = ledger, tensor.untyped_storage().nbytes()

    def _give_back(self) -> None:
        self.tensor.untyped_storage().resize_(0)
        self._ledger.resized(self.tensor)

    def _take(self) -> None:
        self.tensor.untyped_storage().resize_(self._nbytes)
        self._ledger.resized(self.tensor)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


def _purpose_of(label: str) -> str:
    """What rests in a slot, by what it is called for errors."""
    if label.startswith("gradients"):
        return GRADIENTS
    return OPTIMIZER if "master weights" in label else PARAMETERS


@final
class PretendedDevice(DeviceStorage):
    """The memory of the device that computes."""

    def __init__(self, ledger: Ledger, copies: Copies, *, answers_at_once: bool) -> None:
        self.device, self._ledger, self._copies, self._nbytes = CPU, ledger, copies, 0
        self._answers_at_once = answers_at_once

    @property
    def answers_at_once(self) -> bool:
        return self._answers_at_once

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self._nbytes += numel * dtype.itemsize
        with self._ledger.purpose(_purpose_of(label)):
            return self.around(label, torch.zeros(numel, dtype=dtype))

    def taking(self, label: str, memory: Tensor, before_write: Callable[[], None]) -> Slot:
        self._nbytes += memory.nbytes
        return MemorySlot(label, memory, self, self._copies, before_write=before_write)

    def transient_slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        self._nbytes += numel * dtype.itemsize
        with self._ledger.purpose(_purpose_of(label)):
            buffer = CountedBuffer(label, torch.zeros(numel, dtype=dtype), self._ledger)
        return MemorySlot(label, buffer.tensor, self, self._copies, buffer=buffer)

    def flat_buffer(self, label: str, numel: int, dtype: torch.dtype, *, comes_and_goes: bool) -> FlatBuffer:
        with self._ledger.purpose(PARAMETERS):
            return CountedBuffer(label, torch.zeros(numel, dtype=dtype), self._ledger)

    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        assert whole is None or isinstance(whole, MemorySlot)
        return MemorySlot(label, memory, self, self._copies, whole)


@final
class PretendedHost(MemoryStorage):
    """CPU memory beside an accelerator."""

    def __init__(self, ledger: Ledger, copies: Copies) -> None:
        self.device, self._ledger, self._copies, self._nbytes = CPU, ledger, copies, 0

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._ledger.purpose("frames", on_host=True):
            return torch.empty(numel, dtype=dtype)

    def slot(self, label: str, numel: int, dtype: torch.dtype) -> Slot:
        nbytes = in_pages(numel * dtype.itemsize)
        self._nbytes += numel * dtype.itemsize
        with self._ledger.purpose(_purpose_of(label), on_host=True):
            memory = torch.zeros(nbytes, dtype=torch.uint8)
        return self.around(label, memory[: numel * dtype.itemsize].view(dtype))

    def around(self, label: str, memory: Tensor, whole: Slot | None = None) -> Slot:
        assert whole is None or isinstance(whole, MemorySlot)
        return MemorySlot(label, memory, self, self._copies, whole)


class _Copies(Copies):
    """Copies between the device and CPU memory, in each direction on a line of its own."""

    def __init__(self, ledger: Ledger, out: Line, back: Line) -> None:
        super().__init__(CPU)
        self._ledger, self._out, self._back = ledger, out, back

    def copy(self, target: Tensor, source: Tensor, after: Transfer = LANDED) -> Transfer:
        to_host, from_host = self._ledger.is_on_host(target), self._ledger.is_on_host(source)
        if to_host == from_host:
            return super().copy(target, source, after)
        if target.dtype != source.dtype:
            source = source.to(target.dtype)
        line = self._out if to_host else self._back
        return line.send(source.nbytes, arrives_at(after))


class _Staging(Staging):
    def __init__(self, ledger: Ledger, count: int, nbytes: int, block_nbytes: int) -> None:
        super().__init__(count, nbytes, block_nbytes, pin=False)
        self._ledger = ledger

    def _make(self) -> Tensor:
        with self._ledger.purpose("staging", on_host=True):
            return torch.empty(self.nbytes, dtype=torch.uint8)


class PretendedFile:
    """A `BlockFile` of which nothing is written."""

    def __init__(self, write: Line, read: Line, requests: int, block_nbytes: int) -> None:
        self._write_line, self._read_line = write, read
        self.buffers_nbytes = requests * min(block_nbytes, 1 << 20)
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def allocate(self, nbytes: int, label: str) -> int:
        start = self._nbytes
        self._nbytes += in_pages(nbytes)
        return start

    def release(self, start: int, nbytes: int) -> None:
        self._nbytes -= in_pages(nbytes)

    def write(self, start: int, flat: Tensor, label: str, after: Transfer = LANDED) -> Transfer:
        return self._write_line.send(flat.nbytes, arrives_at(after))

    def read(self, start: int, flat: Tensor, label: str) -> Transfer:
        return self._read_line.send(flat.nbytes)

    def close(self) -> None:
        return


class PretendedStorages(Storages):
    """The storages of one dry run.

    Args:
        sharers: ranks of this host, which share its disk.
    """

    def __init__(
        self, policy: Policy, device: torch.device, param_itemsize: int, collectives: Collectives | None,
        ledger: Ledger, clock: Clock, machine: Machine, sharers: int,
    ) -> None:  # fmt: skip
        self._ledger, self._clock, self._machine, self._sharers = ledger, clock, machine, sharers
        super().__init__(policy, device, param_itemsize, collectives)

    def _make_copies(self, device: torch.device) -> Copies:
        link = self._machine.copies
        out, back = (Line(self._clock, "copies", link.bandwidth, link.latency) for _ in range(2))
        return _Copies(self._ledger, out, back)

    def _make_accelerator(self, device: torch.device) -> DeviceStorage:
        return PretendedDevice(self._ledger, self._copies, answers_at_once=self._machine.computes_on_cpu)

    def _is_host(self, device: torch.device) -> bool:
        return self._machine.computes_on_cpu

    def _make_host(self) -> MemoryStorage:
        return PretendedHost(self._ledger, self._copies)

    def _make_disk(self, offload: Offload, count: int, nbytes: int, *, pin: bool) -> DiskStorage:
        machine = self._machine
        write, read = (
            Line(self._clock, "disk", speed / self._sharers, 1e-4) for speed in (machine.disk_write, machine.disk_read)
        )
        file = PretendedFile(write, read, offload.requests, offload.block_nbytes)
        return DiskStorage(file, self._copies, _Staging(self._ledger, count, nbytes, offload.block_nbytes))
