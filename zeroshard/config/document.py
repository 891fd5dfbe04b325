"""Owns docs/config/: one page for each block, written from the schema, so that it cannot drift. Called by cli."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from inspect import cleandoc
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from zeroshard.config.auto import RULES, rule_of
from zeroshard.config.keys import block_of, effect_of
from zeroshard.config.schema import Schema

_INDEX = "README.md"


def pages() -> dict[str, str]:
    """The text of each page by file name."""
    blocks = dict(_blocks(Schema))
    made = {f"{path}.md": _page(path, block) for path, block in blocks.items()}
    listed = "\n".join(f"- [`{path}`]({path}.md): {_purpose(block)}" for path, block in blocks.items())
    made[_INDEX] = (
        "# Config keys\n\n"
        "Written by `zeroshard config document` from the schema. `zeroshard config check FILE` shows what a file of yours comes "
        "to. A key *works*, or *has no meaning here* (it is accepted, and nothing depends on it), or is *not offered* (it is "
        'refused when it is switched on). "auto" is resolved as each page says; what only you know goes into '
        "`initialize(..., auto={...})`.\n\n"
        f"{listed}\n\n## Top level\n\n{_table('', Schema)}"
    )
    return made


def _blocks(block: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for key in block.model_fields:
        inner = block_of(block, key)
        if inner is not None:
            yield f"{prefix}{key}", inner
            yield from _blocks(inner, f"{prefix}{key}.")


def _purpose(block: type[BaseModel]) -> str:
    return cleandoc(block.__doc__ or "").partition("\n\n")[0].partition(": ")[2].replace("\n", " ")


def _page(path: str, block: type[BaseModel]) -> str:
    return f"# `{path}`\n\n{cleandoc(block.__doc__ or '')}\n\n{_table(f'{path}.', block)}\n[All blocks]({_INDEX})\n"


def _table(prefix: str, block: type[BaseModel]) -> str:
    rows = ['| key | type | default | "auto" | here |', "| --- | --- | --- | --- | --- |"]
    for key, field in block.model_fields.items():
        if block_of(block, key) is not None:
            cells = (f"[`{key}`]({prefix}{key}.md)", "block", "", "", effect_of(block, key).text)
        else:
            effect = effect_of(block, key)
            default = "required" if field.is_required() else f"`{_json(field.default)}`"
            cells = (
                f"`{key}`",
                _type(field.annotation),
                default,
                rule_of(f"{prefix}{key}").text,
                f"*{effect.kind}*: {effect.text}",
            )
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    arguments = [path for path in RULES if path.startswith(f"{prefix}params.")]
    rows += [f"| `{path.removeprefix(prefix)}` | | | {RULES[path].text} | an argument |" for path in arguments]
    return "\n".join(rows) + "\n"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _type(annotation: Any) -> str:
    """A type as people say it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(option) for option in get_args(annotation)))
    if origin is Literal:
        return ", ".join(f"`{_json(option)}`" for option in get_args(annotation))
    names = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", Any: "any"}
    return names.get(annotation) or {dict: "object", list: "list"}.get(origin or annotation, str(annotation))
