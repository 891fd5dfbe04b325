"""Owns how a resolved config is shown: key by key, with its origin and what it does here. Called by engine and cli."""

from __future__ import annotations

from rich.table import Table

from zeroshard.config.fields import Kind
from zeroshard.config.load import Config

_STYLES = {Kind.WORKS: "green", Kind.NO_MEANING: "yellow", Kind.REFUSED: "red"}


def config_table(config: Config, *, defaults: bool = True) -> Table:
    """One row for each key; without `defaults`, only for keys that the file or "auto" set, or that were computed."""
    ranks = config.batch.world_size
    table = Table(title=f"the config, resolved for {ranks} ranks", title_justify="left")
    for column in ("key", "value", "from", "here"):
        table.add_column(column, overflow="fold")
    for entry in config.entries():
        if defaults or entry.origin != "default":
            kind = entry.effect.kind
            table.add_row(
                entry.path, str(entry.value), entry.origin, f"[{_STYLES[kind]}]{kind}[/]: {_escape(entry.effect.text)}"
            )
    return table


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
