"""Memory of a process. Its peaks that do not depend on the machine are what torch's CPU allocator has handed out.

A process's resident memory also holds what the C library keeps of freed blocks, and pages of code that ran for the
first time. That differs by megabytes from machine to machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch


def resident(key: str) -> int:
    """Return bytes of this process that are resident: VmRSS, or VmHWM, their peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


def allocated_peak(work: Callable[[], object]) -> int:
    """Run `work` and return the most bytes that torch's CPU allocator had handed out since it began.

    Memory that torch did not allocate is not counted: mapped files, and messages in shared memory.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    results = profile.profiler.kineto_results
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    )
    live = peak = 0
    for _time, nbytes in changes:
        live += nbytes
        peak = max(peak, live)
    return peak
