"""Memory of a process. Its peaks that do not depend on the machine are what torch's CPU allocator has handed out.

A process's resident memory also holds what the C library keeps of freed blocks, and pages of code that ran for the
first time. That differs by megabytes from machine to machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


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
