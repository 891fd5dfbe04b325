"""Owns a machine as a dry run sees it: its speeds and hidden costs, and the time that operations, links and disks take on it.

The numbers are data, in machines.json. Speeds are those that training reaches, not those of a data sheet. One processor computes;
every line (links between ranks, copies to and from CPU memory, the disk) serves one transfer after another beside it. A wait moves
the clock, so transfers overlap where the schedule lets them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroshard.errors import UsageError
from zeroshard.storage.transfers import Transfer

TABLE = Path(__file__).with_name("machines.json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Processor(_Part):
    """A device that computes, with its memory.

    Attributes:
        flops: by dtype of the operands, a second.
        memory_bandwidth: bytes a second, read and written together.
        launch_seconds: of one operation, besides its work.
        peak_flops: by dtype, the maker's figure for dense matrices, where it is known.
    """

    flops: dict[str, float]
    memory_bandwidth: float = Field(gt=0)
    launch_seconds: float = Field(ge=0)
    peak_flops: dict[str, float] = {}

    def flops_of(self, dtype: str) -> float:
        """The floating-point operations a second of a dtype; of fp32 where none is known."""
        return self.flops.get(dtype) or self.flops["float32"]


class Link(_Part):
    """A link between two places: bytes a second in one direction, and seconds of a transfer of none."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class Unseen(_Part):
    """Memory of an accelerator that is none of this process's tensors.

    Attributes:
        context: bytes of the driver's context, kernels included.
        collectives: bytes that the library of collectives takes for itself.
        workspaces: bytes of cuBLAS and its kin.
        fragmentation: what the allocator holds and cannot use, as a share of the peak of live bytes.
    """

    context: int = Field(ge=0)
    collectives: int = Field(ge=0)
    workspaces: int = Field(ge=0)
    fragmentation: float = Field(ge=0, lt=1)


class Machine(_Part):
    """A host with its accelerators. See the attributes of its parts.

    Attributes:
        memory: bytes of one accelerator.
        accelerators: in one host.
        host_memory: bytes of one host.
        inside, between: links that one rank has to others of its host, and to other hosts.
        copies: between one accelerator and CPU memory.
        disk_write, disk_read: bytes a second of a host's disk, which its ranks share.
        transport: how ranks talk: "native" (NCCL and its kin) or "gloo".
        computes_on_cpu: there is no accelerator: ranks compute in CPU memory.
        devices: how torch names such accelerators.
    """

    name: str
    memory: int = Field(gt=0)
    accelerators: int = Field(ge=1)
    host_memory: int = Field(gt=0)
    device: Processor
    host: Processor
    inside: Link
    between: Link
    copies: Link
    disk_write: float = Field(gt=0)
    disk_read: float = Field(gt=0)
    unseen: Unseen
    transport: str = "native"
    computes_on_cpu: bool = False
    devices: tuple[str, ...] = ()


@cache
def machines() -> dict[str, Machine]:
    """The known ones, by name."""
    return {name: Machine(name=name, **values) for name, values in json.loads(TABLE.read_text()).items()}


def peak_flops_of(device: str, dtype: str) -> float | None:
    """The most operations of an accelerator in a second; None where the table lacks it."""
    known = (machine.device.peak_flops.get(dtype) for machine in machines().values() if device in machine.devices)
    return next(known, None)


def machine_of(name: str) -> Machine:
    """A known machine, or one that a file describes, as `zeroshard doctor --profile` writes it.

    Raises:
        UsageError: there is none.
    """
    if name in machines():
        return machines()[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"there is no machine {name!r}: name one of {', '.join(machines())}, or a file of doctor --profile."
        )
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        return Machine(**{"name": path.stem, **values})
    except (ValueError, TypeError, ValidationError) as error:
        raise UsageError(
            f"{path} does not describe a machine: {str(error).splitlines()[0]} Write it with doctor --profile."
        ) from None


# ---------------------------------------------------------------------- time


class Clock:
    """Seconds since the dry run began.

    Attributes:
        now: of the processor.
        computed: seconds of operations, by place: "computing" and "CPU step".
        waited: seconds of waiting, by line.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.computed: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)

    def operate(self, flops: float, nbytes: int, dtype: str, *, on_host: bool) -> None:
        """Run an operation, for as long as its arithmetic or its bytes take, whichever is more."""
        where = self.machine.device
        name = "computing"
        if on_host:
            where = self.machine.host
            name = "CPU step"
        seconds = max(flops / where.flops_of(dtype), nbytes / where.memory_bandwidth) + where.launch_seconds
        self.computed[name] += seconds
        self.now += seconds

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """Count the operations inside so many times: those that a dry run leaves out take as long."""
        before = dict(self.computed)
        yield
        for name, seconds in self.computed.items():
            more = (number - 1) * (seconds - before.get(name, 0.0))
            self.computed[name] += more
            self.now += more

    def wait_until(self, moment: float, line: str) -> None:
        """Wait for a transfer that arrives at a moment."""
        if moment > self.now:
            self.waited[line] += moment - self.now
            self.now = moment

    def reset(self) -> None:
        """Begin another step: count from zero."""
        self.computed.clear()
        self.waited.clear()


class Line:
    """A line that carries bytes. `bandwidth` in bytes a second.

    Args:
        is_apart: it carries beside the computation; else the processor does, as where ranks copy through memory that they share.
    """

    def __init__(self, clock: Clock, name: str, bandwidth: float, latency: float, *, is_apart: bool = True) -> None:
        self.name = name
        self._clock = clock
        self._bandwidth = bandwidth
        self._latency = latency
        self._is_apart = is_apart
        self._free_at = 0.0

    def send(self, nbytes: float, after: float = 0.0) -> Arrival:
        """Start a transfer, not before `after`."""
        begin = max(self._free_at, self._clock.now, after)
        self._free_at = begin + nbytes / self._bandwidth + self._latency
        if not self._is_apart:
            self._clock.wait_until(self._free_at, self.name)
        return Arrival(self._clock, self._free_at, self.name)


class Arrival(Transfer):
    """A transfer that a line carries: it is there `at` a moment."""

    def __init__(self, clock: Clock, at: float, line: str) -> None:
        self._clock = clock
        self.at = at
        self._line = line

    def wait(self, device: object = None) -> None:
        self._clock.wait_until(self.at, self._line)

    @property
    def is_done(self) -> bool:
        return self._clock.now >= self.at


def arrives_at(transfer: Transfer) -> float:
    """Return the time at which a transfer of a dry run is over; 0 if it is."""
    return transfer.at if isinstance(transfer, Arrival) else 0.0
