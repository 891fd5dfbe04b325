"""Owns the display of a resolved config."""

from __future__ import annotations

import textwrap

from rich.text import Text

from zeroshard.engine.config.fields import Kind
from zeroshard.engine.config.load import Config, Entry
from zeroshard.errors import counted

_STYLES = {Kind.WORKS: "green", Kind.NO_MEANING: "yellow", Kind.REFUSED: "red"}
_MOST_LINES = 35
"""The maximum number of lines of `summary` below its title: with the settings in force, `config check` prints at most 40."""


def summary(config: Config, width: int) -> Text:
    """Return a list of the keys that the file or "auto" sets, and of computed keys, in lines of about `width` characters."""
    idle = []
    blocks: dict[str, list[Entry]] = {}
    for entry in config.entries():
        if entry.origin != "default" and entry.effect.kind is Kind.WORKS:
            blocks.setdefault(entry.path.rpartition(".")[0], []).append(entry)
        elif entry.origin != "default":
            idle.append(entry.path)
    ending = []
    if idle:
        ending = _wrapped(f"accepted, but without meaning here: {', '.join(idle)}", width)
    ending.append("--all prints every key, with the whole text of its effect.")
    room = _MOST_LINES - len(ending)
    lines = _of_blocks(blocks, width, wrap=True)
    if len(lines) > room:
        lines = _of_blocks(blocks, width, wrap=False)
    if len(lines) > room:
        ending.insert(0, f"... and {len(lines) - room + 1} more lines.")
        lines = lines[: room - 1]
    return Text("\n".join([_title(config), *lines, *ending]))


def _of_blocks(blocks: dict[str, list[Entry]], width: int, *, wrap: bool) -> list[str]:
    """Return the lines of all blocks. A key's effect, or its first sentence, is beside the key or, with `wrap`, below it."""
    lines = []
    for block, entries in blocks.items():
        names = [entry.path.rpartition(".")[2] for entry in entries]
        if block.endswith(".params"):  # all arguments have the same effect: do not repeat it
            arguments = [f"{name} {_value(entry)}" for name, entry in zip(names, entries, strict=True)]
            lines += _wrapped(f"{block}: {', '.join(arguments)}", width)
            continue
        indent = ""
        if block:
            lines.append(f"{block}:")
            indent = "  "
        column = max(map(len, names))
        for name, entry in zip(names, entries, strict=True):
            line = f"{indent}{name:<{column}}  {_value(entry):<12}"
            sentence = entry.effect.text.partition(". ")[0].removesuffix(".") + "."
            beside = [f"{line}  {text}" for text in (entry.effect.text, sentence) if len(line) + 2 + len(text) <= width]
            if beside:
                lines.append(beside[0])
                continue
            lines.append(line.rstrip())
            if wrap:
                lines += textwrap.wrap(
                    sentence, width, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    "
                )
    return lines


def _value(entry: Entry) -> str:
    if entry.origin == "file":
        return str(entry.value)
    return f"{entry.value} ({entry.origin})"


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False, max_lines=6
    )


def listing(config: Config, width: int) -> Text:
    """Return a list of all keys, with the full text of their effects, wrapped to `width` characters."""
    found = Text(_title(config))
    for entry in config.entries():
        kind = entry.effect.kind
        effect = textwrap.fill(f"{kind}: {entry.effect.text}", width, initial_indent="    ", subsequent_indent="    ")
        found.append(f"\n{entry.path} = {entry.value} ({entry.origin})\n").append(effect, _STYLES[kind])
    return found


def _title(config: Config) -> str:
    return f"The config, resolved for {counted(config.batch.world_size, 'rank')}:"
