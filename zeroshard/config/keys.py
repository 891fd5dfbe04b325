"""Owns the walk over the keys of the schema: which there are, what each does, what it is set to. Called by load and document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from zeroshard.config.fields import Effect
from zeroshard.config.schema import Schema


def block_of(block: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The block that a key of another block holds, or None where it holds a plain value."""
    field = block.model_fields.get(key)
    options = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def effect_of(block: type[BaseModel], key: str) -> Effect:
    """What a key does here."""
    return next(item for item in block.model_fields[key].metadata if isinstance(item, Effect))


def paths_of(block: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The path of every key below a block."""
    for key in block.model_fields:
        inner = block_of(block, key)
        if inner is None:
            yield f"{prefix}{key}"
        else:
            yield from paths_of(inner, f"{prefix}{key}.")
            if key == "bf16":
                yield from paths_of(inner, "bfloat16.")


def walk(block: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool, Effect]]:
    """(path, value, whether it was set, effect) of every key below."""
    for key in type(block).model_fields:
        value, path = getattr(block, key), f"{prefix}{key}"
        if isinstance(value, BaseModel):
            yield from walk(value, f"{path}.")
        else:
            yield path, value, key in block.model_fields_set, effect_of(type(block), key)


KEYS: dict[str, None] = dict.fromkeys(paths_of(Schema))
"""The path of every key of the schema."""
