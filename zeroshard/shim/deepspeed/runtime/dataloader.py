"""A loader without an end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed._missing import missing

__all__ = ["RepeatingLoader"]
__getattr__ = missing(__name__, DeepSpeedDataLoader="initialize(training_data=...) returns a loader.")


class RepeatingLoader:
    """Starts again where a loader ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
