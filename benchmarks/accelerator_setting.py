"""Owns the setting of `make accelerator`: the real or simulated accelerator, its backend, its time, and sizes that fit."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerator_models import SHAPES, Shape

from zeroshard.testing.gpt import GPTConfig

GIB = 1 << 30


@dataclass(frozen=True)
class Setting:
    """The setting of a part: its device, backend, time and sizes.

    Attributes:
        name, version: the device's name and torch's version, to print.
        backend: the accelerator's own torch.distributed backend.
        out: the folder for traces.
        end: the end of the part's time, by `time.monotonic`.
        small: the model for the checks of results.
        rehearse: whether to run tiny versions on the simulated accelerator.
        rows: the rows of the part `offload` to run, counted from 1; empty for all.
    """

    device: torch.device
    name: str
    version: str
    backend: str
    out: Path
    end: float
    small: GPTConfig
    rehearse: bool
    rows: Sequence[int] = ()

    @classmethod
    def make(cls, out: Path, end: float, *, rehearse: bool, rows: Sequence[int] = ()) -> Setting:
        """Return the setting for this machine's accelerator.

        Args:
            end: the end of the part's time, by `time.monotonic`, a clock that all processes of a host share.

        Raises:
            SystemExit: there is no accelerator.
        """
        if rehearse:
            simulate()
            small = GPTConfig(layers=2, width=32, heads=2, context=16)
            device = torch.device("simgpu", 0)
            return cls(device, "a simulated accelerator", torch.__version__, "simccl", out, end, small, True, rows)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise SystemExit("there is no accelerator here. --rehearse runs everything, tiny, on a simulated one.")
        name = str(torch.get_device_module(accelerator).get_device_name(0))
        backend = dist.get_default_backend_for_device(accelerator)
        small = GPTConfig(layers=4, width=256, heads=4, context=128)
        device = torch.device(accelerator.type, 0)
        return cls(device, name, torch.__version__, backend, out, end, small, False, rows)

    @property
    def left(self) -> float:
        """The seconds that are left of the part's time."""
        return self.end - time.monotonic()

    def shape(self, name: str) -> Shape:
        """Return the sizes of a Llama by its number of parameters; tiny ones in a rehearsal."""
        return SHAPES["tiny" if self.rehearse else name]

    def tokens(self, batch: int, length: int) -> tuple[int, int]:
        """Return the number of sequences and their length; tiny ones in a rehearsal."""
        return (2, 8) if self.rehearse else (batch, length)

    def alone(self) -> None:
        """Join a group of one rank, over the accelerator's own backend."""
        if not dist.is_initialized():
            path = Path(tempfile.mkdtemp(prefix="group")) / "store"
            dist.init_process_group(self.backend, init_method=f"file://{path}", rank=0, world_size=1)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds that `work` takes, until the device has finished it."""
        torch.accelerator.synchronize()
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        return time.perf_counter() - start


def simulate() -> None:
    """Register the simulated accelerator of the tests with torch, in this process."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from simgpu import device, simccl  # type: ignore[import-not-found, unused-ignore]

    device.load()
    simccl.register()
    device.set_mode(os.environ.get("SIMGPU_MODE", "at once"))


def host_memory_available() -> int:
    """Return the bytes that the host can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
