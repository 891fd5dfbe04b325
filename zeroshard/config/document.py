"""Owns the display of configs: a resolved one as a table, and the schema as the pages of docs/config/."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from inspect import cleandoc
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from rich.markup import escape
from rich.table import Table

from zeroshard.config.auto import RULES, rule_of
from zeroshard.config.fields import Kind
from zeroshard.config.load import Config
from zeroshard.config.schema import Schema, block_of, effect_of

_INDEX = "README.md"
_STYLES = {Kind.WORKS: "green", Kind.NO_MEANING: "yellow", Kind.REFUSED: "red"}


def config_table(config: Config, *, defaults: bool = True) -> Table:
    """Make a row for each key; without `defaults`, only for keys that the file or "auto" set, or that were computed."""
    table = Table(title=f"the config, resolved for {config.batch.world_size} ranks", title_justify="left")
    for column in ("key", "value", "from", "here"):
        table.add_column(column, overflow="fold")
    for entry in config.entries():
        if defaults or entry.origin != "default":
            kind = entry.effect.kind
            effect = f"[{_STYLES[kind]}]{kind}[/]: {escape(entry.effect.text)}"
            table.add_row(entry.path, str(entry.value), entry.origin, effect)
    return table


def pages() -> dict[str, str]:
    """Return the text of each page of docs/config/, by file name."""
    blocks = dict(_blocks(Schema))
    made = {}
    listed = ""
    for path, block in blocks.items():
        text = cleandoc(block.__doc__ or "")
        purpose = text.partition("\n\n")[0].partition(": ")[2].replace("\n", " ")
        listed += f"- [`{path}`]({path}.md): {purpose}\n"
        made[f"{path}.md"] = f"# `{path}`\n\n{text}\n\n{_table(f'{path}.', block)}\n[All blocks]({_INDEX})\n"
    made[_INDEX] = (
        "# Config keys\n\n"
        "Written by `zeroshard config document` from the schema. `zeroshard config check FILE` shows what a file of yours comes "
        "to. A key *works*, or *has no meaning here* (it is accepted, and nothing depends on it), or is *not offered* (it is "
        'refused when it is switched on). "auto" is resolved as each page says; what only you know goes into '
        "`initialize(..., auto={...})`.\n\n"
        f"{listed}\n## Top level\n\n{_table('', Schema)}"
    )
    return made


def _blocks(block: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for key in block.model_fields:
        inner = block_of(block, key)
        if inner is not None:
            yield f"{prefix}{key}", inner
            yield from _blocks(inner, f"{prefix}{key}.")


def _table(prefix: str, block: type[BaseModel]) -> str:
    rows = ['| key | type | default | "auto" | here |', "| --- | --- | --- | --- | --- |"]
    for key, field in block.model_fields.items():
        if block_of(block, key) is not None:
            cells = (f"[`{key}`]({prefix}{key}.md)", "block", "", "", effect_of(block, key).text)
        else:
            effect = effect_of(block, key)
            default = "required"
            if not field.is_required():
                default = f"`{_json(field.default)}`"
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
