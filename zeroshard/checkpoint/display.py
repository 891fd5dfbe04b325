"""Owns the progress bars of training, saves and loads, which rich draws.

Rank 0 draws them on stderr, if stderr is a terminal. Unless a display is animated, the working thread draws: a separate thread
could hold a lock while a data loader forks its workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

DELAY_SECONDS = 2.0
"""A task gets a bar after this time."""
REFRESH_SECONDS = 0.25
_CELLS = 48
"""The most cells that a bar, the amounts and the time left take."""
SWITCH = "ZEROSHARD_PROGRESS"
"""The environment variable that turns progress bars off if it is 0."""

Advance: TypeAlias = Callable[[float], object]
"""A function that takes the amount done since its last call."""


def ignore(amount: float) -> None:
    """Do nothing, as the `Advance` of a task without a bar."""


@dataclass(eq=False)
class ProgressRow:
    """A long task.

    Attributes:
        what: the name of the task.
        total, done: the amount to do, None if it is unknown; and the amount done.
        in_bytes: whether amounts are bytes.
        due: the time from which the task has a bar, by the monotonic clock.
        columns: texts behind the bar, the most important first. A narrow terminal omits the last ones.
        stays: whether the bar remains on the terminal at the end.
        task: rich's number of the task, once it is drawn.
    """

    what: str
    total: float | None
    display: Display
    in_bytes: bool = False
    due: float = 0.0
    done: float = 0.0
    columns: list[str] = field(default_factory=list)
    stays: bool = False
    task: TaskID | None = None

    def advance(self, amount: float) -> None:
        self.done += amount
        self.display.refresh()

    def at(self, done: float, total: float) -> None:
        self.done = done
        self.total = total
        self.display.refresh()


class Display:
    """The bars of one model, or of one command.

    Args:
        speaks: whether this process may draw bars, as rank 0 may. Also an attribute.
        animated: whether a thread draws the bars, which then appear at once. Use it for commands that print little.
    """

    def __init__(self, *, speaks: bool = True, animated: bool = False) -> None:
        self.speaks = speaks
        self._animated = animated
        self._rows: list[ProgressRow] = []
        self._progress: Progress | None = None
        self._drawn_at = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether this process may report progress on stderr, as a bar or as plain lines."""
        return self.speaks and os.environ.get(SWITCH) != "0" and sys.stderr is not None

    @property
    def is_on(self) -> bool:
        """Whether a bar would be visible."""
        if self._progress is not None:  # stderr is rich's stand-in now, which old releases do not call a terminal
            return True
        return self.is_wanted and sys.stderr.isatty()

    @contextmanager
    def task(self, what: str, total: float | None = None, *, in_bytes: bool = True) -> Iterator[ProgressRow]:
        """Yield a row and show its bar while the block runs. The block calls the row's `advance` or `at`."""
        row = ProgressRow(what, total, self, in_bytes, due=monotonic() + DELAY_SECONDS * (not self._animated))
        with self.shown(row):
            yield row

    @contextmanager
    def shown(self, row: ProgressRow) -> Iterator[None]:
        """Show a row while the block runs."""
        if not self.is_on:
            yield
            return
        self._rows.append(row)
        try:
            self.refresh(now=True)
            yield
        finally:
            self.refresh(now=True)
            self._rows.remove(row)
            if self._progress is not None and not self._rows:
                self._progress.live.transient = not row.stays
                self._progress.stop()
                self._progress = None
            elif self._progress is not None and row.task is not None:
                self._progress.remove_task(row.task)

    def refresh(self, *, now: bool = False) -> None:
        """Draw the rows that are due. Without `now`, draw at most once in `REFRESH_SECONDS`."""
        moment = monotonic()
        if not self._rows or (not now and moment - self._drawn_at < REFRESH_SECONDS):
            return
        self._drawn_at = moment
        for row in self._rows:
            if moment < row.due:
                continue
            if self._progress is None:
                self._progress = _progress(self._animated)
                self._progress.start()
            if row.task is None:
                row.task = self._progress.add_task(row.what, total=row.total, completed=int(row.done), row=row)
            self._progress.update(row.task, total=row.total, completed=row.done)
        if self._progress is not None:
            self._progress.refresh()


def _progress(animated: bool) -> Progress:
    from rich import progress as rich
    from rich.console import Console

    bar = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(20))
    in_bytes = (*bar, rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn())
    in_steps = (*bar, rich.MofNCompleteColumn(), rich.TimeRemainingColumn(elapsed_when_finished=True))

    class Bars(rich.Progress):
        def get_renderables(self) -> Iterator[Any]:
            for task in self.tasks:  # a row for each task, since tasks have different columns
                row = task.fields["row"]
                columns: list[Any] = [*(in_bytes if row.in_bytes else in_steps)]
                room = self.console.width - len(row.what) - _CELLS
                for text in row.columns:
                    room -= len(text) + 1
                    if room >= 0:
                        columns.append(rich.TextColumn(text, markup=False))
                self.columns = tuple(columns)
                yield self.make_tasks_table([task])

    # If stdout is a file, its output cannot disturb the bars.
    both = sys.stdout is not None and sys.stdout.isatty()
    return Bars(
        console=Console(stderr=True, highlight=False), auto_refresh=animated, transient=True, redirect_stdout=both,
        get_time=lambda: monotonic(),  # noqa: PLW0108  # which tests replace
    )  # fmt: skip
