"""Owns `zeroshard explain`, which prints the documentation of an error: its meaning and remedy."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from zeroshard.errors import PAGES, UsageError

_SECTION = re.compile(r"^## ", re.MULTILINE)
_MESSAGE = re.compile(r"^### ", re.MULTILINE)
_NEAREST = 5


def explain(
    what: Annotated[str | None, typer.Argument(
        metavar="NAME", help="The class of an error, such as UsageError, or its message in quotes; default: list all.")] = None,
) -> None:  # fmt: skip
    """Explain an error: the meaning of its message, and the remedy."""
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(found(what, page())))


def page() -> str:
    """Return the sections of all error pages as one text, from the installed package or the docs of a checkout."""
    sections = []
    for name in PAGES:
        place: Traversable = files("zeroshard") / name
        if not place.is_file():
            place = Path(__file__).parent.parent.parent / "docs" / name
        if not place.is_file():
            raise UsageError(f"this installation has no {name}: reinstall zeroshard from a wheel or a checkout.")
        text = place.read_text(encoding="utf-8")
        first = _SECTION.search(text)  # a title and an introduction are above it
        sections.append(text[first.start() :] if first else "")
    return "\n".join(sections)


def found(what: str | None, text: str) -> str:
    """Return the part of `text` about the class `what`, or about each message that contains `what` or is contained in it.

    Without `what`, return the table of contents. If no message fits, return the nearest headings.
    """
    sections = dict(_split(_SECTION, text))
    entries = {name: _split(_MESSAGE, body) for name, body in sections.items()}
    if what is None:
        lines = ["`zeroshard explain NAME` explains an error, or a message in quotes.", ""]
        for name, pairs in entries.items():
            if pairs:
                lines.append(f"- **{name}**: " + "; ".join(message for message, _ in pairs))
        return "\n".join(lines)
    by_name = {name.lower(): name for name in sections}
    called = by_name.get(what.lower().removeprefix("zeroshard.").removeprefix("errors."))
    if called is not None:
        return f"## {called}\n{sections[called]}"
    words = _plain(what)
    messages = list(chain.from_iterable(entries.values()))
    fitting = [f"### {name}\n{body}" for name, body in messages if _plain(name) in words or words in _plain(name)]
    if not fitting:
        lines = [f"No error is called {what!r}, and no message has these words. The nearest:", ""]
        lines += [f"- {one}" for one in _nearest(words, [*sections, *(message for message, _ in messages)])]
        return "\n".join([*lines, "", "`zeroshard explain` lists all errors and messages."])
    return "\n".join(fitting)


def _nearest(words: str, headings: list[str]) -> list[str]:
    """Return the headings that share the most words with `words`; among equals, the most similar in spelling."""

    def likeness(heading: str) -> tuple[int, float]:
        plain = _plain(heading)
        return len({*plain.split()} & {*words.split()}), SequenceMatcher(None, plain, words).ratio()

    return sorted(headings, key=likeness, reverse=True)[:_NEAREST]


def _split(heading: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Return pairs of a heading and the text below it."""
    parts = (part.partition("\n") for part in heading.split(text)[1:])
    return [(name.strip(), body) for name, _, body in parts]


def _plain(words: str) -> str:
    return " ".join(words.lower().replace("`", "").split())
