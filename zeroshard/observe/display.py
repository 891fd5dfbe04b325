"""Owns the terminal progress lines of training, saves and loads.

Rank 0 draws them on stderr, if stderr is a terminal. Unless a display is animated, the working thread draws its lines: a
separate thread could hold a lock while a data loader forks its workers.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.text import Text

DELAY_SECONDS = 2.0
"""A task gets a line after this time."""
REFRESH_SECONDS = 0.25
SWITCH = "ZEROSHARD_PROGRESS"
"""The environment variable that turns progress lines off if it is 0."""
_SEEN = 60
_BAR_CELLS = 20
_GB = 1e9

Advance: TypeAlias = Callable[[float], object]
"""A function that takes the amount done since its last call."""


def ignore(amount: float) -> None:
    """Do nothing, as the `Advance` of a task without a line."""


class Row:
    """A long task on a line of its own.

    Attributes:
        what: the name of the task.
        total: the amount to do; None if it is unknown.
        done: the amount done.
        since: the start of the task in seconds, by the monotonic clock.
        due: the time from which the task has a line.
    """

    def __init__(
        self, what: str, total: float | None, display: Display, *, done: float = 0.0, delay: float = DELAY_SECONDS
    ) -> None:
        self.what = what
        self.total = total
        self.done = done
        self.since = monotonic()
        self.due = self.since + delay
        self._display = display
        self._seen = deque([(self.since, done)], maxlen=_SEEN)

    def advance(self, amount: float) -> None:
        self.done += amount
        self._display.refresh()

    def at(self, done: float, total: float) -> None:
        self.done = done
        self.total = total
        self._display.refresh()

    def note(self, now: float) -> None:
        """Record the amount done at the time `now`, from which the speed is computed."""
        self._seen.append((now, self.done))

    @property
    def speed(self) -> float:
        """The recent speed: the amount done per second."""
        then, before = self._seen[0]
        now, done = self._seen[-1]
        if now <= then:
            return 0.0
        return (done - before) / (now - then)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the task ends; None if unknown."""
        if self.total is None or self.done <= 0 or self.speed <= 0:
            return None
        return max(self.total - self.done, 0.0) / self.speed

    def figures(self) -> list[str]:
        """Return the figures of the line, the most important first. A narrow line omits the last ones."""
        parts = [clock(monotonic() - self.since)]
        if self.total is not None:
            parts.insert(0, f"{self.done:g} of {self.total:g}")
        return parts


class BytesRow(Row):
    """A task whose amounts are bytes."""

    def figures(self) -> list[str]:
        parts = [f"{self.done / _GB:.2f} GB", f"{self.speed / _GB:.2f} GB/s"]
        if self.total is not None:
            parts[0] = f"{self.done / _GB:.2f} of {self.total / _GB:.2f} GB"
        if self.seconds_left is not None:
            parts.append(f"{clock(self.seconds_left)} left")
        return parts


def clock(seconds: float) -> str:
    """Format a duration: 0:42, 12:05, 3:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


class Display:
    """The lines of one model, or of one command.

    Args:
        speaks: whether this process may draw lines, as rank 0 may. Also an attribute.
        animated: whether a thread draws the lines, which then appear at once. Use it for commands that print little.
    """

    def __init__(self, *, speaks: bool = True, animated: bool = False) -> None:
        self.speaks = speaks
        self._animated = animated
        self._rows: list[Row] = []
        self._live: Live | None = None
        self._drawn_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether a line would be visible."""
        return self.speaks and os.environ.get(SWITCH) != "0" and sys.stderr is not None and sys.stderr.isatty()

    @contextmanager
    def task(self, what: str, total: float | None = None, *, in_bytes: bool = True) -> Iterator[Row]:
        """Yield a row and show its line while the block runs. The block calls the row's `advance` or `at`."""
        kind = BytesRow if in_bytes else Row
        row = kind(what, total, self, delay=DELAY_SECONDS * (not self._animated))
        with self.shown(row):
            yield row

    @contextmanager
    def shown(self, row: Row, *, stays: bool = False) -> Iterator[None]:
        """Show a row's line while the block runs. If `stays`, the line remains on the terminal at the end."""
        if not self.is_on:
            yield
            return
        self._rows.append(row)
        try:
            self.refresh(now=True)
            yield
        finally:
            self._rows.remove(row)
            row.note(monotonic())
            with self.above():
                if stays:
                    console = _console()
                    console.print(_line(row, console.width, console.options.ascii_only))

    def refresh(self, *, now: bool = False) -> None:
        """Draw the lines that are due. Without `now`, draw at most once in `REFRESH_SECONDS`."""
        if not self._rows:
            return
        moment = monotonic()
        if not now and moment - self._drawn_at < REFRESH_SECONDS:
            return
        self._drawn_at = moment
        for row in self._rows:
            row.note(moment)
        if not any(moment >= row.due for row in self._rows):
            return
        if self._live is None:
            from rich.live import Live

            # If stdout is a file, its output cannot disturb the line.
            both = sys.stdout is not None and sys.stdout.isatty()
            live = Live(
                self, console=_console(), auto_refresh=self._animated, transient=True, redirect_stdout=both,
                vertical_overflow="visible",
            )  # fmt: skip
            live.start()
            self._live = live
        self._live.refresh()

    @contextmanager
    def above(self) -> Iterator[None]:
        """Print the output of the block above the lines."""
        live = self._live
        self._live = None
        if live is not None:
            live.stop()
        try:
            yield
        finally:
            if live is not None:
                self.refresh(now=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        now = monotonic()
        for row in self._rows:
            if now >= row.due:
                yield _line(row, options.max_width, options.ascii_only)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _line(row: Row, width: int, ascii_only: bool) -> Text:
    from rich.text import Text

    line = Text(row.what, no_wrap=True, overflow="ellipsis")
    if row.total and width >= 4 * _BAR_CELLS:
        full = min(round(_BAR_CELLS * row.done / row.total), _BAR_CELLS)
        done, missing = "#-" if ascii_only else "━━"
        line.append("  " * bool(row.what)).append(done * full, "cyan")
        line.append(missing * (_BAR_CELLS - full), "bright_black")
    for part in row.figures():
        if line.cell_len + 2 + len(part) >= width:
            break
        line.append("  " * bool(line.cell_len)).append(part)
    return line
