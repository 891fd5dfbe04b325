"""Owns where the package named `deepspeed` lies, and what may stand in its way. Called by cli.run and as_deepspeed.

A folder on `sys.path` is all that there is to it: `import deepspeed`, `find_spec`, `importlib.metadata` and child processes find
the same thing, and it goes before a DeepSpeed that is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path

PYTHONPATH = "PYTHONPATH"


def shim_path() -> Path:
    """The folder that holds our package named `deepspeed`, and the metadata that version checks read."""
    return Path(__file__).parent / "shim"


def is_ours(file: str | None) -> bool:
    """Whether a module's file lies in the shim."""
    return file is not None and Path(file).is_relative_to(shim_path())


def python_path(environment: Mapping[str, str]) -> str:
    """What PYTHONPATH must be for child processes to find the shim first."""
    before = [part for part in environment.get(PYTHONPATH, "").split(os.pathsep) if part and part != str(shim_path())]
    return os.pathsep.join([str(shim_path()), *before])


def real_deepspeed() -> Path | None:
    """Where a DeepSpeed that is not ours is installed, or None."""
    others = [entry for entry in sys.path if not entry or Path(entry) != shim_path()]
    spec = PathFinder.find_spec("deepspeed", others)
    return Path(spec.origin).parent if spec is not None and spec.origin and not is_ours(spec.origin) else None


def put_on_path() -> None:
    """Put the shim first on `sys.path`, and on PYTHONPATH for child processes."""
    folder = str(shim_path())
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    os.environ[PYTHONPATH] = python_path(os.environ)
    importlib.invalidate_caches()
