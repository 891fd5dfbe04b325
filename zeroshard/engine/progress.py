"""Owns the reports of a run's steps: a printed line, the monitors, and watchers."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch import __version__ as torch_version

from zeroshard.engine.config.load import Config
from zeroshard.engine.config.schema import MONITORS, Schema
from zeroshard.engine.monitors import (
    TAG,
    JsonLinesMonitor,
    Monitor,
    Sent,
    StepFigures,
    create_monitors,
    events_of,
    names_monitors,
)
from zeroshard.errors import ConfigError, ZeroshardError
from zeroshard.model.memory import peak_nbytes, reserved_nbytes
from zeroshard.model.sharded import Sharded
from zeroshard.version import __version__

_MIB = 2**20
_SETTINGS = ("ZEROSHARD_", "NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE_DEVICES", "PYTORCH_")
"""Prefixes of the environment variables that a log records."""


@dataclass(frozen=True)
class StepReport:
    """A report of one `engine.step()`.

    Attributes:
        applied: whether the parameters were updated.
        reason: the reason why the parameters were not updated; otherwise None.
        not_finite: fqns of the parameters whose gradient has an infinite or NaN element. Empty on an accelerator if the
            config does not skip steps with such gradients, since the step then does not wait for the norm.
        norm: the global L2 norm of the unscaled gradients before clipping; None between the microbatches of a step. If
            the step does not wait for the accelerator, the norm is a tensor of shape [] on it.
        loss_scale: the loss scale of the step's backwards; 1 between the microbatches of a step.
    """

    applied: bool
    reason: str | None = None
    not_finite: tuple[str, ...] = ()
    norm: float | Tensor | None = field(default=None, repr=False, compare=False)
    loss_scale: float = 1.0

    @property
    def grad_norm(self) -> float | None:
        """The norm as a number. Reading it may wait for an accelerator."""
        return None if self.norm is None else float(self.norm)


def about(sharded: Sharded) -> dict[str, Any]:
    """Describe a run, for the first line of its log."""
    parameters = list(sharded.model.parameters())
    policy = asdict(sharded.policy)
    return {
        "zeroshard": __version__,
        "torch": torch_version,
        "device": device_name(parameters[0].device),
        "world_size": sharded.world_size,
        "parameters": sum(one.numel() for one in parameters),
        "trained": sum(one.numel() for one in parameters if one.requires_grad),
        "dtype": str(sharded.dtypes.param).removeprefix("torch."),
        "policy": {state: policy[state] for state in ("parameters", "gradients", "optimizer")},
        "formula": sharded.memory_formula(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def monitors_of(schema: Schema, sharded: Sharded, config: Mapping[str, Any]) -> list[Monitor]:
    """Make the monitors that a config enables, on rank 0. Every rank must call it; the result is empty on all other ranks.

    Raises:
        ConfigError: on every rank, if rank 0 could not make them.
    """
    made: list[Monitor] = []
    if not names_monitors(schema):
        return made
    problem = None
    if not (dist.is_initialized() and dist.get_rank()):
        try:
            made = create_monitors(schema, lambda: {**about(sharded), **config})
        except ZeroshardError as error:
            problem = str(error)
        except Exception as error:
            problem = f"rank 0 cannot make the monitors of the config ({error!r}). Check their blocks."
    problems = sharded.exchange_json(problem, "the config's monitors")  # so that every rank raises
    if any(problems):
        raise ConfigError(next(filter(None, problems)))
    return made


def device_name(device: torch.device) -> str:
    """Return a device's product name, or its type if torch has no name."""
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    return device.type


Watcher = Callable[[StepReport, int, int, float, Sequence[Tensor]], None]
"""A function of each step's report, number, samples since the start, learning rate, and this rank's losses, to be summed."""


class Progress:
    """The figures of each step, logged on rank 0 if the config enables it.

    Attributes:
        losses: this rank's losses of the step so far: detached scalars, divided for the mean over microbatches.
    """

    def __init__(self, sharded: Sharded, config: Config, device: torch.device) -> None:
        self._sharded = sharded
        self._schema = schema = config.schema
        self._data_ranks = config.batch.world_size
        # Without the monitors' blocks: they may contain API keys.
        kept = {key: value for key, value in config.document.items() if key not in MONITORS}
        self._config = {"config": json.loads(json.dumps(kept, default=str))}  # it may hold a torch.dtype
        self._device = device
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._every = schema.steps_per_print
        if self._every is None and (schema.wall_clock_breakdown or schema.memory_breakdown):
            self._every = 1.0  # with a breakdown and no interval, each step prints a line
        self._logs = int(names_monitors(schema))
        """The number of logs of all steps: the config's monitors, as one, and the open `heard_by` blocks that write a file."""
        self._monitors = monitors_of(schema, sharded, self._config)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        if schema.wall_clock_breakdown:
            sharded.measure_waits(self.measure)
        self.losses: list[Tensor] = []
        self._sent = Sent(sharded.comm_report(clear=False))  # bytes sent until now belong to no step
        self._watchers: list[Watcher] = []
        self._tokens: int | None = None  # per sample
        self.start_at(0)

    # ------------------------------------------------------------------ during a step

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part of the step, if `wall_clock_breakdown` is on.

        It waits for an accelerator at both ends of the block.
        """
        if not self._schema.wall_clock_breakdown:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._seconds[part] += self._now() - start

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def start_at(self, samples: int) -> None:
        """Start to measure the throughput. `samples` is the number of samples since the start of training."""
        self._logged_at = time.perf_counter()
        self._logged_samples = samples
        self._steps = 0  # counted from this moment, as `_seconds` is
        self._seconds.clear()

    # ------------------------------------------------------------------ reports of steps

    @contextmanager
    def heard_by(self, watcher: Watcher, tokens: int | None, folder: Path | None, monitors: Schema) -> Iterator[None]:
        """Call `watcher` for each step in the block, and write the step to `folder/steps.jsonl` and to `monitors` too.

        With a folder or monitors, every rank must call it, to contribute its loss. `tokens` is the number of tokens per sample,
        if given.
        """
        logs = folder is not None or names_monitors(monitors)
        added = monitors_of(monitors, self._sharded, self._config)
        if folder is not None and self._rank == 0:
            added.append(JsonLinesMonitor(folder, about(self._sharded) | self._config))
        self._monitors += added
        tokens_before = self._tokens
        self._logs += logs
        self._watchers.append(watcher)
        if tokens is not None:
            self._tokens = tokens
        try:
            yield
        finally:
            self._watchers.remove(watcher)
            self._tokens = tokens_before
            self._logs -= logs
            for monitor in added:
                if monitor in self._monitors:  # the engine's `destroy` closes those that it has
                    monitor.close()
                    self._monitors.remove(monitor)

    def log(self, report: StepReport, step: int, samples: int, lr: float) -> None:
        """Log a step. Every rank must call it; `step` and `samples` count since the start."""
        losses = self.losses
        self.losses = []
        self._steps += 1
        for watcher in self._watchers:
            watcher(report, step, samples, lr, losses)
        # Every rank gets the same answer: below, either all ranks exchange their losses, or none does.
        prints = self._every is not None and math.isfinite(self._every) and step % max(1, round(self._every)) == 0
        if not (self._logs or prints):
            return
        mine = torch.full((1,), math.nan, dtype=torch.float64)  # after the user's own backward, the loss is unknown
        if losses:
            mine = torch.stack([loss.double().cpu().reshape(()) for loss in losses]).sum().reshape(1)
        more = samples - self._logged_samples
        speed = more / (time.perf_counter() - self._logged_at)
        loss = float(self._sharded.sum_over_ranks(mine)) / self._data_ranks
        figures = StepFigures(
            step=step,
            samples=samples,
            loss=loss if losses else None,
            lr=lr,
            loss_scale=report.loss_scale,
            grad_norm=report.grad_norm or 0.0,
            applied=report.applied,
            samples_per_second=speed,
            tokens_per_second=None if self._tokens is None else speed * self._tokens,
            seconds={part: seconds / self._steps for part, seconds in self._seconds.items()},
            sent=self._sent.take(self._sharded.comm_report(clear=False)),
            memory=self._sharded.memory_report(),
            peak=peak_nbytes(self._device),
            reserved=reserved_nbytes(self._device),
        )
        self.start_at(samples)
        events = self._events(figures)
        for monitor in self._monitors:
            monitor.write(figures, events)
        if prints and self._rank == 0:
            print(self._line(figures), flush=True)

    # ------------------------------------------------------------------ text

    def _events(self, figures: StepFigures) -> dict[str, float]:
        """Return the figures for the monitors, under DeepSpeed's tags, or tags in the same style for those that DeepSpeed lacks."""
        events = {f"elapsed_time_ms_{part}": 1e3 * value for part, value in figures.seconds.items()}
        if self._schema.memory_breakdown:
            events |= {f"memory_bytes_{kind}": value for kind, value in figures.memory.items()}
        if self._schema.comms_logger.enabled:
            events |= {f"sent_bytes_{kind}": value for kind, value in figures.sent.items()}
        return events_of(figures) | {f"{TAG}{name}": value for name, value in events.items()}

    def _line(self, figures: StepFigures) -> str:
        loss = "loss unknown" if figures.loss is None else f"loss {figures.loss:.4f}"
        skipped = "" if figures.applied else " (skipped)"
        parts = [
            f"step {figures.step}",
            loss,
            f"lr {figures.lr:.3e}",
            f"loss scale {figures.loss_scale:g}",
            f"|g| {figures.grad_norm:.4g}{skipped}",
            f"{figures.samples_per_second:.1f} samples/s",
            f"memory {sum(figures.memory.values()) / _MIB:.1f} MiB",
        ]
        if self._schema.memory_breakdown:
            parts.append("MiB: " + ", ".join(f"{kind} {value / _MIB:.1f}" for kind, value in figures.memory.items()))
        if self._schema.wall_clock_breakdown:
            parts.append("ms: " + ", ".join(f"{part} {1e3 * value:.1f}" for part, value in figures.seconds.items()))
        if self._schema.comms_logger.enabled:
            parts.append("sent MiB: " + ", ".join(f"{kind} {value / _MIB:.1f}" for kind, value in figures.sent.items()))
        return "  ".join(parts)

    def close(self) -> None:
        """Close the monitors."""
        for monitor in self._monitors:
            monitor.close()
        self._monitors.clear()
