"""Owns what a config key is: its type as people write it, and what it does here. Called by the blocks of config.schema.

Every key carries an `Effect`: it works, or has no meaning here (accepted, and the resolved config says so), or would change
what the user gets and is not offered (refused when it is switched on). Nothing is accepted and ignored in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

AUTO = "auto"


class Kind(StrEnum):
    """What a key does in zeroshard."""

    WORKS = "works"
    NO_MEANING = "has no meaning here"
    REFUSED = "not offered"


@dataclass(frozen=True)
class Effect:
    """What a key does in zeroshard, in a sentence."""

    kind: Kind
    text: str
    by_presence: bool = False
    """Refused whatever it holds: an empty block switches it on too."""

    def refuses(self, value: Any) -> bool:
        """Whether a key with this effect may not have this value."""
        return self.kind is Kind.REFUSED and not (value is None if self.by_presence else is_off(value))


def works(text: str) -> Effect:
    """A key that does its job."""
    return Effect(Kind.WORKS, text)


def no_meaning(text: str) -> Effect:
    """A key that is accepted with any value, since nothing here depends on it."""
    return Effect(Kind.NO_MEANING, text)


def refused(text: str, *, by_presence: bool = False) -> Effect:
    """A key that is accepted only while it is switched off, see `is_off`; with `by_presence`, only where it is null."""
    return Effect(Kind.REFUSED, text, by_presence)


def is_off(value: Any) -> bool:
    """Whether a value asks for nothing: false, null, or a block that is not enabled or holds nothing but such values."""
    if isinstance(value, dict):
        return not value["enabled"] if "enabled" in value else all(is_off(item) for item in value.values())
    return value is None or value is False or value in (0, "", "none")


def _number_from_text(value: Any) -> Any:
    """JSON has no integer 5e8, and people quote it: "5e8" is 500000000."""
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
Number = Annotated[float, BeforeValidator(_number_from_text)]
NonNegative = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0)]
PositiveNumber = Annotated[float, BeforeValidator(_number_from_text), Field(gt=0)]
DTYPE_NAMES = {
    "fp32": "float32", "float32": "float32", "fp16": "float16", "float16": "float16", "half": "float16", "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}  # fmt: skip
"""What people write, and what torch calls it. The command line reads the same."""
DType = Literal["fp32", "float32", "fp16", "float16", "half", "bf16", "bfloat16"]


class Block(BaseModel):
    """A JSON object with known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
