"""Owns what a run tells of its progress: the loss over ranks, throughput, times by part of the step. Called by engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.config.load import Config
from zeroshard.engine.step_report import StepReport
from zeroshard.observe.figures import Sent, StepFigures
from zeroshard.observe.log import Log
from zeroshard.observe.memory import peak_nbytes
from zeroshard.observe.monitors import JsonLinesMonitor
from zeroshard.observe.timers import Timers
from zeroshard.sharded import Sharded
from zeroshard.version import __version__


def about(sharded: Sharded) -> dict[str, Any]:
    """What is run, for the first line of its log."""
    parameters = list(sharded.model.parameters())
    places, wire = asdict(sharded.policy), sharded.policy.wire
    return {
        "zeroshard": __version__,
        "torch": torch.__version__,
        "device": device_name(parameters[0].device),
        "world_size": sharded.world_size,
        "parameters": sum(one.numel() for one in parameters),
        "trained": sum(one.numel() for one in parameters if one.requires_grad),
        "dtype": str(sharded.dtypes.param).removeprefix("torch."),
        "policy": {state: places[state] for state in ("parameters", "gradients", "optimizer")},
        **({"rounded on the wire": str(wire)} if wire.is_lossy else {}),
        "formula": sharded.memory_formula(),
    }


def device_name(device: torch.device) -> str:
    """As its maker calls it, where torch knows."""
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


Watcher = Callable[[StepReport, int, int, float, Sequence[Tensor]], None]
"""Hears of each step: its report, its number, the samples since the start, the learning rate, this rank's losses."""


class Progress:
    """Gathers a step's figures, and tells them where the config asks for it.

    Attributes:
        tokens: of one sample, where somebody said so.
    """

    def __init__(self, sharded: Sharded, config: Config, device: torch.device) -> None:
        self._sharded, self._config, self._device = sharded, config, device
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._log = Log(config.schema, rank, lambda: about(sharded), sharded.display)
        self._timers = Timers(device, enabled=config.schema.wall_clock_breakdown)
        if config.schema.wall_clock_breakdown:
            sharded.measure_waits(self._timers.measure)
        self._losses: list[Tensor] = []
        self._sent = Sent(sharded.comm_report(clear=False))  # what was sent before is no step's
        self._watchers: list[Watcher] = []
        self.tokens: int | None = None
        self.start_at(0)

    def measure(self, part: str) -> AbstractContextManager[None]:
        """What runs inside counts as `part` of the step."""
        return self._timers.measure(part)

    def add_loss(self, loss: Tensor) -> None:
        """A microbatch's loss, a scalar without gradient."""
        self._losses.append(loss)

    def forget_losses(self) -> None:
        """The step's microbatches so far are run again."""
        self._losses.clear()

    def start_at(self, samples: int) -> None:
        """Throughput counts from now, when there were so many samples."""
        self._told_at = (time.perf_counter(), samples)

    @contextmanager
    def heard_by(self, watcher: Watcher, tokens: int | None) -> Iterator[None]:
        """Inside, somebody on this rank hears of each step, who may know how many tokens a sample has."""
        before = self.tokens
        self._watchers.append(watcher)
        self.tokens = before if tokens is None else tokens
        try:
            yield
        finally:
            self._watchers.remove(watcher)
            self.tokens = before

    def also_to(self, folder: Path) -> AbstractContextManager[None]:
        """Inside, each step is kept in `folder/steps.jsonl` too. Every rank must call it."""
        return self._log.also(lambda: JsonLinesMonitor(folder, about(self._sharded)))

    def tell(self, report: StepReport, step: int, samples: int, lr: float) -> None:
        """A step is over. Every rank must call it; `step` and `samples` count since the start."""
        losses, self._losses = self._losses, []
        for watcher in self._watchers:
            watcher(report, step, samples, lr, losses)
        if not self._log.wants(step):
            return
        # Who differentiates the loss himself keeps it to himself.
        known = [loss.double().cpu().reshape(()) for loss in losses]
        mine = torch.stack(known).mean().reshape(1) if known else torch.full((1,), math.nan, dtype=torch.float64)
        (then, samples_then), now = self._told_at, time.perf_counter()
        steps = max(1, (samples - samples_then) // self._config.batch.train)
        speed = (samples - samples_then) / (now - then)
        figures = StepFigures(
            step=step,
            samples=samples,
            loss=float(self._sharded.sum_over_ranks(mine)) / self._config.batch.world_size,
            lr=lr,
            loss_scale=report.loss_scale,
            grad_norm=report.grad_norm or 0.0,
            applied=report.applied,
            has_loss=bool(known),
            samples_per_second=speed,
            seconds={part: seconds / steps for part, seconds in self._timers.take().items()},
            sent=self._sent.take(self._sharded.comm_report(clear=False)),
            memory=self._sharded.memory_report(),
            peak=peak_nbytes(self._device),
            tokens_per_second=speed * self.tokens if self.tokens is not None else None,
        )
        self._told_at = (now, samples)
        self._log.tell(figures)

    def close(self) -> None:
        """Nothing is told any longer."""
        self._log.close()
