"""Owns the figures of a step, and the monitors that record them: JSON lines, CSV, TensorBoard, and services.

A service's package is imported only if its block is enabled, and only on rank 0.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from zeroshard.engine.config.schema import (
    MONITORS,
    CometBlock,
    MlflowBlock,
    MonitorBlock,
    Schema,
    TrackioBlock,
    WandbBlock,
)
from zeroshard.errors import ConfigError, UsageError

STEPS = "steps.jsonl"
TAG = "Train/Samples/"
"""The beginning of the names of figures in monitors, as in DeepSpeed."""
_ALWAYS = ("step", "samples", "loss", "lr", "loss_scale", "grad_norm", "applied")


@dataclass(frozen=True)
class StepFigures:
    """The figures of a step. `seconds`, `sent`, `memory`, `peak` and `reserved` describe this rank.

    Attributes:
        samples: the number of samples since the start.
        loss: an engine's mean over ranks, or the loss that rank 0 passed to `progress.step`; None if it is unknown.
        at: the time, in seconds since 1970.
        samples_per_second: the rate of all ranks since the last figures.
        sent: the bytes sent since the last figures, by collective.
        tokens_per_second: the rate of all ranks; None if the number of tokens of a sample is unknown.
        seconds: the seconds of one step, by part.
        memory: the bytes of live storage, by model state.
        peak: the peak memory in bytes of the accelerator's allocator, or of the process if there is no accelerator.
        reserved: the most bytes that the accelerator's allocator has reserved; 0 if there is no accelerator.
    """

    step: int
    samples: int
    loss: float | None
    lr: float
    loss_scale: float
    grad_norm: float
    applied: bool
    samples_per_second: float
    tokens_per_second: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0
    reserved: int = 0
    at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """Return a dict of the known figures. A figure that is 0, None or empty is unknown, unless `_ALWAYS` lists it."""
        entry = asdict(self)
        entry["at"] = round(self.at, 3)
        if self.loss is None:
            del entry["loss"]
        return {key: value for key, value in entry.items() if value or key in _ALWAYS}


def _finite(value: Any) -> Any:
    """Return a value in which None replaces each number that is not finite, since JSON cannot store it."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Sent:
    """An object that reads counters of sent bytes, which other code may clear.

    Args:
        before: the counters at the start.
    """

    def __init__(self, before: Mapping[str, int]) -> None:
        self._before = dict(before)

    def take(self, now: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes since the last call, by collective."""
        since = {}
        for name, count in now.items():
            more = count - self._before.get(name, 0)
            if more < 0:  # the counter was cleared
                more = count
            if more:
                since[name] = more
        self._before = dict(now)
        return since


class Monitor(Protocol):
    """A record of a run's figures."""

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        """Record a step's figures; `events` are some of these figures by tag, such as Train/Samples/lr."""

    def close(self) -> None: ...


def _append_to(path: Path) -> IO[str]:
    """Open a file for appending. First end the incomplete last line that a killed run may have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", newline="", buffering=1, encoding="utf-8")


class FileMonitor(ABC):
    """A monitor that writes files. If it can no longer write, as on a full disk, training continues without it.

    Raises:
        UsageError: no file can be written there; raised before the first step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, IO[str]] = {}
        self._failed = False
        try:
            self._probe()
        except OSError as error:
            raise UsageError(
                f"the log {self.path} cannot be written: {error.strerror or error}. Name a folder that this process can write to."
            ) from error

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        if self._failed:
            return
        try:
            self._write(figures, events)
        except OSError as error:
            self._failed = True
            warnings.warn(
                f"the log {self.path} ends before step {figures.step}: {error.strerror or error}. Training continues without it.",
                stacklevel=2,
            )

    def close(self) -> None:
        for file in self._open.values():
            with suppress(OSError):  # a full disk may refuse the last data
                file.close()
        self._open.clear()

    @abstractmethod
    def _probe(self) -> None:
        """Raise OSError if no file can be written at `path`. It is called before attributes of subclasses exist."""

    @abstractmethod
    def _write(self, figures: StepFigures, events: Mapping[str, float]) -> None: ...


class JsonLinesMonitor(FileMonitor):
    """A monitor that writes `folder/steps.jsonl`: a line that describes the run, and one JSON object per step.

    Args:
        about: the run's world size, policy and versions.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        super().__init__(folder / STEPS)
        self._about = dict(about)

    def _probe(self) -> None:
        _append_to(self.path).close()

    def _write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        if STEPS not in self._open:
            self._open[STEPS] = _append_to(self.path)
            self._write_line({"run": self._about})
        self._write_line(figures.as_json())

    def _write_line(self, entry: Any) -> None:
        self._open[STEPS].write(json.dumps(_finite(entry), allow_nan=False) + "\n")


class CsvMonitor(FileMonitor):
    """A monitor that writes `output_path/job_name/Train_Samples_lr.csv` and similar files, with a row (samples, value) per step."""

    def __init__(self, block: MonitorBlock) -> None:
        super().__init__(Path(block.output_path) / block.job_name)

    def _probe(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.path).close()

    def _write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        for name, value in events.items():
            if name not in self._open:
                path = self.path / f"{name.replace('/', '_')}.csv"
                is_new = not path.exists()
                self._open[name] = _append_to(path)
                if is_new:
                    csv.writer(self._open[name]).writerow(["samples", name])
            csv.writer(self._open[name]).writerow([figures.samples, value])


class TensorBoardMonitor:
    """A monitor that writes TensorBoard event files to `output_path/job_name`. Raises ConfigError if tensorboard is missing."""

    def __init__(self, block: MonitorBlock) -> None:
        writer = _import("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(Path(block.output_path) / block.job_name))

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        for name, value in events.items():
            self._writer.add_scalar(name, value, figures.samples)

    def close(self) -> None:
        self._writer.close()


class WandbMonitor:
    """A monitor that logs to a Weights & Biases run. Raises ConfigError if the package wandb is missing."""

    def __init__(self, block: WandbBlock) -> None:
        wandb = _import("wandb", "wandb", "wandb")
        self._run = wandb.init(project=block.project, group=block.group, entity=block.team)

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        self._run.log(dict(events), step=figures.samples)

    def close(self) -> None:
        self._run.finish()


class CometMonitor:
    """A monitor that logs to a Comet experiment. Raises ConfigError if the package comet_ml is missing."""

    def __init__(self, block: CometBlock) -> None:
        comet = _import("comet_ml", "comet", "comet_ml")
        names = ("project", "workspace", "api_key", "experiment_key", "online", "mode")
        given = {name: getattr(block, name) for name in names if getattr(block, name) is not None}
        self._experiment = comet.start(**given)
        if block.experiment_name is not None:
            self._experiment.set_name(block.experiment_name)
        self._interval = block.samples_log_interval
        self._next = 0
        """The number of samples from which the next point is logged."""

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        if figures.samples >= self._next:
            self._next = figures.samples + self._interval
            self._experiment.log_metrics(dict(events), step=figures.samples)

    def close(self) -> None:
        self._experiment.end()


class TrackioMonitor:
    """A monitor that logs to a Trackio run. Raises ConfigError if the package trackio is missing."""

    def __init__(self, block: TrackioBlock) -> None:
        trackio = _import("trackio", "trackio", "trackio")
        self._run = trackio.init(
            block.project, name=block.name, group=block.group, space_id=block.space_id, embed=False
        )

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        self._run.log(dict(events), step=figures.samples)

    def close(self) -> None:
        self._run.finish()


class MlflowMonitor:
    """A monitor that logs to a run of MLflow that it creates. Raises ConfigError if the package mlflow is missing."""

    def __init__(self, block: MlflowBlock) -> None:
        mlflow = _import("mlflow", "mlflow", "mlflow")
        self._metric = mlflow.entities.Metric
        # A client: the script may have a run of its own, to which `mlflow.log_metric` would write.
        self._client = mlflow.MlflowClient(tracking_uri=block.tracking_uri)
        found = self._client.get_experiment_by_name(block.experiment)
        experiment = self._client.create_experiment(block.experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=block.run_name).info.run_id

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        now = int(1000 * figures.at)
        self._client.log_batch(
            self._run, [self._metric(name, value, now, figures.samples) for name, value in events.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)


_MAKERS: dict[str, Callable[[Any, Callable[[], Mapping[str, Any]]], Monitor]] = {
    "json_monitor": lambda block, about: JsonLinesMonitor(Path(block.output_path) / block.job_name, about()),
    "csv_monitor": lambda block, _: CsvMonitor(block),
    "tensorboard": lambda block, _: TensorBoardMonitor(block),
    "wandb": lambda block, _: WandbMonitor(block),
    "comet": lambda block, _: CometMonitor(block),
    "trackio": lambda block, _: TrackioMonitor(block),
    "mlflow": lambda block, _: MlflowMonitor(block),
}
"""For each of `MONITORS`, a function of its block and of `create_monitors`' `about`."""


def names_monitors(schema: Schema) -> bool:
    """Return whether the config enables any monitor."""
    return any(getattr(schema, key).enabled for key in MONITORS)


def create_monitors(schema: Schema, about: Callable[[], Mapping[str, Any]]) -> list[Monitor]:
    """Return the monitors that the config enables. Raise ConfigError without a needed package, UsageError for unwritable files."""
    blocks = {key: getattr(schema, key) for key in MONITORS}
    return [_MAKERS[key](block, about) for key, block in blocks.items() if block.enabled]


def events_of(figures: StepFigures) -> dict[str, float]:
    """Return the figures for a monitor that are known at every step, under DeepSpeed's tags."""
    events = {"lr": figures.lr, "loss_scale": figures.loss_scale, "grad_norm": figures.grad_norm}
    if figures.loss is not None:
        events = {"train_loss": figures.loss, **events}
    return {f"{TAG}{name}": value for name, value in events.items()}


def _import(module: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}.enabled is true, but its package is not installed ({error}): pip install {package}, or disable it."
        ) from error
