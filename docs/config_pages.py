"""Write the pages of docs/config/ from the schema: `python docs/config_pages.py`. A test compares them."""

from __future__ import annotations

import json
import types
from collections.abc import Collection, Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from zeroshard.engine.config.auto import RULES, rule_of
from zeroshard.engine.config.fields import Kind
from zeroshard.engine.config.schema import MONITORS, Schema, block_of, effect_of

FOLDER = Path(__file__).parent / "config"
_INDEX = "README.md"
_OTHERS = "other_keys.md"
_FIRST = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device", "bf16.enabled", "fp16.enabled",
    "optimizer.type", "scheduler.type",
)  # fmt: skip
"""The keys that most configs set: they are first in the list of keys, and in the table of their block."""
_SHARED = {
    "inside_zero_optimization.md": (
        "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "zero_optimization.leaf_module"),
    "optimizer_and_scheduler.md": ("optimizer", "scheduler"),
    "precision.md": ("bf16", "fp16", "torch_autocast", "data_types"),
    "monitors.md": (*MONITORS, "comms_logger"),
}  # fmt: skip
"""Pages with several blocks. Each other block has a page of its own."""


def pages() -> dict[str, str]:
    """Return the text of each page of docs/config/, by file name."""
    blocks = dict(_blocks(Schema))
    made = {}
    for path, block in blocks.items():
        if "#" not in _place(path):
            made[_place(path)] = f"# {_section(path, block)}[All keys]({_INDEX})\n"
    for name, paths in _SHARED.items():
        title = name.removesuffix(".md").replace("_", " ").replace("zero optimization", "`zero_optimization`")
        sections = "".join(f"## {_section(path, blocks[path])}" for path in paths)
        made[name] = f"# {title[0].upper()}{title[1:]}\n\n{sections}[All keys]({_INDEX})\n"
    made[_INDEX] = (
        "# Config keys\n\n"
        "zeroshard reads DeepSpeed configs. `zeroshard config check FILE` shows how zeroshard resolves your config. Each key "
        "belongs to one of three kinds:\n\n"
        "- It *works*.\n"
        "- It *has no meaning here*: zeroshard accepts the key and ignores it.\n"
        "- It is *not supported*: switching it on raises an error.\n\n"
        'The value "auto" means the default, unless the table names another value. If the table says that you must pass the '
        'value to `initialize`, write for example `auto={"lr": 3e-3}`. Also pass each argument of an '
        'optimizer or scheduler that is "auto" and not in a table. A block cannot be "auto". '
        "The [glossary](../glossary.md) defines unit, shard, bucket and "
        "other words.\n\n"
        f"## The keys that most configs set\n\n{_first()}\n## Top level\n\n{_table('', Schema, [Kind.WORKS])}\n"
        f"[Keys of the top level that have no meaning here, or are not supported]({_OTHERS})\n"
    )
    made[_OTHERS] = (
        "# Other config keys\n\n"
        "These keys of the top level either *have no meaning here*, or are *not supported*. [Config keys](README.md) explains both "
        "kinds.\n\n"
        f"{_table('', Schema, [Kind.NO_MEANING, Kind.REFUSED])}\n[All keys]({_INDEX})\n"
    )
    return made


def _section(path: str, block: type[BaseModel]) -> str:
    """Return a block's heading, text and tables."""
    text = cleandoc(block.__doc__ or "").partition(": ")[2]
    return f"`{path}`\n\n{_sentence(text)}\n\n{_tables(f'{path}.', block)}\n"


def _place(path: str, key: str = "") -> str:
    """Return the place of a block, or of one of its keys: the page, and an anchor if the place is not its beginning."""
    for name, paths in _SHARED.items():
        if path in paths:
            return f"{name}#{path}.{key}" if key else f"{name}#{path.replace('.', '')}"
    return f"{path}.md#{path}.{key}" if key else f"{path}.md"


def _blocks(block: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    for key in block.model_fields:
        inner = block_of(block, key)
        if inner is not None:
            yield f"{prefix}{key}", inner
            yield from _blocks(inner, f"{prefix}{key}.")


def _first() -> str:
    """Return the table of the keys that most configs set, with a link to each key's row."""
    rows = ["| key | effect |", "| --- | --- |"]
    blocks: dict[str, type[BaseModel]] = {"": Schema, **dict(_blocks(Schema))}
    for path in _FIRST:
        parent, _, key = path.rpartition(".")
        place = _place(parent, key) if parent else f"#{key}"
        rows.append(_row(f"[`{path}`]({place})", _sentence(effect_of(blocks[parent], key).text)))
    return "\n".join(rows) + "\n"


def _tables(prefix: str, block: type[BaseModel]) -> str:
    """Return the table of the keys that work, and folded tables of the others."""
    kinds = [effect_of(block, key).kind for key in block.model_fields]
    parts = []
    if Kind.WORKS in kinds:
        parts.append(_table(prefix, block, [Kind.WORKS]))
    if arguments := _arguments(prefix):
        parts.append(arguments)
    for kind, title in (
        (Kind.NO_MEANING, "Keys that have no meaning here"),
        (Kind.REFUSED, "Keys that are not supported"),
    ):
        if kind in kinds:
            summary = f"<summary>{title}: {kinds.count(kind)}</summary>"
            parts.append(f"<details markdown>\n{summary}\n\n{_table(prefix, block, [kind])}\n</details>\n")
    return "\n".join(parts)


def _table(prefix: str, block: type[BaseModel], kinds: Collection[Kind]) -> str:
    """Return a table of a block's keys of some kinds, one row for each, with the key as its id."""
    rows = ["| key | type; default | effect |", "| --- | --- | --- |"]
    for key in sorted(block.model_fields, key=lambda key: f"{prefix}{key}" not in _FIRST):
        field, effect = block.model_fields[key], effect_of(block, key)
        if effect.kind not in kinds:
            continue
        text = effect.text
        if len(kinds) > 1:
            text = f"*{effect.kind}*: {text}"
        elif effect.kind is Kind.NO_MEANING:
            text = f"No effect: {text}"
        else:
            text = _sentence(text)
        if block_of(block, key) is not None:
            rows.append(_row(f"{_id(f'{prefix}{key}')}[`{key}`]({_place(f'{prefix}{key}')})", "block", text))
            continue
        default = "required"
        if not field.is_required():
            default = f"`{_json(field.default)}`"
        rule = rule_of(f"{prefix}{key}")
        if effect.kind is Kind.WORKS and rule is not rule_of("") and '"auto"' not in text:
            text = f'{text} "auto": {rule.text}.'
        rows.append(_row(f"{_id(f'{prefix}{key}')}`{key}`", f"{_type(field.annotation)}; {default}", text))
    return "\n".join(rows) + "\n"


def _arguments(prefix: str) -> str:
    """Return the table of the values of "auto" in a block's `params`; empty if it has none."""
    rows = []
    for path in RULES:
        if path.startswith(f"{prefix}params."):
            name = path.removeprefix(prefix)
            rows.append(_row(f"{_id(path)}`{name}`", RULES[path].text))
    if not rows:
        return ""
    header = '`"auto"` in `params` resolves to these values:\n\n| key | value of "auto" |\n| --- | --- |\n'
    return header + "\n".join(rows) + "\n"


def _sentence(text: str) -> str:
    """Return a text with a capital letter, unless it begins with a name or a value."""
    first = text.partition(" ")[0].rstrip(",")
    if not first.replace("-", "").isalpha() or first in ("torch", "true", "false", "zeroshard"):
        return text
    return text[0].upper() + text[1:]


def _id(key: str) -> str:
    return f'<a id="{key}"></a>'


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _json(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _type(annotation: Any) -> str:
    """Return a type in plain words."""
    origin = get_origin(annotation)
    if origin is tuple:
        return "list"
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(", ".join(map(_type, get_args(annotation))).split(", "))
        return " or ".join(filter(None, [", ".join(others), last]))
    if origin is Literal:
        return ", ".join(f"`{_json(option)}`" for option in get_args(annotation))
    names = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null", Any: "any"}
    return names.get(annotation) or {dict: "object", list: "list"}.get(origin or annotation, str(annotation))


if __name__ == "__main__":
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for name, page in pages().items():
        (FOLDER / name).write_text(page, encoding="utf-8")
