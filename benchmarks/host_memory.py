"""Measures the memory of all of a run's processes together; a page that several ranks map counts once.

A separate control group for the run has the exact bytes that the kernel charged to it, now and at the peak. These
are anonymous and shared memory (each page is charged to the process that touched it first), the kernel's page tables
and buffers, and pages of files that were not cached before. If no control group can be made, a thread samples the
proportional set sizes (anonymous and shared memory) of all the run's processes every few milliseconds. It misses
peaks between two samples.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SAMPLE_SECONDS = 0.005
RESCAN_SECONDS = 0.2
"""The time between two searches for processes, which start and end less often than memory changes."""


class _Files(NamedTuple):
    limit: str
    now: str
    peak: str


V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")
V2 = _Files("memory.max", "memory.current", "memory.peak")
ROOTS = ((Path("/sys/fs/cgroup/memory"), V1), (Path("/sys/fs/cgroup"), V2))


class NoControlGroups(OSError):
    """An error: this process cannot make a control group, which needs rights and the memory controller."""


class ControlGroup:
    """Processes whose memory the kernel counts together. `limit` is the most bytes that they may use."""

    def __init__(self, limit: int | None = None) -> None:
        for folder, self._files in _parents():
            self.path = folder / f"zeroshard-{os.getpid()}-{time.monotonic_ns()}"
            try:
                self.path.mkdir()
                if limit is not None:
                    (self.path / self._files.limit).write_text(str(limit))
                assert self.now + self.peak >= 0  # both can be read
                return
            except OSError:
                self.close()
        raise NoControlGroups("no control group can be made here: run as root, or where you may make them")

    def join(self) -> None:
        """Move the calling process, and its later children, into this group."""
        join(self.path)

    @property
    def now(self) -> int:
        """The bytes in use."""
        return int((self.path / self._files.now).read_text())

    @property
    def peak(self) -> int:
        """The most bytes that were in use."""
        return int((self.path / self._files.peak).read_text())

    def close(self) -> None:
        """Remove the group, whose processes have ended or are about to end."""
        for _ in range(50):
            if not self.path.is_dir():
                return
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.02)


def join(group: Path) -> None:
    """Move the calling process, and its later children, into the control group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


class SampledSession:
    """The peak memory of a session's processes (see setsid), sampled by a thread. It needs no rights."""

    def __init__(self, session: int) -> None:
        self.peak = 0
        self._session, self._over = session, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        members, scanned = list(_members(self._session)), time.monotonic()
        while not self._over.wait(SAMPLE_SECONDS):
            if time.monotonic() > scanned + RESCAN_SECONDS:
                members, scanned = list(_members(self._session)), time.monotonic()
            self.peak = max(self.peak, sum(map(_proportional, members)))

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()


def used_now(group: str | None) -> int:
    """Return the bytes that the calling process's run uses now: its control group or, if there is none, its session."""
    if group is None:
        return sum(map(_proportional, _members(os.getsid(0))))
    return next(int(path.read_text()) for files in (V1, V2) if (path := Path(group, files.now)).exists())


def status(key: str) -> int:
    """Return this process's memory in bytes: VmRSS, or its peak VmHWM. Shared pages count in full."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _parents() -> Iterator[tuple[Path, _Files]]:
    """Return the folders in which a group can be made: below this process's own group, or at the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield ROOTS[0][0] / own.lstrip("/"), V1
        elif not controllers:
            yield ROOTS[1][0] / own.lstrip("/"), V2
    yield from ROOTS


def _members(session: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.getsid(int(entry.name)) == session:
                    yield int(entry.name)


def _proportional(pid: int) -> int:
    """Return the bytes of anonymous and shared memory, with each page divided by the number of processes that map it."""
    with suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return 0
