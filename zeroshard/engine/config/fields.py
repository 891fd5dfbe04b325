"""Owns the descriptions of config keys: their types, and their effects in zeroshard.

Every key has an `Effect`: it works, has no meaning in zeroshard, or is not supported. zeroshard accepts a key without meaning
and lists it in the resolved config. A key that is not supported would change the result, so switching it on raises an
error. No key is ignored silently.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from zeroshard.errors import ConfigError

AUTO = "auto"


class Kind(StrEnum):
    """A kind of effect that a key has in zeroshard."""

    WORKS = "works"
    NO_MEANING = "has no meaning here"
    REFUSED = "not supported"


@dataclass(frozen=True)
class Effect:
    """The effect of a config key in zeroshard. `text` describes the effect."""

    kind: Kind
    text: str
    by_presence: bool = False
    """Whether the key is refused with any value except null, since even an empty block switches the feature on."""

    def refuses(self, value: Any) -> bool:
        """Return whether this effect refuses a value of the key."""
        if self.kind is not Kind.REFUSED:
            return False
        if self.by_presence:
            return value is not None
        return not is_off(value)


works = partial(Effect, Kind.WORKS)
"""Declares a key that works."""
no_meaning = partial(Effect, Kind.NO_MEANING)
"""Declares a key that is accepted with any value, since nothing in zeroshard depends on it."""
refused = partial(Effect, Kind.REFUSED)
"""Declares a key that is accepted only if it is off (`is_off`); with `by_presence`, only if it is null."""


def is_off(value: Any) -> bool:
    """Return whether a value enables nothing: false, null, 0, "", "none", or a block of such values or with `enabled` off."""
    if isinstance(value, dict):
        if "enabled" in value:
            return not value["enabled"]
        return all(is_off(item) for item in value.values())
    return value is None or value is False or value in (0, "", "none")


def _number_from_text(value: Any) -> Any:
    """Convert a quoted number. JSON has no integer 5e8, so configs contain "5e8" for 500000000."""
    if isinstance(value, bool):
        raise ValueError("a number was expected")
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() else number
    return value


Count = Annotated[int, BeforeValidator(_number_from_text), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_number_from_text), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0)]
PositiveNumber = Annotated[float, BeforeValidator(_number_from_text), Field(gt=0)]
DTYPE_NAMES = {
    "fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16", "half": "float16", "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}  # fmt: skip
"""torch's names of dtypes, by the names in configs and on the command line."""


def _without_torch(value: Any) -> Any:
    """Return "bfloat16" for "torch.bfloat16" and for torch.bfloat16 itself."""
    if isinstance(value, str) or type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return value


DType = Annotated[
    Literal["fp32", "float32", "fp16", "float16", "half", "bf16", "bfloat16"], BeforeValidator(_without_torch)
]
StateDType = Annotated[Literal["fp32", "float32", "bf16", "bfloat16", "uint8"], BeforeValidator(_without_torch)]
HalfDType = Annotated[Literal["bfloat16", "bf16", "float16", "fp16", "half"], BeforeValidator(_without_torch)]


class ConfigBlock(BaseModel):
    """A JSON object that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'stage'?` or a full stop if no name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    if not near:
        return "."
    return f"; did you mean {near[0]!r}?"


def check_arguments(make: Callable[..., Any], params: Mapping[str, Any], block: str, name: str) -> None:
    """Raise for arguments that cannot be taken. The error names their keys in the config.

    Args:
        make: creates an optimizer or a scheduler, as its class does. The config does not set the first argument.
        params: the arguments by name.
        block: "optimizer" or "scheduler".
        name: the optimizer's or scheduler's name.

    Raises:
        ConfigError: an argument is unknown, missing, or a number in quotes.
    """
    _, *rest = inspect.signature(make).parameters.values()
    accepted = [one.name for one in rest]
    if not any(one.kind is one.VAR_KEYWORD for one in rest):
        for key in params:
            if key not in accepted:
                raise ConfigError(
                    f"{block}.params.{key}: {name} takes no such argument{nearest(key, accepted)} Pass only "
                    f"{', '.join(accepted)}."
                )
    defaults = {one.name: one.default for one in rest}
    for key, value in params.items():
        takes_number = isinstance(defaults.get(key), float | int) and not isinstance(defaults[key], bool)
        items = [value]
        if isinstance(value, Sequence) and not isinstance(value, str):
            items = list(value)
        for item in items:
            if isinstance(item, str) and (takes_number or _number_from_text(item) != item):
                raise ConfigError(f"{block}.params.{key}: {item!r} is text: write the number without quotes.")
    for one in rest:
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in params:
            raise ConfigError(f"{block}.params.{one.name}: {name} requires this argument. Add it to the config.")
