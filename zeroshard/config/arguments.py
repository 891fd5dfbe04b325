"""Owns what may stand in a block's `params`: the arguments of the class that the block names. Called by optim."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zeroshard.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'stage'?`, or a full stop where nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def check_arguments(cls: type[Any], params: Mapping[str, Any], block: str) -> None:
    """Refuse arguments that a class cannot take, before it says so in words that do not name them.

    Args:
        cls: an optimizer or a scheduler: its first argument is no argument of the config's.
        params: by name.
        block: "optimizer" or "scheduler".

    Raises:
        ConfigError: an argument is unknown, missing, or a number in quotes.
    """
    _, *rest = inspect.signature(cls).parameters.values()
    accepted = {one.name for one in rest}
    if not any(one.kind is one.VAR_KEYWORD for one in rest):
        for key in params:
            if key not in accepted:
                raise ConfigError(
                    f"{block}.params.{key}: {cls.__name__} takes no such argument{nearest(key, accepted)} "
                    f"It takes {', '.join(one.name for one in rest)}."
                )
    for key, value in params.items():
        for item in value if isinstance(value, Sequence) and not isinstance(value, str) else (value,):
            if isinstance(item, str) and _is_number(item):
                raise ConfigError(f"{block}.params.{key}: {item!r} is text: write the number without quotes.")
    missing = [one.name for one in rest if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    for name in missing:
        if name not in params:
            raise ConfigError(f"{block}.params.{name}: {cls.__name__} needs it.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
