"""Owns what is told when a wait for other ranks failed: what each rank waited for. Called by grouped."""

from __future__ import annotations

import json
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

_REPORT_SECONDS = 5.0


def describe_failure(
    store: Store, rank: int, world_size: int, label: str, timeout: timedelta, error: RuntimeError
) -> str:
    """Say what every rank was doing. A failed wait closes gloo's connections, so all blocked ranks get here."""
    store.set(f"stuck/{rank}", json.dumps({"label": label}))
    others = [other for other in range(world_size) if other != rank]
    deadline = time.monotonic() + _REPORT_SECONDS
    doing: dict[int, str] = {}
    while len(doing) < len(others) and time.monotonic() < deadline:
        for other in others:
            if other not in doing and store.check([f"stuck/{other}"]):
                doing[other] = json.loads(store.get(f"stuck/{other}"))["label"]
        time.sleep(0.05)
    lines = [f"rank {rank} waited for {label}"]
    for other in others:
        lines.append(
            f"rank {other} waited for {doing[other]}"
            if other in doing
            else f"rank {other} was not waiting for any rank (dead, finished, or still in other code)"
        )
    return (
        f"the ranks no longer do the same thing, or one of them is gone (timeout {timeout}):\n  "
        + "\n  ".join(lines)
        + "\nEvery rank must run the same units in the same order, and take the same number of microbatches and "
        "steps. Declare a module that runs only a part of itself, by its input, as a leaf: Units(leaf_classes=...), or "
        f"zero_optimization.leaf_module in a config. The backend said: {str(error).splitlines()[0]}"
    )
