"""Owns where `make accelerator` runs: the accelerator or the pretended one, its backend, and the sizes that fit."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.testing.gpt import GPTConfig


@dataclass(frozen=True)
class Setting:
    """See the module's docstring.

    Attributes:
        name, version: of the device and of torch, for people.
        backend: the accelerator's own.
        small, medium, large: models for correctness, for speed, for memory.
        width: of the models that are made to fill the memory.
        memory: bytes of the device.
        batch: sequences of a microbatch.
        rounds, steps: of a measurement.
    """

    device: torch.device
    name: str
    version: str
    backend: str
    small: GPTConfig
    medium: GPTConfig
    large: GPTConfig
    width: int
    memory: int
    batch: int
    rounds: int
    steps: int
    rehearse: bool

    @classmethod
    def make(cls, *, rehearse: bool) -> Setting:
        """Look for the accelerator.

        Raises:
            SystemExit: there is none.
        """
        if rehearse:
            pretend()
            small, medium, large = (GPTConfig(layers=layers, width=32, heads=2, context=16) for layers in (2, 3, 4))
            return cls(
                torch.device("simgpu", 0), "a pretended accelerator", torch.__version__, "simccl", small, medium, large, 32, 1 << 21,
                2, 2, 1, True,
            )  # fmt: skip
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            raise SystemExit("there is no accelerator here. --rehearse runs everything, tiny, on a pretended one.")
        module = torch.get_device_module(accelerator)
        small = GPTConfig(layers=4, width=256, heads=4, context=128)
        medium = GPTConfig(layers=24, width=1024, heads=16, context=1024)
        large = GPTConfig(layers=24, width=2112, heads=16, context=1024)  # 1.3 B
        return cls(
            torch.device(accelerator.type, 0), str(module.get_device_name(0)), torch.__version__,
            dist.get_default_backend_for_device(accelerator), small, medium, large, 4096, int(module.mem_get_info()[1]), 8, 5, 4, False,
        )  # fmt: skip

    def alone(self) -> None:
        """Join a group of one rank, over the accelerator's own backend."""
        if not dist.is_initialized():
            path = Path(tempfile.mkdtemp(prefix="group")) / "store"
            dist.init_process_group(self.backend, init_method=f"file://{path}", rank=0, world_size=1)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of `work`, until the device has done it."""
        torch.accelerator.synchronize()
        start = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        return time.perf_counter() - start


def pretend() -> None:
    """Make the pretended accelerator of the tests known to torch, in this process."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from simgpu import device, simccl  # type: ignore[import-not-found, unused-ignore]

    device.load()
    simccl.register()
    device.set_mode(os.environ.get("SIMGPU_MODE", "at once"))
