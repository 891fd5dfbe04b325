"""Owns the path of zeroshard's package named `deepspeed`.

Its folder comes first on `sys.path`, so that `import deepspeed`, `find_spec`, `importlib.metadata` and child processes
find it before an installed DeepSpeed.
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
    """Return the folder with zeroshard's package named `deepspeed`, and the metadata that version checks read."""
    return Path(__file__).parents[1] / "shim"


def is_ours(file: str | None) -> bool:
    """Return whether a module's file is in the shim."""
    return file is not None and Path(file).is_relative_to(shim_path())


def python_path(environment: Mapping[str, str]) -> str:
    """Return the PYTHONPATH with which child processes find the shim first."""
    before = [part for part in environment.get(PYTHONPATH, "").split(os.pathsep) if part and part != str(shim_path())]
    return os.pathsep.join([str(shim_path()), *before])


def real_deepspeed() -> Path | None:
    """Return the folder of the real DeepSpeed, or None if it is not installed."""
    others = [entry for entry in sys.path if not entry or Path(entry) != shim_path()]
    spec = PathFinder.find_spec("deepspeed", others)
    if spec is None or not spec.origin or is_ours(spec.origin):
        return None
    return Path(spec.origin).parent


def put_on_path() -> None:
    """Put the shim first on `sys.path`, and on PYTHONPATH for child processes."""
    folder = str(shim_path())
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    os.environ[PYTHONPATH] = python_path(os.environ)
    importlib.invalidate_caches()
