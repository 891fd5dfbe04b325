"""Owns `zeroshard.progress`: the progress line and the log of a training run.

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
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from torch import Tensor

from zeroshard.engine.engine import Engine
from zeroshard.engine.progress import StepReport, about, device_name
from zeroshard.errors import UsageError
from zeroshard.observe.display import Display, Row, clock
from zeroshard.observe.memory import peak_nbytes, reserved_nbytes
from zeroshard.observe.monitors import JsonLinesMonitor, Sent, StepFigures
from zeroshard.observe.readings import Readings
from zeroshard.sharding.sharded import Sharded

READ_SECONDS = 0.5
"""The shortest time between two reads of steps' figures during training."""
MEMORY_SECONDS = 5.0
"""The shortest time between two counts of live bytes for the line. A count visits every tensor."""
_MIB = 2**20


def progress(
    trained: Engine | Sharded, *, steps: int | None = None, begin: int = 0, samples: int | None = None,
    tokens: int | None = None, flops: float | None = None, peak_flops: float | None = None,
    log: str | os.PathLike[str] | None = None,
) -> TrainingProgress:  # fmt: skip
    """Show the progress of the loop in a `with` block on rank 0's terminal and log its steps. Every rank must call it.

    The progress is one line on stderr, if stderr is a terminal and ZEROSHARD_PROGRESS is not 0. The line shows step,
    time left, loss, learning rate, norm, samples and tokens per second, MFU, bytes of model states and peak memory.
    Steps do not wait for an accelerator: the line shows metrics once they have arrived. The loss is rank 0's own loss,
    but an engine's log has the mean over ranks.

    Args:
        trained: an engine, which reports its own steps, or the result of `shard`, for which you call `step` after each
            step.
        steps: the number of steps in all, including those before `begin`, to compute the time left.
        begin: the number of steps before this run, if it continues another one. An engine has its own count.
        samples: the number of samples in one step, over all ranks. An engine has its own count.
        tokens: the number of tokens in one sample.
        flops: the FLOPs of one sample, forward and backward; default: for each token, 6 for each trained parameter
            and 4 for each frozen one.
        peak_flops: the peak of one accelerator in FLOPs per second, for MFU; default: the value in
            zeroshard's table for this accelerator and dtype. Without a peak, the line does not show MFU.
        log: a folder in which rank 0 writes each step to `steps.jsonl`, for `zeroshard report`.

    Raises:
        UsageError: an argument has a wrong type or value.
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
    sizes = Sizes(steps, samples, tokens, flops, peak_flops)
    return TrainingProgress(trained, sizes, begin, None if log is None else Path(log))


@dataclass(frozen=True)
class Sizes:
    """The sizes that the caller of `progress` passed."""

    steps: int | None
    samples: int | None
    tokens: int | None
    flops: float | None
    peak_flops: float | None


class TrainingProgress:
    """The progress of a training run: the context manager that `progress` returns."""

    def __init__(self, trained: Engine | Sharded, sizes: Sizes, begin: int, log: Path | None) -> None:
        self._engine: Engine | None = None
        self._steps = begin
        samples = begin * (sizes.samples or 0)
        if isinstance(trained, Engine):
            self._engine = trained
            self._sharded: Sharded = trained._sharded
            self._steps = trained.global_steps
            samples = trained.global_samples
        else:
            self._sharded = trained
        self._sizes = sizes
        self._log = log
        self._display: Display = self._sharded.display
        self._row = TrainingRow(self._sharded, sizes, self._steps, samples, self._display)
        self._readings: Readings[StepFigures] = Readings()
        self._monitor: JsonLinesMonitor | None = None
        self._sent = Sent(self._sharded.comm_report(clear=False))
        self._exits = ExitStack()
        self._is_heard = False
        self._was_entered = False

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            if self._engine is not None:
                exits.enter_context(self._engine._progress.heard_by(self._hear, self._sizes.tokens, self._log))
            elif self._log is not None and self._display.speaks:
                self._monitor = JsonLinesMonitor(self._log, about(self._sharded))
                exits.callback(self._monitor.close)
            self._is_heard = self._display.is_on or self._monitor is not None
            self._read_at = self._arrived_at = monotonic()
            self._arrived_samples = self._row.samples
            exits.enter_context(self._display.shown(self._row, stays=True))
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
        """Wait for the last metrics, show them, and leave the line on the terminal.

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
        if samples is None:
            samples = self._sizes.samples or 0
        losses = []
        if loss is not None:
            losses.append(loss)
        rate = self._sharded.optimizer.param_groups[0].get("lr")  # a tensor is read later, when its copy has arrived
        if rate is None:
            rate = math.nan
        report = StepReport(applied, norm=norm, loss_scale=loss_scale)
        self._hear(report, self._steps + 1, self._row.samples + samples, rate, losses)

    def _hear(
        self, report: StepReport, step: int, samples: int, lr: float | Tensor, losses: Sequence[float | Tensor]
    ) -> None:
        self._steps = step
        self._row.samples = samples
        if not self._is_heard:
            return
        self._row.done = step - 1
        self._row.advance(1)
        if self._monitor is None:
            self._readings.forget_waiting()  # the line shows only the last step
        norm = report.norm
        if norm is None:
            norm = math.nan
        figures = StepFigures(
            step=step,
            samples=samples,
            loss=None,
            lr=math.nan,  # `_read` replaces the values that are NaN here, and the loss
            loss_scale=report.loss_scale,
            grad_norm=math.nan,
            applied=report.applied,
            samples_per_second=math.nan,
        )
        self._readings.add(figures, [*losses, norm, lr])
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
            self._row.loss = sum(losses) if losses else None
            self._row.norm = norm
            self._row.lr = lr
            if self._monitor is None:
                continue
            figures = replace(step, lr=lr, grad_norm=norm, samples_per_second=speed)
            if losses:
                figures = replace(figures, loss=sum(losses))
            if self._sizes.tokens is not None:
                figures = replace(figures, tokens_per_second=speed * self._sizes.tokens)
            if step is last:
                figures = replace(
                    figures,
                    sent=self._sent.take(self._sharded.comm_report(clear=False)),
                    memory=self._sharded.memory_report(),
                    peak=peak_nbytes(self._row.device),
                    reserved=reserved_nbytes(self._row.device),
                )
            self._monitor.write(figures, {})

    def print(self, *values: object) -> None:
        """Print to stdout on rank 0, above the progress line."""
        if self._display.speaks:
            with self._display.above():
                print(*values, flush=True)


class TrainingRow(Row):
    """The progress line of a training run.

    Attributes:
        loss, norm, lr: the latest values that have arrived.
        samples: the samples since the start of the run.
    """

    def __init__(self, sharded: Sharded, sizes: Sizes, begin: int, samples: int, display: Display) -> None:
        super().__init__("", sizes.steps, display, done=begin, delay=0)
        self._sharded = sharded
        self._sizes = sizes
        parameters = list(sharded.model.parameters())
        self.device = parameters[0].device
        self._flops_per_token = sum((6 if one.requires_grad else 4) * one.numel() for one in parameters)
        self.loss: float | None = None
        self.norm = math.nan
        self.lr = math.nan
        self.samples = samples
        self._sampled = deque([(self.since, samples)], maxlen=60)
        self._memory = ""
        self._counted_at = -math.inf
        self._peak_flops = sizes.peak_flops
        if self._peak_flops is None and self.device.type != "cpu":
            from zeroshard.planning.machine import peak_flops_of

            dtype = str(sharded.dtypes.param).removeprefix("torch.")
            self._peak_flops = peak_flops_of(device_name(self.device), dtype)

    def figures(self) -> list[str]:
        parts = [f"step {self.done:.0f}"]
        if self.total is not None:
            parts = [f"step {self.done:.0f}/{self.total:.0f}"]
        if self.done == self.total:
            parts.append(f"in {clock(monotonic() - self.since)}")
        elif self.seconds_left is not None:
            parts.append(f"{clock(self.seconds_left)} left")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        if math.isfinite(self.lr):
            parts.append(f"lr {self.lr:.2e}")
        if not math.isnan(self.norm):
            parts.append(f"norm {self.norm:.3g}")
        now = monotonic()
        if now - self._counted_at >= MEMORY_SECONDS:
            self._counted_at = now
            report = self._sharded.memory_report()
            states = sum(report[kind] for kind in ("parameters", "gradients", "optimizer"))
            self._memory = f"states {_mib(states)}"
            peak = peak_nbytes(self.device)
            if peak:
                self._memory += f", peak {_mib(peak)}"
        return [*parts, *self._throughput(), self._memory]

    def note(self, now: float) -> None:
        super().note(now)
        self._sampled.append((now, self.samples))

    def _throughput(self) -> list[str]:
        then, before = self._sampled[0]
        now, samples = self._sampled[-1]
        if now <= then or samples <= before:
            return []
        speed = (samples - before) / (now - then)
        parts = [f"{_short(speed)} samples/s"]
        tokens = self._sizes.tokens
        flops = self._sizes.flops
        if tokens is not None:
            parts.append(f"{_short(speed * tokens)} tokens/s")
            flops = flops or tokens * self._flops_per_token
        if flops is not None and self._peak_flops is not None:
            ranks = self._sharded._context.everyone.world_size  # ranks that divide tensors compute too
            parts.append(f"MFU {speed * flops / (self._peak_flops * ranks):.1%}")
        return parts


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _mib(nbytes: int) -> str:
    if nbytes < 10_000 * _MIB:
        return f"{nbytes / _MIB:,.0f} MiB"
    return f"{nbytes / _MIB / 1024:,.1f} GiB"
