"""Owns what a run tells of its progress: the loss over ranks, throughput, times by part of the step. Called by engine."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.config.load import Config
from zeroshard.engine.step_report import StepReport
from zeroshard.observe.log import Log, StepFigures
from zeroshard.observe.timers import Timers
from zeroshard.sharded import Sharded


class Progress:
    """Gathers a step's figures, and tells them where the config asks for it."""

    def __init__(self, sharded: Sharded, config: Config, device: torch.device) -> None:
        self._sharded, self._config = sharded, config
        self._log = Log(config.schema, dist.get_rank() if dist.is_initialized() else 0)
        self._timers = Timers(device, enabled=config.schema.wall_clock_breakdown)
        if config.schema.wall_clock_breakdown:
            sharded.measure_waits(self._timers.measure)
        self._losses: list[Tensor] = []
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

    def tell(self, report: StepReport, step: int, samples: int, lr: float) -> None:
        """A step is over. Every rank must call it; `step` and `samples` count since the start."""
        losses, self._losses = self._losses, []
        if not self._log.wants(step):
            return
        # Who differentiates the loss himself keeps it to himself.
        known = [loss.double().cpu().reshape(()) for loss in losses]
        mine = torch.stack(known).mean().reshape(1) if known else torch.full((1,), math.nan, dtype=torch.float64)
        (then, samples_then), now = self._told_at, time.perf_counter()
        steps = max(1, (samples - samples_then) // self._config.batch.train)
        figures = StepFigures(
            step=step,
            samples=samples,
            loss=float(self._sharded.sum_over_ranks(mine)) / self._config.batch.world_size,
            lr=lr,
            loss_scale=report.loss_scale,
            grad_norm=report.grad_norm or 0.0,
            applied=report.applied,
            has_loss=bool(known),
            samples_per_second=(samples - samples_then) / (now - then),
            seconds={part: seconds / steps for part, seconds in self._timers.take().items()},
            sent=self._sharded.comm_report() if self._config.schema.comms_logger.enabled else {},
            memory=self._sharded.memory_report(),
        )
        self._told_at = (now, samples)
        self._log.tell(figures)

    def close(self) -> None:
        """Nothing is told any longer."""
        self._log.close()
