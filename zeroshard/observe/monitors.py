"""Owns the places where figures of a run are kept: TensorBoard, CSV files, Weights & Biases, Comet. Called by observe.log.

A package is imported only where its block is enabled, and only on rank 0.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zeroshard.config.schema import CometBlock, MonitorBlock, Schema, WandbBlock
from zeroshard.errors import ConfigError


class Monitor(Protocol):
    """Keeps figures."""

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Keep figures by name, at this number of samples."""

    def close(self) -> None:
        """Nothing more comes."""


class CsvMonitor:
    """One file a figure, `output_path/job_name/Train_Samples_lr.csv`, with a row (samples, value) for each step."""

    def __init__(self, block: MonitorBlock) -> None:
        self._folder = Path(block.output_path) / block.job_name
        self._files: dict[str, Any] = {}

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Append a row to each figure's file."""
        for name, value in figures.items():
            if name not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{name.replace('/', '_')}.csv"
                is_new = not path.exists()
                self._files[name] = path.open("a", newline="", buffering=1)
                if is_new:
                    csv.writer(self._files[name]).writerow(["samples", name])
            csv.writer(self._files[name]).writerow([samples, value])

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class TensorBoardMonitor:
    """Event files in `output_path/job_name`."""

    def __init__(self, block: MonitorBlock) -> None:
        writer = _import("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(Path(block.output_path) / block.job_name))

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Add a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, samples)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbMonitor:
    """A run of Weights & Biases."""

    def __init__(self, block: WandbBlock) -> None:
        wandb = _import("wandb", "wandb", "wandb")
        self._run = wandb.init(project=block.project, group=block.group, entity=block.team)

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Log the figures at this number of samples."""
        self._run.log(dict(figures), step=samples)

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

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Log the figures, unless the last point is less than the interval ago."""
        if samples >= self._next:
            self._next = samples + self._interval
            self._experiment.log_metrics(dict(figures), step=samples)

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()


def create_monitors(schema: Schema) -> list[Monitor]:
    """The monitors that the config enables. Raises `ConfigError` where a package is missing."""
    made: list[Monitor] = []
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
