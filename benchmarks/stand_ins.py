"""Owns stubs for libraries that a machine may lack: importing zeroshard needs them, but the measured training does not."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

LIBRARIES = ("pydantic", "rich", "typer", "json5", "safetensors", "matplotlib", "numpy")


class _Anything:
    """A base class, decorator, field or type, for any use while modules are imported."""

    model_fields: dict[str, Any] = {}  # noqa: RUF012  (pydantic's, of a class)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None: ...

    def __class_getitem__(cls, _item: Any) -> type:
        return cls

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _item: Any) -> Any:
        return self

    def __or__(self, _other: Any) -> Any:
        return self

    __ror__ = __or__


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  (a package: its submodules are found too)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Exception,) if name.endswith("Error") else (_Anything,), {})
        setattr(self, name, made)
        return made


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._names else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None: ...


def stand_in() -> list[str]:
    """Register stubs for libraries that are not installed and return their names."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_StandIns(set(missing)))
    return missing
