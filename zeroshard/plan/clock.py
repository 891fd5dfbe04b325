"""Owns the time of a dry run: what operations, links and disks take on a machine, and who waits for what. Called by the ledger and
the pretended members.

One processor computes; every line (links between ranks, copies to and from CPU memory, the disk) serves one transfer after
another beside it. Who waits moves the clock: so what overlaps is what the schedule lets overlap.
"""

from __future__ import annotations

from collections import defaultdict

from zeroshard.plan.machine import Machine
from zeroshard.storage.transfers import Transfer


class Clock:
    """Seconds since the dry run began.

    Attributes:
        now: of the processor.
        computed: seconds of operations, by place: "computing" and "CPU step".
        waited: seconds of waiting, by line.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.now = machine, 0.0
        self.computed: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)

    def operate(self, flops: float, nbytes: int, dtype: str, *, on_host: bool) -> None:
        """An operation runs: as long as its arithmetic or its bytes take, whichever is more."""
        where = self.machine.host if on_host else self.machine.device
        seconds = max(flops / where.flops_of(dtype), nbytes / where.memory_bandwidth) + where.launch_seconds
        self.computed["CPU step" if on_host else "computing"] += seconds
        self.now += seconds

    def wait_until(self, moment: float, line: str) -> None:
        """What comes next needs what arrives then."""
        if moment > self.now:
            self.waited[line] += moment - self.now
            self.now = moment

    def reset(self) -> None:
        """Another step begins: what was spent so far counts no longer."""
        self.computed.clear()
        self.waited.clear()


class Line:
    """One thing that carries bytes. `bandwidth` in bytes a second.

    Args:
        is_apart: it carries beside the computation; else the processor does, as where ranks copy through memory that they share.
    """

    def __init__(self, clock: Clock, name: str, bandwidth: float, latency: float, *, is_apart: bool = True) -> None:
        self._clock, self.name, self._bandwidth, self._latency = clock, name, bandwidth, latency
        self._is_apart, self._free_at = is_apart, 0.0

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
        self._clock, self.at, self._line = clock, at, line

    def wait(self, device: object = None) -> None:
        self._clock.wait_until(self.at, self._line)

    @property
    def is_done(self) -> bool:
        return self._clock.now >= self.at


def arrives_at(transfer: Transfer) -> float:
    """When a transfer of a dry run is over; 0 for one that is."""
    return transfer.at if isinstance(transfer, Arrival) else 0.0
