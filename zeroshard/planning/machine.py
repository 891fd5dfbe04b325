"""Owns the model of a machine for dry runs: its speeds, its hidden costs, and the time of operations and transfers.

The numbers are in machines.json. They give the speeds that training reaches, which are below a data sheet's peaks. The
device and the host's CPU compute in turn. Each line (links between ranks, copies to and from CPU memory, the disk) serves
one transfer after another. Operations and waits advance the clock. A transfer does not, so operations may overlap with it.
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

from zeroshard.collectives.base import Work
from zeroshard.errors import UsageError
from zeroshard.storage.transfers import LANDED, Transfer

TABLE = Path(__file__).with_name("machines.json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Processor(_Part):
    """A device that computes, with its memory.

    Attributes:
        flops: floating-point operations per second, by dtype of the operands.
        memory_bandwidth: bytes per second, read and written together.
        launch_seconds: the fixed time of one operation.
        peak_flops: the vendor's floating-point operations per second for dense matrices, by dtype, if they are known.
    """

    flops: dict[str, float]
    memory_bandwidth: float = Field(gt=0)
    launch_seconds: float = Field(ge=0)
    peak_flops: dict[str, float] = {}


class Link(_Part):
    """A link between two places: bytes per second in one direction, and the seconds that an empty transfer takes."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class Unseen(_Part):
    """The memory of an accelerator that its tensors do not take.

    Attributes:
        context: bytes of the driver's context, kernels included.
        collectives: bytes that the communication library allocates.
        workspaces: bytes of cuBLAS and similar libraries.
        fragmentation: memory that the allocator holds and cannot use, as a share of the peak of live bytes.
    """

    context: int = Field(ge=0)
    collectives: int = Field(ge=0)
    workspaces: int = Field(ge=0)
    fragmentation: float = Field(ge=0, lt=1)


class Machine(_Part):
    """A host with its accelerators.

    Attributes:
        memory: bytes of one accelerator.
        accelerators: the number of accelerators in one host.
        host_memory: bytes of one host.
        device, host: the accelerator, and the host's processor.
        inside, between: one rank's links to others of its host, and to other hosts.
        copies: the link between one accelerator and CPU memory.
        disk_write, disk_read: bytes per second of a host's disk, which its ranks share.
        unseen: an accelerator's memory that a dry run does not allocate.
        transport: the transport between ranks: "native" (NCCL and similar) or "gloo".
        computes_on_cpu: whether ranks compute in CPU memory, without an accelerator.
        devices: the names that torch reports for accelerators of this kind.
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
    """Return the known machines, by name."""
    return {
        name: Machine(name=name, **values) for name, values in json.loads(TABLE.read_text(encoding="utf-8")).items()
    }


def peak_flops_of(device: str, dtype: str) -> float | None:
    """Return an accelerator's peak floating-point operations per second in a dtype; None if machines.json lacks it."""
    known = (machine.device.peak_flops.get(dtype) for machine in machines().values() if device in machine.devices)
    return next(known, None)


def machine_of(name: str) -> Machine:
    """Return a known machine, or one from a file written by `zeroshard doctor --profile`. Raise `UsageError` for others."""
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
    """The clock of a dry run.

    Attributes:
        now: the processor's time, in seconds since the run began.
        computed: seconds of operations in a step, by place: "computing" and "CPU step".
        waited: seconds of waiting in a step, by line.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = 0.0
        self.computed: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)

    def operate(self, flops: float, nbytes: int, dtype: str, *, on_host: bool) -> None:
        """Advance by the time of an operation: its launch, and the longer of its arithmetic and its memory traffic."""
        where = self.machine.device
        name = "computing"
        if on_host:
            where = self.machine.host
            name = "CPU step"
        speed = where.flops.get(dtype) or where.flops["float32"]
        seconds = max(flops / speed, nbytes / where.memory_bandwidth) + where.launch_seconds
        self.computed[name] += seconds
        self.now += seconds

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """Count each operation (but no wait) in the context `number` times, for a dry run that leaves out repetitions."""
        before = dict(self.computed)
        yield
        for name, seconds in self.computed.items():
            more = (number - 1) * (seconds - before.get(name, 0.0))
            self.computed[name] += more
            self.now += more

    def wait_until(self, moment: float, line: str) -> None:
        """Advance to the time `moment` unless it has passed, and count the wait for `line`."""
        if moment > self.now:
            self.waited[line] += moment - self.now
            self.now = moment


class Line:
    """A link (network, copies, disk), which carries one transfer after another.

    Args:
        name: the name under which waits are counted.
        is_apart: whether transfers overlap with computation. If not, the processor copies, as between ranks that share
            memory.
    """

    def __init__(self, clock: Clock, name: str, link: Link, *, is_apart: bool = True) -> None:
        self.name = name
        self._clock = clock
        self._link = link
        self._is_apart = is_apart
        self._free_at = 0.0

    def send(self, nbytes: float, after: Transfer = LANDED) -> Arrival:
        """Start a transfer of `nbytes` bytes after the simulated transfer `after`. Unless the line `is_apart`, wait for its end."""
        begin = max(self._free_at, self._clock.now)
        if isinstance(after, Arrival):
            begin = max(begin, after.at)
        self._free_at = begin + nbytes / self._link.bandwidth + self._link.latency
        if not self._is_apart:
            self._clock.wait_until(self._free_at, self.name)
        return Arrival(self._clock, self._free_at, self.name)


class Arrival(Transfer, Work):
    """A transfer on a line, which ends at the time `at`. Storages and collectives both wait for it."""

    def __init__(self, clock: Clock, at: float, line: str) -> None:
        self._clock = clock
        self.at = at
        self._line = line

    def wait(self, device: object = None) -> None:
        self._clock.wait_until(self.at, self._line)

    @property
    def is_done(self) -> bool:
        return self._clock.now >= self.at
