"""Owns calls of the `zeroshard` program in this process, since a separate process would import torch for seconds."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from zeroshard.tools.main import main


@dataclass(frozen=True)
class Done:
    """A finished program's status and output, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def zeroshard(*arguments: str) -> Done:
    """Run the program with these arguments on a terminal with 150 columns."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    terminal = mock.patch.dict(os.environ, COLUMNS="150")
    typed = mock.patch.object(sys, "argv", ["zeroshard", *arguments])
    with terminal, typed, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Done(code, out.getvalue(), err.getvalue())
