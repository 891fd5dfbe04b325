"""Owns one run of one system in a child process: its environment, its time limit in seconds, and its peak memory.

A child that fails or hangs is ended with its own children, and reported in one line. The comparison continues without
it. A script that runs itself as a child gets its job from `read_job` and returns its results with `write_result`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from host_memory import ControlGroup, NoControlGroups, SampledSession, join

KEEPS_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""The recommended settings of malloc (glibc) for training on CPUs: freed memory stays with the process, for the next step."""
RETURNS_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}
"""Settings in which every freed block of 64 KiB or more returns to the system, so that a peak counts only live memory.

With 256 KiB, small temporaries fragment the heap. After nine steps, malloc kept 77 MiB (stage 3) and 56 MiB (FSDP2) of
free memory. With 64 KiB, it keeps 2 MiB.
"""
GLOO = {"ZEROSHARD_SHARED_MEMORY": "0"}
"""The setting in which ranks of a host share no memory and send over gloo."""
_OURS = {*KEEPS_PAGES, *RETURNS_PAGES, *GLOO}
_GRACE_SECONDS = 15.0


def run_job(
    script: str, job: dict[str, Any], limit: float, environment: dict[str, str] | None = None, *, memory: bool = False
) -> dict[str, Any] | str:
    """Run `script --job FOLDER` in a child and return its result, or a sentence if there is none.

    Args:
        job: the child's job, as JSON. It also gets "limit", and with `memory` "group": the control group that it is in,
            or None.
        limit: seconds after which the child should end its ranks and report where they hang; somewhat later it is killed.
        environment: variables in addition to this process's, without malloc's settings and the transport's switch.
        memory: whether the result also has "host_peak", the peak bytes of all the child's processes (see host_memory).
    """
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="job") as name:
        folder = Path(name)
        group = None
        if memory:
            with suppress(NoControlGroups):
                group = ControlGroup()
            job = {**job, "group": str(group.path) if group else None}
        job = {**job, "limit": limit}
        (folder / "job.json").write_text(json.dumps(job))
        meter: ControlGroup | SampledSession | None = group
        command = [sys.executable, script, "--job", name]
        with (folder / "said").open("w") as said:
            child = subprocess.Popen(
                command,
                env=without_settings() | {"OMP_NUM_THREADS": "1"} | (environment or {}),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if memory and group is None:
            meter = SampledSession(child.pid)
        try:
            failure = wait(child, limit + _GRACE_SECONDS)
            result = read_result(folder / "result.json", folder / "said", failure)
            if meter is not None and isinstance(result, dict):
                result["host_peak"] = meter.peak
            return result
        finally:
            end(child)
            if meter is not None:
                meter.close()


def _exit(number: int, _: Any) -> None:
    """Exit on SIGTERM as after an exception, so that the script ends its children and removes its control group."""
    raise SystemExit(128 + number)


def without_settings() -> dict[str, str]:
    """Return this process's environment without the variables that a run may set."""
    return {key: value for key, value in os.environ.items() if key not in _OURS}


def wait(child: subprocess.Popen[Any], limit: float) -> str | None:
    """Wait for a child. Return a sentence if it had to be ended."""
    try:
        child.wait(limit)
    except subprocess.TimeoutExpired:
        end(child)
        return f"no result in {limit:.0f} s"
    return None


def end(child: subprocess.Popen[Any]) -> None:
    """End a child, which leads a session, and its remaining children: first by SIGTERM, as launchers end their ranks."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def read_result(result: Path, said: Path, failure: str | None) -> dict[str, Any] | str:
    """Return a child's result, or the reason why there is none, and print the end of its output to stderr."""
    if failure is None and result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    text = said.read_text(errors="replace")
    print(f"{failure or 'a run failed'}; it said:\n{text[-4000:]}", file=sys.stderr)
    errors = [line.strip() for line in text.splitlines() if "Error" in line and "RankError" not in line]
    otherwise = "no result in time" if "hung; its stack:" in text else "it failed"
    return failure or [*errors, otherwise][0][-120:]


def read_job(folder: Path) -> dict[str, Any]:
    """Return the job, in the child. If the caller measures memory, it counts from this call on."""
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    if job.get("group"):
        join(Path(job["group"]))
    return job


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write the result, in the child, whole or not at all."""
    partial = folder / "result.partial"
    partial.write_text(json.dumps(result))
    partial.rename(folder / "result.json")
