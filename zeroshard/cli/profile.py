"""Owns `zeroshard doctor --profile`: this machine as plans know machines, measured. Called by cli.doctor."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.cli.speeds import measure
from zeroshard.plan.machine import Machine, machines

_ROUNDS = 7
_SMALL = 1000
"""Operations of which the time of one is taken: launching is most of it."""


def measured_machine(name: str, folder: Path | None, nbytes: int) -> dict[str, Any]:
    """What `Machine` takes, measured here; what cannot be (links to other hosts, what is unseen) is that of the nearest known one.

    Args:
        folder: on the disk; None: the disk is not measured.
        nbytes: what is copied, written and read.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    near = machines()["cpu" if accelerator is None else "h100"]
    speeds = measure(folder, nbytes)
    with _threads(1 if accelerator is None else torch.get_num_threads()):  # each CPU is a rank's
        here = _processor(torch.device("cpu"))
    made = near.model_dump(exclude={"name"}) | {
        "device": here if accelerator is None else _processor(accelerator),
        "host": here,
        "host_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if accelerator is None:
        ranks = os.cpu_count() or 1  # that a host has room for
        made |= {"memory": made["host_memory"] // ranks, "accelerators": ranks, "inside": _link()}
    else:
        made |= {"memory": torch.accelerator.get_memory_info()[1], "accelerators": torch.accelerator.device_count()}
    if speeds.to_accelerator and speeds.from_accelerator:
        made["copies"]["bandwidth"] = min(speeds.to_accelerator, speeds.from_accelerator)
    if speeds.disk_write and speeds.disk_read:
        made |= {"disk_write": speeds.disk_write, "disk_read": speeds.disk_read}
    return Machine(**{**made, "name": name}).model_dump(exclude={"name"})


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _processor(device: torch.device) -> dict[str, Any]:
    size = 768 if device.type == "cpu" else 8192
    flops = {}
    for dtype in (torch.float32, torch.bfloat16, *([] if device.type == "cpu" else [torch.float16])):
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
    flops.setdefault("float16", flops["bfloat16"])
    source = torch.ones(1 << (24 if device.type == "cpu" else 28), device=device)
    target = torch.empty_like(source)
    little = torch.ones(16, device=device)

    def many() -> Tensor:
        for _ in range(_SMALL):
            little.add_(1.0)
        return little

    return {
        "flops": flops,
        "memory_bandwidth": 2 * source.nbytes / _seconds(lambda: target.copy_(source), device),
        "launch_seconds": _seconds(many, device) / _SMALL,
    }


def _link() -> dict[str, float]:
    """Between two ranks of this host, as a training's talk: through shared memory where that is to be had."""
    from zeroshard.collectives.choose import create_collectives
    from zeroshard.testing.ranks import run_ranks

    def body(_: int) -> list[float]:
        cpu = torch.device("cpu")
        collectives = create_collectives(None, cpu)
        rows, few = torch.zeros(2, 1 << 21), torch.zeros(2, 16)
        long = _seconds(lambda: collectives.all_gather(rows, 0, "what doctor measures").wait(), cpu)
        short = _seconds(lambda: collectives.all_gather(few, 1, "what doctor measures").wait(), cpu)
        collectives.close()
        return [rows[0].nbytes / long, short]

    bandwidth, latency = run_ranks(body, 2)[0]
    return {"bandwidth": bandwidth, "latency": latency}


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median of a few rounds."""
    taken = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])
