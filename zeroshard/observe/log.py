"""Owns what a run says of its steps: a printed line, and the monitors. Called by engine after each step, on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console

from zeroshard.config.schema import Schema
from zeroshard.observe.monitors import Monitor, create_monitors

MIB = 2**20


@dataclass(frozen=True)
class StepFigures:
    """What is known after a step. `seconds`, `sent` and `memory` are this rank's; `loss` is the mean over ranks.

    Attributes:
        has_loss: the backwards were the engine's, which saw the loss.
        samples: since the start.
        samples_per_second: since the last line.
        seconds: by part of the step, for one step.
        sent: bytes by collective since the last line.
        memory: bytes of live storage by model state.
    """

    step: int
    samples: int
    loss: float
    lr: float
    loss_scale: float
    grad_norm: float
    applied: bool
    has_loss: bool
    samples_per_second: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)


class Log:
    """Decides which steps are told of, and tells on rank 0."""

    def __init__(self, schema: Schema, rank: int) -> None:
        self._schema = schema
        every = schema.steps_per_print
        # The breakdown alone is asked for without an interval: then each step has its line.
        self._every = 1.0 if every is None and (schema.wall_clock_breakdown or schema.memory_breakdown) else every
        self._console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)
        enabled = (schema.csv_monitor, schema.tensorboard, schema.wandb, schema.comet)
        self._monitored = any(block.enabled for block in enabled)
        self._monitors: list[Monitor] = create_monitors(schema) if rank == 0 else []

    def prints(self, step: int) -> bool:
        """Whether this step has a line. The same on every rank."""
        return self._every is not None and math.isfinite(self._every) and step % max(1, round(self._every)) == 0

    def wants(self, step: int) -> bool:
        """Whether anybody wants to hear of this step. The same on every rank."""
        return self._monitored or self.prints(step)

    def tell(self, figures: StepFigures) -> None:
        """Print the line, where this step has one, and hand the figures to the monitors."""
        events = {
            **({"Train/Samples/train_loss": figures.loss} if figures.has_loss else {}),
            "Train/Samples/lr": figures.lr,
            "Train/Samples/loss_scale": figures.loss_scale,
            "Train/Samples/grad_norm": figures.grad_norm,
        }
        events |= {f"Train/Samples/elapsed_time_ms_{part}": 1e3 * value for part, value in figures.seconds.items()}
        for monitor in self._monitors:
            monitor.write(events, figures.samples)
        if self.prints(figures.step):
            self._console.print(self._line(figures), markup=False)

    def _line(self, figures: StepFigures) -> str:
        parts = [
            f"step {figures.step}",
            f"loss {figures.loss:.4f}" if figures.has_loss else "loss unknown",
            f"lr {figures.lr:.3e}",
            f"loss scale {figures.loss_scale:g}",
            f"|g| {figures.grad_norm:.4g}" + ("" if figures.applied else " (skipped)"),
            f"{figures.samples_per_second:.1f} samples/s",
            f"memory {sum(figures.memory.values()) / MIB:.1f} MiB",
        ]
        if self._schema.memory_breakdown:
            parts.append("MiB: " + ", ".join(f"{kind} {value / MIB:.1f}" for kind, value in figures.memory.items()))
        if self._schema.wall_clock_breakdown:
            parts.append("ms: " + ", ".join(f"{part} {1e3 * value:.1f}" for part, value in figures.seconds.items()))
        if self._schema.comms_logger.enabled:
            parts.append("sent MiB: " + ", ".join(f"{kind} {value / MIB:.1f}" for kind, value in figures.sent.items()))
        return "  ".join(parts)

    def close(self) -> None:
        """The run is over."""
        for monitor in self._monitors:
            monitor.close()
        self._monitors.clear()
