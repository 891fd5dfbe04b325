"""Owns `zeroshard.progress`: the line that a training shows while it runs, and the log that it keeps. Called by users.

with zeroshard.progress(engine, steps=1000, tokens=2048):  # the engine says the rest
    for batch in data: ...

with zeroshard.progress(sharded, steps=1000, samples=64, log="runs/a") as progress:
    for batch in data:
        ...
        progress.step(loss, norm)
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from zeroshard.engine.engine import Engine
from zeroshard.engine.progress import about, device_name
from zeroshard.engine.step_report import StepReport
from zeroshard.errors import UsageError
from zeroshard.observe.display import Display, Row, clock
from zeroshard.observe.figures import Sent, StepFigures
from zeroshard.observe.memory import peak_nbytes
from zeroshard.observe.monitors import JsonLinesMonitor
from zeroshard.observe.readings import Readings
from zeroshard.sharded import Sharded

READ_SECONDS = 0.5
"""Between two looks at what steps came to."""
MEMORY_SECONDS = 5.0
"""Between two counts of live bytes, which look at every tensor."""
_MIB = 2**20


def progress(
    trained: Engine | Sharded,
    *,
    steps: int | None = None,
    begin: int = 0,
    samples: int | None = None,
    tokens: int | None = None,
    flops: float | None = None,
    peak_flops: float | None = None,
    log: str | os.PathLike[str] | None = None,
) -> TrainingProgress:
    """Show a training on rank 0's terminal while the loop inside runs, and keep a log of it. Every rank must call it.

    One line on stderr, and none where that is no terminal, or ZEROSHARD_PROGRESS is 0: step, time left, loss, learning rate, norm,
    samples and tokens a second, MFU, bytes of model states and the peak. No step waits for an accelerator: figures are read when
    they have arrived.

    Args:
        trained: an engine, which says by itself what its steps come to; or what `shard` returned: then call `step` after each.
        steps: of the whole training, those before `begin` included: for the time that is left.
        begin: steps that were made before, by a run that is continued. An engine knows.
        samples: of one step, over all ranks. An engine knows.
        tokens: of one sample.
        flops: of one sample, forward and backward. Default: 6 for each trained parameter and token, 4 for each frozen one.
        peak_flops: what one accelerator does at most in a second, for MFU. Default: what `zeroshard plan` knows of the device.
        log: a folder, where rank 0 keeps each step in `steps.jsonl`, for `zeroshard report`.

    Raises:
        UsageError: an argument is none of these.
    """
    if not isinstance(trained, Engine | Sharded):
        raise UsageError(
            f"progress() of a {type(trained).__name__}: give it the engine, or what zeroshard.shard() returned."
        )
    _check_numbers({"steps": steps, "begin": begin, "samples": samples, "tokens": tokens})
    _check_numbers({"flops": flops, "peak_flops": peak_flops}, zero=False)
    return TrainingProgress(
        trained,
        Sizes(steps, samples, tokens, flops, peak_flops),
        trained.global_steps if isinstance(trained, Engine) else begin,
        None if log is None else Path(log),
    )


def _check_numbers(told: Mapping[str, object], *, zero: bool = True) -> None:
    for name, number in told.items():
        if number is None or (isinstance(number, Real) and (float(number) >= 0 if zero else float(number) > 0)):
            continue
        raise UsageError(f"progress({name}={number!r}): it is a number, {'0 or more' if zero else 'more than 0'}.")


@dataclass(frozen=True)
class Sizes:
    """What the caller says of a training, see `progress`."""

    steps: int | None
    samples: int | None
    tokens: int | None
    flops: float | None
    peak_flops: float | None


@dataclass(frozen=True)
class _Step:
    """What is known of a step at once; its other figures arrive."""

    number: int
    samples: int
    at: float
    loss_scale: float
    applied: bool
    losses: int


class TrainingProgress:
    """A context manager, see `progress`."""

    def __init__(self, trained: Engine | Sharded, sizes: Sizes, begin: int, log: Path | None) -> None:
        self._engine = trained if isinstance(trained, Engine) else None
        self._sharded: Sharded = trained._sharded if isinstance(trained, Engine) else trained
        self._sizes, self._log = sizes, log
        self._display: Display = self._sharded.display
        self._steps = begin
        self._samples = trained.global_samples if isinstance(trained, Engine) else begin * (sizes.samples or 0)
        self._row = TrainingRow(self._sharded, sizes, begin, self._samples, self._display)
        self._readings: Readings[_Step] = Readings()
        self._monitor: JsonLinesMonitor | None = None
        self._sent = Sent(self._sharded.comm_report(clear=False))
        self._exits = ExitStack()
        self._is_heard = self._was_entered = False

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            if self._engine is not None:
                exits.enter_context(self._engine._progress.heard_by(self._hear, self._sizes.tokens))
                if self._log is not None:
                    exits.enter_context(self._engine._progress.also_to(self._log))
            elif self._log is not None and self._display.speaks:
                self._monitor = JsonLinesMonitor(self._log, about(self._sharded))
                exits.callback(self._monitor.close)
            self._is_heard = self._display.is_on or self._monitor is not None
            self._read_at = self._told_at = monotonic()
            self._told_samples = self._samples
            exits.enter_context(self._display.shown(self._row, stays=True))
            self._exits, self._was_entered = exits.pop_all(), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
            return
        with self._exits, suppress(RuntimeError):  # of a device that failed: the first error is what matters
            if self._is_heard:
                self._read()

    def stop(self) -> None:
        """Tell what is not told yet, and leave the line as it is. At the end of the `with` this is done by itself."""
        with self._exits:
            if self._is_heard:
                self._is_heard = False
                self._read(wait=True)

    def step(
        self,
        loss: float | Tensor | None = None,
        norm: float | Tensor | None = None,
        *,
        samples: int | None = None,
        loss_scale: float = 1.0,
        applied: bool = True,
    ) -> None:
        """A step of a loop over `shard` is over. Nobody waits for an accelerator.

        Args:
            loss: of the step, on this rank; a tensor must not be written to afterwards.
            norm: what `clip_grad_norm_` returned.
            samples: of this step over all ranks, where steps differ.
            loss_scale: what the loss was multiplied by.
            applied: whether the parameters were updated.

        Raises:
            UsageError: an engine trains, which counts its steps itself; the loop is in no `with`; the loss is no single number.
        """
        if self._engine is not None:
            raise UsageError("progress.step() with an engine: engine.step() says what there is to say. Leave it out.")
        if not self._was_entered:
            raise UsageError(
                "progress.step() outside of `with zeroshard.progress(...) as progress:`: nothing is shown or kept."
            )
        for name, told in (("loss", loss), ("norm", norm)):
            if isinstance(told, Tensor) and told.numel() != 1:
                raise UsageError(
                    f"progress.step() with a {name} of shape {tuple(told.shape)}: a step has one. Take its mean."
                )
        self._samples += samples if samples is not None else self._sizes.samples or 0
        losses = [] if loss is None else [loss.detach() if isinstance(loss, Tensor) else loss]
        rate = self._sharded.optimizer.param_groups[0]["lr"]
        self._take(losses, math.nan if norm is None else norm, rate, loss_scale, applied)

    def _hear(self, report: StepReport, step: int, samples: int, lr: float, losses: Sequence[Tensor]) -> None:
        self._steps, self._samples = step - 1, samples
        norm = math.nan if report.grad_norm is None else report.grad_norm
        self._take(losses, norm, lr, report.loss_scale, report.applied)

    def _take(
        self,
        losses: Sequence[float | Tensor],
        norm: float | Tensor,
        lr: float | Tensor,
        loss_scale: float,
        applied: bool,
    ) -> None:
        self._steps += 1
        if not self._is_heard:
            return
        self._row.samples, self._row.done = self._samples, self._steps - 1
        self._row.advance(1)
        if self._monitor is None:
            self._readings.forget_waiting()  # the line shows the last alone
        step = _Step(self._steps, self._samples, time.time(), loss_scale, applied, len(losses))
        self._readings.add(step, [*losses, norm, lr])
        if monotonic() - self._read_at >= READ_SECONDS:
            self._read()

    def _read(self, *, wait: bool = False) -> None:
        self._read_at = monotonic()
        arrived = self._readings.take(wait=wait)
        if not arrived:
            return
        seconds = max(self._read_at - self._told_at, 1e-9)
        speed = (arrived[-1][0].samples - self._told_samples) / seconds
        self._told_at, self._told_samples = self._read_at, arrived[-1][0].samples
        for step, numbers in arrived:
            *losses, norm, lr = numbers
            loss = sum(losses) / len(losses) if losses else math.nan
            self._row.loss, self._row.norm, self._row.lr = loss if losses else None, norm, lr
            if self._monitor is not None:
                last = step is arrived[-1][0]
                self._monitor.write(self._figures(step, loss, norm, lr, speed, complete=last), {})

    def _figures(
        self, step: _Step, loss: float, norm: float, lr: float, speed: float, *, complete: bool
    ) -> StepFigures:
        """What is counted since the last look, and memory, stand with the last step that arrived."""
        more: dict[str, Any] = {}
        if complete:
            more = {
                "sent": self._sent.take(self._sharded.comm_report(clear=False)),
                "memory": self._sharded.memory_report(),
                "peak": peak_nbytes(self._row.device),
            }
        return StepFigures(
            step=step.number,
            samples=step.samples,
            loss=loss,
            lr=lr,
            loss_scale=step.loss_scale,
            grad_norm=norm,
            applied=step.applied,
            has_loss=step.losses > 0,
            samples_per_second=speed,
            tokens_per_second=speed * self._sizes.tokens if self._sizes.tokens is not None else None,
            at=step.at,
            **more,
        )

    def print(self, *values: object) -> None:
        """Print on rank 0, on stdout, above the line."""
        if self._display.speaks:
            with self._display.above():
                print(*values, flush=True)


class TrainingRow(Row):
    """The line of a training.

    Attributes:
        loss, norm, lr: of the last step that is known.
        samples: since the start of the training.
    """

    def __init__(self, sharded: Sharded, sizes: Sizes, begin: int, samples: int, display: Display) -> None:
        super().__init__("", sizes.steps, display, done=begin, delay=0)
        self._sharded, self._sizes = sharded, sizes
        parameters = list(sharded.model.parameters())
        self.device = parameters[0].device
        trained = sum(one.numel() for one in parameters if one.requires_grad)
        frozen = sum(one.numel() for one in parameters) - trained
        self._flops_per_token = 6 * trained + 4 * frozen
        self.loss: float | None = None
        self.norm = self.lr = math.nan
        self.samples = samples
        self._sampled = deque([(self.since, samples)], maxlen=60)
        self._memory, self._counted_at = "", -math.inf
        self._peak_flops = sizes.peak_flops
        if self._peak_flops is None and self.device.type != "cpu":
            from zeroshard.plan.machine import peak_flops_of

            dtype = str(sharded.dtypes.param).removeprefix("torch.")
            self._peak_flops = peak_flops_of(device_name(self.device), dtype)

    def figures(self) -> list[str]:
        of = f"/{self.total:.0f}" if self.total is not None else ""
        left = self.seconds_left
        parts = [
            f"step {self.done:.0f}{of}",
            f"in {clock(monotonic() - self.since)}"
            if self.done == self.total
            else f"{clock(left)} left"
            if left is not None
            else "",
            f"loss {self.loss:.4g}" if self.loss is not None else "",
            f"lr {self.lr:.2e}" if math.isfinite(self.lr) else "",
            f"norm {self.norm:.3g}" if not math.isnan(self.norm) else "",
            *self._throughput(),
            self._states(),
        ]
        return [part for part in parts if part]

    def note(self, now: float) -> None:
        super().note(now)
        self._sampled.append((now, self.samples))

    def _throughput(self) -> list[str]:
        (then, before), (now, samples) = self._sampled[0], self._sampled[-1]
        if now <= then or samples <= before:
            return []
        speed = (samples - before) / (now - then)
        parts = [f"{_short(speed)} samples/s"]
        tokens, flops = self._sizes.tokens, self._sizes.flops
        if tokens is not None:
            parts.append(f"{_short(speed * tokens)} tokens/s")
            flops = flops or tokens * self._flops_per_token
        if flops is not None and self._peak_flops is not None:
            parts.append(f"MFU {speed * flops / (self._peak_flops * self._sharded.world_size):.1%}")
        return parts

    def _states(self) -> str:
        now = monotonic()
        if now - self._counted_at >= MEMORY_SECONDS:
            self._counted_at = now
            report = self._sharded.memory_report()
            states = sum(report[kind] for kind in ("parameters", "gradients", "optimizer"))
            peak = peak_nbytes(self.device)
            self._memory = f"states {_mib(states)}" + (f", peak {_mib(peak)}" if peak else "")
        return self._memory


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.0f} MiB" if nbytes < 10_000 * _MIB else f"{nbytes / _MIB / 1024:,.1f} GiB"
