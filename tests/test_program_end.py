"""The end of the command-line program, in a process of its own: what it prints, imports and leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.net(x).square().mean()
def make():
    return Model(), lambda rank, step: (torch.zeros(4, 8),)
"""
BOUND = """
import ctypes
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
errors = ctypes.c_void_p(libc.fdopen(2, b"w"))
libc.setvbuf(errors, None, 0, 4096)
libc.fputs(b"nanobind: leaked 1 instances!", errors)

class nb_meta(type):
    __module__ = "nanobind"

class Instance(metaclass=nb_meta):
    def __del__(self, clear=getattr(libc, "__fpurge"), errors=errors):
        clear(errors)

instance = Instance()
instance.itself = instance
"""
"""A module like those that nanobind binds: C prints a report when the process ends, unless the last collection freed an object."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "--parameters", "7B"),
        ("config", "check", "config.json"),
        pytest.param(("plan", "model.py:make", "--config", "config.json", "--gpus", "1"), marks=pytest.mark.full),
        pytest.param(("doctor", "--size", "1MiB"), marks=pytest.mark.full),
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_printed_after_the_result(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bound.py").write_text(BOUND)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "config.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    program = "import bound; from zeroshard.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout
    assert "leaked" not in done.stderr
    if arguments[0] != "plan":  # which prints its progress there
        assert done.stderr == ""
