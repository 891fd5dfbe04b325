"""Owns `zeroshard.progress`: the progress bar and the log of a training run.

with zeroshard.progress(engine, steps=1000, tokens=2048):  # the engine supplies the rest
    for batch in data: ...

with zeroshard.progress(sharded, steps=1000, samples=64, log="runs/a") as progress:
    for batch in data:
        ...
        progress.step(loss, norm)
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from numbers import Real
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from zeroshard.checkpoint.display import ProgressRow
from zeroshard.engine.config.load import load_monitors
from zeroshard.engine.config.schema import Schema
from zeroshard.engine.engine import Engine
from zeroshard.engine.monitors import JsonLinesMonitor, Monitor, Sent, StepFigures, events_of
from zeroshard.engine.progress import StepReport, about, monitors_of
from zeroshard.engine.readings import Readings
from zeroshard.errors import UsageError
from zeroshard.model.memory import peak_nbytes, reserved_nbytes
from zeroshard.model.sharded import Sharded

READ_SECONDS = 0.5
"""The shortest time between two reads of steps' figures during training."""
PLAIN_SECONDS = 30.0
"""The shortest time between two lines on stderr if it is not a terminal."""


def progress(
    trained: Engine | Sharded, *, steps: int | None = None, begin: int = 0, samples: int | None = None,
    tokens: int | None = None, flops: float | None = None, peak_flops: float | None = None,
    log: str | os.PathLike[str] | None = None, monitors: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> TrainingProgress:  # fmt: skip
    """Show the progress of the loop in a `with` block on rank 0's stderr and log its steps. Every rank must call it.

    A terminal shows a bar with step, time left, loss, learning rate, norm, throughput, MFU and peak memory. Other outputs get a
    line every 30 seconds. ZEROSHARD_PROGRESS=0 turns both off. Steps do not wait for an accelerator: metrics appear once they
    have arrived. The loss is rank 0's own loss, but an engine's log has the mean over ranks.

    Args:
        trained: an engine, which reports its own steps, or the result of `shard`, for which you call `step` after each
            step.
        steps: the number of steps in all, including those before `begin`, to compute the time left.
        begin: the number of steps before this run, if it continues another one. An engine has its own count.
        samples: the number of samples in one step, over all ranks. An engine has its own count.
        tokens: the number of tokens in one sample.
        flops: the FLOPs of one sample, forward and backward; default: for each token, 6 for each trained parameter
            and 4 for each frozen one.
        peak_flops: the peak of one accelerator in FLOPs per second, to show MFU.
        log: a folder in which rank 0 writes each step to `steps.jsonl`, for `zeroshard report`.
        monitors: a config, or a dict of its blocks for monitors, such as `{"tensorboard": {"output_path": "runs"}}`. Rank 0 writes
            each step to the monitors that are enabled; a block without `enabled` counts as enabled. All other keys are ignored.

    Raises:
        UsageError: an argument has a wrong type or value.
        ConfigError: a block of `monitors` is wrong, or its package is missing.
    """
    if not isinstance(trained, Engine | Sharded):
        raise UsageError(
            f"progress() cannot show a {type(trained).__name__}. Pass the engine, or the result of zeroshard.shard()."
        )
    for name, number in (("steps", steps), ("begin", begin), ("samples", samples), ("tokens", tokens)):
        if number is not None and not (isinstance(number, Real) and float(number) >= 0):
            raise UsageError(f"progress({name}={number!r}): pass a number, 0 or more.")
    for name, rate in (("flops", flops), ("peak_flops", peak_flops)):
        if rate is not None and not (isinstance(rate, Real) and float(rate) > 0):
            raise UsageError(f"progress({name}={rate!r}): pass a number, more than 0.")
    return TrainingProgress(
        trained, steps, begin, samples, tokens, flops, peak_flops, None if log is None else Path(log),
        load_monitors({} if monitors is None else monitors),
    )  # fmt: skip


class TrainingProgress:
    """The progress of a training run: the context manager that `progress` returns."""

    def __init__(
        self, trained: Engine | Sharded, steps: int | None, begin: int, samples: int | None, tokens: int | None,
        flops: float | None, peak_flops: float | None, log: Path | None, monitors: Schema,
    ) -> None:  # fmt: skip
        self._engine = trained if isinstance(trained, Engine) else None
        self._sharded = trained._sharded if isinstance(trained, Engine) else trained
        self._samples_per_step = samples or 0
        self._steps = begin if self._engine is None else self._engine.global_steps
        self._samples = begin * (samples or 0) if self._engine is None else self._engine.global_samples
        self._tokens = tokens
        parameters = list(self._sharded.model.parameters())
        self._device = parameters[0].device
        if flops is None and tokens is not None:
            flops = tokens * sum((6 if one.requires_grad else 4) * one.numel() for one in parameters)
        self._mfu_per_speed: float | None = None
        if flops is not None and peak_flops is not None:  # ranks that divide tensors compute too
            self._mfu_per_speed = flops / (peak_flops * self._sharded._context.everyone.world_size)
        self._log = log
        self._schema = monitors
        self._display = self._sharded.display
        self._row = ProgressRow("", steps, self._display, done=self._steps, stays=True)
        self._readings: Readings[StepFigures] = Readings()
        self._monitors: list[Monitor] = []
        self._sent = Sent(self._sharded.comm_report(clear=False))
        self._exits = ExitStack()
        self._is_heard = False
        self._was_entered = False

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            if self._engine is not None:
                exits.enter_context(self._engine._progress.heard_by(self._hear, self._tokens, self._log, self._schema))
            else:
                self._monitors = monitors_of(self._schema, self._sharded, {})
                if self._log is not None and self._display.speaks:
                    self._monitors.append(JsonLinesMonitor(self._log, about(self._sharded)))
                for monitor in self._monitors:
                    exits.callback(monitor.close)
            self._is_heard = self._display.is_wanted or bool(self._monitors)
            self._read_at = self._arrived_at = self._told_at = monotonic()
            self._arrived_samples = self._samples
            exits.enter_context(self._display.shown(self._row))
            self._exits = exits.pop_all()
            self._was_entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
            return
        with self._exits, suppress(RuntimeError):  # a failed device may raise here too: the first error matters
            if self._is_heard:
                self._read()

    def stop(self) -> None:
        """Wait for the last metrics, show them, and leave the bar on the terminal.

        The `with` block calls this method at its end, unless an exception ends the block.
        """
        with self._exits:
            if self._is_heard:
                self._is_heard = False
                self._read(wait=True)

    def step(
        self, loss: float | Tensor | None = None, norm: float | Tensor | None = None, *, samples: int | None = None,
        loss_scale: float = 1.0, applied: bool = True,
    ) -> None:  # fmt: skip
        """Report a step of a loop over `shard`, without waiting for an accelerator.

        Args:
            loss: the step's loss on this rank. If it is a tensor, do not write to it afterwards.
            norm: the result of `clip_grad_norm_`.
            samples: the number of samples in this step over all ranks, if it differs from step to step.
            loss_scale: the factor by which the loss was multiplied before the backward.
            applied: whether the step updated the parameters.

        Raises:
            UsageError: the loop has an engine, which reports its own steps; the call is before the `with` block; or
                `loss` or `norm` is not a single number.
        """
        if self._engine is not None:
            raise UsageError(
                "progress.step() was called with an engine, whose engine.step() reports each step. Leave the call out."
            )
        if not self._was_entered:
            raise UsageError(
                "progress.step() was called outside of `with zeroshard.progress(...) as progress:`, where nothing is "
                "shown or logged. Call it inside."
            )
        for name, given in (("loss", loss), ("norm", norm)):
            if isinstance(given, Tensor) and given.numel() != 1:
                raise UsageError(
                    f"progress.step() got a {name} of shape {tuple(given.shape)}, not a single number. Pass its mean."
                )
        rate = self._sharded.optimizer.param_groups[0].get("lr")  # a tensor is read later, when its copy has arrived
        samples = self._samples + (self._samples_per_step if samples is None else samples)
        report = StepReport(applied, norm=norm, loss_scale=loss_scale)
        self._hear(report, self._steps + 1, samples, math.nan if rate is None else rate, [] if loss is None else [loss])

    def _hear(
        self, report: StepReport, step: int, samples: int, lr: float | Tensor, losses: Sequence[float | Tensor]
    ) -> None:
        self._steps = step
        self._samples = samples
        if not self._is_heard:
            return
        self._row.done = step
        self._display.refresh()
        figures = StepFigures(
            step=step, samples=samples, loss=None, lr=math.nan, loss_scale=report.loss_scale, grad_norm=math.nan,
            applied=report.applied, samples_per_second=math.nan,
        )  # fmt: skip
        norm = math.nan if report.norm is None else report.norm
        self._readings.add(figures, [*losses, norm, lr], only_last=not self._monitors)
        if monotonic() - self._read_at >= READ_SECONDS:
            self._read()

    def _read(self, *, wait: bool = False) -> None:
        """Show and log the metrics whose copies from the device are complete; with `wait`, all of them.

        Only the last step gets memory metrics, and the bytes sent since the last read.
        """
        self._read_at = monotonic()
        arrived = self._readings.take(wait=wait)
        if not arrived:
            return
        last = arrived[-1][0]
        speed = (last.samples - self._arrived_samples) / max(self._read_at - self._arrived_at, 1e-9)
        self._arrived_at = self._read_at
        self._arrived_samples = last.samples
        for step, (*losses, norm, lr) in arrived:
            figures = replace(
                step, loss=sum(losses) if losses else None, lr=lr, grad_norm=norm, samples_per_second=speed
            )
            if self._tokens is not None:
                figures = replace(figures, tokens_per_second=speed * self._tokens)
            if step is last:
                figures = replace(figures, peak=peak_nbytes(self._device), reserved=reserved_nbytes(self._device))
                self._show(figures)
            if self._monitors and step is last:
                sent = self._sent.take(self._sharded.comm_report(clear=False))
                figures = replace(figures, sent=sent, memory=self._sharded.memory_report())
            known = {name: value for name, value in events_of(figures).items() if not math.isnan(value)}
            for monitor in self._monitors:
                monitor.write(figures, known)

    def _show(self, figures: StepFigures) -> None:
        """Put a step's figures behind the bar, or print them now and then if stderr is not a terminal."""
        speed = figures.samples_per_second
        columns = []
        if figures.loss is not None:
            columns.append(f"loss {figures.loss:.4g}")
        if speed > 0 and figures.tokens_per_second is not None:
            columns.append(f"{_short(figures.tokens_per_second)} tokens/s")
        if figures.peak:
            columns.append(f"peak {figures.peak / 2**20:,.0f} MiB")
        if speed > 0 and self._mfu_per_speed is not None:
            columns.append(f"MFU {speed * self._mfu_per_speed:.1%}")
        if not math.isnan(figures.lr):
            columns.append(f"lr {figures.lr:.2e}")
        if not math.isnan(figures.grad_norm):
            columns.append(f"norm {figures.grad_norm:.3g}")
        if speed > 0:
            columns.append(f"{_short(speed)} samples/s")
        self._row.columns = columns
        if self._display.is_wanted and not self._display.is_on and self._read_at - self._told_at >= PLAIN_SECONDS:
            self._told_at = self._read_at
            total = "" if self._row.total is None else f"/{self._row.total:.0f}"
            print(f"step {figures.step}{total}", *columns, sep="  ", file=sys.stderr, flush=True)

    def print(self, *values: object) -> None:
        """Print to stdout on rank 0, above the progress bar."""
        if self._display.speaks:
            print(*values, flush=True)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
