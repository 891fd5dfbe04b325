"""Owns what a run says of its steps: a printed line, and the monitors. Called by engine after each step, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from zeroshard.config.schema import Schema
from zeroshard.observe.display import Display
from zeroshard.observe.figures import StepFigures
from zeroshard.observe.monitors import Monitor, create_monitors

MIB = 2**20


class Log:
    """Decides which steps are told of, and tells on rank 0.

    Args:
        about: says what is run, for monitors that keep it.
        display: whose lines a printed one must not run into.
    """

    def __init__(self, schema: Schema, rank: int, about: Callable[[], Mapping[str, Any]], display: Display) -> None:
        self._schema, self._rank, self._display = schema, rank, display
        every = schema.steps_per_print
        # The breakdown alone is asked for without an interval: then each step has its line.
        self._every = 1.0 if every is None and (schema.wall_clock_breakdown or schema.memory_breakdown) else every
        self._console = Console(quiet=rank != 0, soft_wrap=True, highlight=False)
        enabled = (schema.json_monitor, schema.csv_monitor, schema.tensorboard, schema.wandb, schema.comet)
        self._monitored = any(block.enabled for block in enabled)
        self._monitors: list[Monitor] = create_monitors(schema, about) if rank == 0 else []

    def prints(self, step: int) -> bool:
        """Whether this step has a line. The same on every rank."""
        return self._every is not None and math.isfinite(self._every) and step % max(1, round(self._every)) == 0

    @contextmanager
    def also(self, make: Callable[[], Monitor]) -> Iterator[None]:
        """Inside there is one monitor more. Every rank must call it: each hands in its part of the loss."""
        before, self._monitored = self._monitored, True
        more = [make()] if self._rank == 0 else []
        self._monitors += more
        try:
            yield
        finally:
            self._monitored = before
            for monitor in more:
                monitor.close()
                if monitor in self._monitors:
                    self._monitors.remove(monitor)

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
        if self._schema.memory_breakdown:
            events |= {f"Train/Samples/memory_bytes_{kind}": value for kind, value in figures.memory.items()}
        if self._schema.comms_logger.enabled:
            events |= {f"Train/Samples/sent_bytes_{kind}": value for kind, value in figures.sent.items()}
        for monitor in self._monitors:
            monitor.write(figures, events)
        if self.prints(figures.step):
            with self._display.above():
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
