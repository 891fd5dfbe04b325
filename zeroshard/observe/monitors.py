"""Owns where figures of a run are kept: JSON lines, CSV files, TensorBoard, Weights & Biases, Comet. Called by log and progress.

A package is imported only where its block is enabled, and only on rank 0.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from zeroshard.config.schema import CometBlock, MonitorBlock, Schema, WandbBlock
from zeroshard.errors import ConfigError, UsageError
from zeroshard.observe.figures import StepFigures

STEPS = "steps.jsonl"


class Monitor(Protocol):
    """Keeps figures."""

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        """Keep what is known of a step: `events` is that by name, in DeepSpeed's words."""

    def close(self) -> None:
        """Nothing more comes."""


def _append_to(path: Path) -> IO[str]:
    """A file that goes on: a line that was only half written, by a run that was killed, stays a line of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", newline="", buffering=1, encoding="utf-8")


class FileMonitor(ABC):
    """Keeps figures in files. When one cannot be written any longer, as on a full disk, the training goes on without.

    Attributes:
        path: what is written to, for the sentence that says so.
    """

    path: Path
    _failed = False

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        """Keep a step's figures, or warn once that this is over."""
        if self._failed:
            return
        try:
            self._write(figures, events)
        except OSError as error:
            self._failed = True
            warnings.warn(
                f"the log {self.path} ends before step {figures.step}: {error.strerror or error}. The training goes on without it.",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the files."""
        for file in self._files():
            with suppress(OSError):  # what a full disk did not take
                file.close()

    @abstractmethod
    def _write(self, figures: StepFigures, events: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _files(self) -> list[IO[str]]:
        """Those that are open, which are forgotten."""


class JsonLinesMonitor(FileMonitor):
    """All that is known, one JSON object a step, in `folder/steps.jsonl`. Before them a line that says what is run.

    Args:
        about: of the run: the world size, the policy, versions.

    Raises:
        UsageError: the file cannot be written, which is said before the first step.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.path, self._about = folder / STEPS, dict(about)
        try:
            _append_to(self.path).close()
        except OSError as error:
            raise UsageError(
                f"the log {self.path} cannot be written: {error.strerror or error}. Name a folder that this process may write to."
            ) from error
        self._file: IO[str] | None = None

    def _write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        if self._file is None:
            self._file = _append_to(self.path)
            self._file.write(json.dumps({"run": self._about}) + "\n")
        self._file.write(json.dumps(figures.as_json()) + "\n")

    def _files(self) -> list[IO[str]]:
        file, self._file = self._file, None
        return [] if file is None else [file]


class CsvMonitor(FileMonitor):
    """One file a figure, `output_path/job_name/Train_Samples_lr.csv`, with a row (samples, value) for each step."""

    def __init__(self, block: MonitorBlock) -> None:
        self.path = Path(block.output_path) / block.job_name
        self._open: dict[str, IO[str]] = {}

    def _write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        for name, value in events.items():
            if name not in self._open:
                path = self.path / f"{name.replace('/', '_')}.csv"
                is_new = not path.exists()
                self._open[name] = _append_to(path)
                if is_new:
                    csv.writer(self._open[name]).writerow(["samples", name])
            csv.writer(self._open[name]).writerow([figures.samples, value])

    def _files(self) -> list[IO[str]]:
        files = list(self._open.values())
        self._open.clear()
        return files


class TensorBoardMonitor:
    """Event files in `output_path/job_name`."""

    def __init__(self, block: MonitorBlock) -> None:
        writer = _import("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(Path(block.output_path) / block.job_name))

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        """Add a scalar for each figure."""
        for name, value in events.items():
            self._writer.add_scalar(name, value, figures.samples)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbMonitor:
    """A run of Weights & Biases."""

    def __init__(self, block: WandbBlock) -> None:
        wandb = _import("wandb", "wandb", "wandb")
        self._run = wandb.init(project=block.project, group=block.group, entity=block.team)

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        """Log the figures at this number of samples."""
        self._run.log(dict(events), step=figures.samples)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class CometMonitor:
    """An experiment of Comet."""

    def __init__(self, block: CometBlock) -> None:
        comet = _import("comet_ml", "comet", "comet_ml")
        names = ("project", "workspace", "api_key", "experiment_key", "online", "mode")
        told = {name: getattr(block, name) for name in names if getattr(block, name) is not None}
        self._experiment = comet.start(**told)
        if block.experiment_name is not None:
            self._experiment.set_name(block.experiment_name)
        self._interval, self._next = block.samples_log_interval, 0

    def write(self, figures: StepFigures, events: Mapping[str, float]) -> None:
        """Log the figures, unless the last point is less than the interval ago."""
        if figures.samples >= self._next:
            self._next = figures.samples + self._interval
            self._experiment.log_metrics(dict(events), step=figures.samples)

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()


def create_monitors(schema: Schema, about: Callable[[], Mapping[str, Any]]) -> list[Monitor]:
    """The monitors that the config enables. Raises `ConfigError` where a package is missing.

    Args:
        about: says what is run, see `JsonLinesMonitor`.
    """
    made: list[Monitor] = []
    if schema.json_monitor.enabled:
        block = schema.json_monitor
        made.append(JsonLinesMonitor(Path(block.output_path) / block.job_name, about()))
    if schema.csv_monitor.enabled:
        made.append(CsvMonitor(schema.csv_monitor))
    if schema.tensorboard.enabled:
        made.append(TensorBoardMonitor(schema.tensorboard))
    if schema.wandb.enabled:
        made.append(WandbMonitor(schema.wandb))
    if schema.comet.enabled:
        made.append(CometMonitor(schema.comet))
    return made


def _import(module: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}.enabled is true, but the package is not installed ({error}): pip install {package}, or disable it."
        ) from error
