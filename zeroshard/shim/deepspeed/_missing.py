"""Owns what a name that is not offered answers. Called by every module of this package."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import Any, NoReturn

_ADVICE = "It offers what trainers use of DeepSpeed 0.19.8; `import zeroshard` has more under its own names."


def missing(module: str, **instead: str) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562): `hasattr` is False, and whoever wants the name reads what to use in its place.

    Args:
        module: its `__name__`.
        instead: by name, what to use in its place, as a sentence: what is left out on purpose.
    """

    def getattr_(name: str) -> NoReturn:
        text = f"zeroshard has no {module}.{name}. {instead.get(name, _ADVICE)}"
        # `from module import name` swallows an AttributeError together with its message.
        frame = sys._getframe(1)
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM" and not name.startswith("__"):
            raise ImportError(text, name=module)
        raise AttributeError(text, name=name)

    getattr_.instead = instead  # type: ignore[attr-defined]  # for the test that looks through the trainers' sources
    return getattr_


def refused(name: str, instead: str) -> type[Any]:
    """A class that nothing is an instance of: `isinstance` answers, and making one says what to use in its place."""

    def init(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"zeroshard has no {name}. {instead}")

    return type(name, (), {"__init__": init, "__doc__": f"Not offered. {instead}", "__module__": "deepspeed"})


def refuse(name: str, instead: str) -> Callable[..., NoReturn]:
    """A function that says what to use in its place."""

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"zeroshard has no {name}. {instead}")

    return function
