"""Owns the report of an uncaught zeroshard error under torchrun: the message is printed once and appears in torchrun's report.

torchrun gives each process a file for its error and prints that file. The files of one machine's processes share a
folder, in which the first process to fail leaves its message. A process that later fails with the same message prints nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

_FILE = "TORCHELASTIC_ERROR_FILE"
_WHOLE = "ZEROSHARD_TRACEBACK"
_PACKAGE = Path(__file__).parents[1]
_PYTHON = Path(os.__file__).parent


class ExceptHook:
    """A `sys.excepthook` for exceptions of one class; the former hook gets all others."""

    def __init__(self, kind: type[BaseException], before: Callable[..., Any]) -> None:
        self.kind = kind
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print an uncaught exception, unless another process of this machine has printed the same message."""
        if not isinstance(error, self.kind):
            self.before(kind, error, trace)
            return
        sentence = f"{kind.__name__}: {error}"
        told_by, told = _claim(sentence)
        if told == sentence:
            _record(f"as rank {told_by}: {_short(sentence)}", later=True)
            return
        if told is not None and told.startswith(f"{kind.__name__}:"):
            # The first process has reported an error of this class in full.
            _record(_short(sentence), later=True)
            print(f"[rank {_rank()}] {_short(sentence)}", file=sys.stderr)
            return
        lines = [sentence]
        frames = traceback.extract_tb(trace)
        mine = [frame for frame in frames if is_users(frame.filename)] or frames[:1]
        if mine:
            frame = mine[-1]
            lines.append(f"  at {frame.filename}, line {frame.lineno}: {frame.line}")
        if error.__cause__ is not None:
            lines.append(f"  caused by {_short(f'{type(error.__cause__).__name__}: {error.__cause__}')}")
        shows_trace = os.environ.get(_WHOLE, "0") != "0"
        if not shows_trace:
            lines.append(f"  ({_WHOLE}=1 shows the whole traceback)")
        text = "\n".join(lines)
        _record(text)
        print(f"[rank {_rank()}] {text}", file=sys.stderr)
        if shows_trace:
            self.before(kind, error, trace)


def report_uncaught(kind: type[BaseException]) -> None:
    """If torchrun started this process, print uncaught exceptions of this class as one message."""
    if _FILE in os.environ and not isinstance(sys.excepthook, ExceptHook):
        sys.excepthook = ExceptHook(kind, sys.excepthook)


def restore() -> None:
    """Restore the former `sys.excepthook`, if `report_uncaught` replaced it."""
    if isinstance(sys.excepthook, ExceptHook):
        sys.excepthook = sys.excepthook.before


def _rank() -> str:
    return os.environ.get("RANK", "?")


def _short(sentence: str) -> str:
    line = " ".join(sentence.split())
    if len(line) > 200:
        line = f"{line[:197]}..."
    return line


def _claim(sentence: str) -> tuple[str, str | None]:
    """Try to be this machine's first process to report. Return the first one's rank, and its message if it is another process."""
    mine = json.dumps([_rank(), sentence])
    try:
        folder = Path(os.environ[_FILE]).parent.parent
        own = folder / f"zeroshard.{os.getpid()}"
        own.write_text(mine)
        try:
            os.link(own, folder / "zeroshard.told")  # atomic, and possible for one process only
        except FileExistsError:
            rank, told = json.loads((folder / "zeroshard.told").read_text())
            return rank, told
        finally:
            own.unlink()
    except (OSError, KeyError, ValueError):
        pass  # without a common folder, every process reports
    return _rank(), None


def is_users(filename: str) -> bool:
    """Return whether a file in a traceback is the user's own, and not from zeroshard, a library or Python."""
    path = Path(filename)
    if path.is_relative_to(_PYTHON):
        return False
    return "site-packages" not in path.parts and not path.is_relative_to(_PACKAGE) and not filename.startswith("<")


def _record(text: str, *, later: bool = False) -> None:
    """Write the text for torchrun's report. With `later`, another process's error counts as the root cause."""
    file = Path(os.environ[_FILE])
    stamp = str(int(time.time()) + later)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": stamp}}
    try:
        with file.open("x", encoding="utf-8") as opened:
            json.dump({"message": message}, opened)
    except OSError:
        return  # the script has recorded the error itself, or the agent has ended
