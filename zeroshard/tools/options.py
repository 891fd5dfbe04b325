"""Owns the parsing of options: numbers, sizes, dtypes, factories of models, paths. Errors are one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.errors.uncaught import is_users
from zeroshard.tools.plots import require_matplotlib

if TYPE_CHECKING:
    from torch import nn

_PICTURES = (".png", ".svg", ".pdf")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
"""Suffixes that are powers of 1000. `_BINARY` has powers of 1024."""
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = re.compile(r"([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?|[+-]?[\d_]+\.)\s*([a-z]*)", re.IGNORECASE)


def parameters_of(text: str | float) -> float:
    """Read a number of parameters: `7B`, `500M`, `7.5e9`, `1_000_000`. Raise `typer.BadParameter` for other text."""
    return _size(text, {**_DECIMAL, "b": 10**9, "bn": 10**9}, "a number of parameters, such as 7B, 500M or 7.5e9")


def nbytes_of(text: str | float) -> int:
    """Read a number of bytes: `80GB`, `512MiB`, `1e9`, `4k`. Raise `typer.BadParameter` for other text."""
    units = {**_DECIMAL, **_BINARY}
    units |= {f"{unit}b": factor for unit, factor in units.items()}
    return int(_size(text, units, "a number of bytes, such as 80GB, 512MiB or 1e9"))


def _size(text: str | float, units: dict[str, int], what: str) -> float:
    match = _NUMBER.fullmatch(str(text).strip())
    if match is None or match.group(2).lower() not in units:
        raise typer.BadParameter(f"{text!r} is not {what}.")
    number = float(match.group(1).replace("_", "")) * units[match.group(2).lower()]
    if not 1 <= number < float("inf"):
        raise typer.BadParameter(f"{text!r} is not {what}: it must be at least 1.")
    return number


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype: `bfloat16` for `bf16`. Raise `typer.BadParameter` for other text."""
    from zeroshard.engine.config.fields import DTYPE_NAMES

    name = DTYPE_NAMES.get(text.lower().removeprefix("torch."))
    if name is None:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DTYPE_NAMES)}.")
    return name


def load_factory(name: str) -> Callable[[], Any]:
    """Return the function that `module:function` or `file.py:function` names. Raise `UsageError` if none can be imported."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UsageError(f"a model is module:function or file.py:function, not {name!r}. Name both.")
    if place.endswith(".py"):
        module = _load_file(input_file(Path(place), f"the model {name}"))
    else:
        module = _load_module(place)
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{place} has no function {function!r}. Name one that it defines.")
    return getattr(module, function)  # type: ignore[no-any-return]


def _load_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` does
    loader = spec.loader
    return call_factory(f"importing {path}", lambda: loader.exec_module(module)) or module


def _load_module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UsageError(f"there is no module {name!r} here. Name module:function or file.py:function.")
    return call_factory(f"importing {name}", lambda: importlib.import_module(name))


def call_factory(name: str, factory: Callable[[], Any]) -> Any:
    """Call the user's code. Raise exceptions other than `ZeroshardError` as a `UsageError` that names the line of that code."""
    try:
        return factory()
    except ZeroshardError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        mine = [frame for frame in frames if is_users(frame.filename)]
        where = ""
        if mine:
            where = f" ({mine[-1].filename}, line {mine[-1].lineno})"
        raise UsageError(f"{name} failed: {type(error).__name__}: {error}{where}") from error


def build_module(name: str) -> nn.Module:
    """Build a factory's module on the meta device, where it needs no memory. Raise `UsageError` if that fails."""
    import torch
    from torch import nn

    factory = load_factory(name)
    with torch.device("meta"):
        made = call_factory(name, factory)
    if isinstance(made, tuple) and made:
        made = made[0]
    if not isinstance(made, nn.Module):
        raise UsageError(f"{name} returned {type(made).__name__}. Return a torch.nn.Module, or (module, batch).")
    return made


def input_file(path: Path, option: str) -> Path:
    """Return `path`. Raise `UsageError`, which names `option`, unless it is an existing file."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder, not a file. Name a file.")
    if not path.is_file():
        raise UsageError(f"{option}: no file at {path}. Check the path.")
    return path


def input_folder(path: Path, option: str) -> Path:
    """Return `path`. Raise `UsageError`, which names `option`, unless it is an existing folder."""
    if not path.exists():
        raise UsageError(f"{option}: no folder at {path}. Check the path.")
    if not path.is_dir():
        raise UsageError(f"{option}: {path} is a file, not a folder. Name a folder.")
    return path


def output_file(path: Path, option: str) -> Path:
    """Return the path of a file to write. Raise `UsageError` for a folder, and for a path below a file."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a folder, not a file. Name a file.")
    output_folder(path.parent, option)
    return path


def picture_file(path: Path, option: str) -> Path:
    """Return the path of a plot to write. Raise `UsageError` like `output_file`, for other formats, and without matplotlib."""
    output_file(path, option)
    if path.suffix.lower() not in _PICTURES:
        raise UsageError(
            f"{option}: {path} is not the name of a picture. Choose a name that ends in {', '.join(_PICTURES[:-1])} or "
            f"{_PICTURES[-1]}."
        )
    require_matplotlib(option)
    return path


def output_folder(path: Path, option: str) -> Path:
    """Return the path of a folder to create or write to. Raise `UsageError` if it or a parent is a file."""
    for folder in (path, *path.parents):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{option}: {folder} is a file, not a folder. Name a folder.")
    return path
