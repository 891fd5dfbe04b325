"""Owns the reading of the table of promises, tests/promises/README.md: each sentence of docs/design.md, and its tests."""

from __future__ import annotations

import re
from functools import cache

from folders import ROOT, TESTS

HEADING = re.compile(r"^\*\*([^*]+?)\.\*\* ")
SENTENCE_END = re.compile(r"(?<=[.:]) (?=[A-Zz\[])")
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
ROW = re.compile(r"^\| (?!sentence \||--- )(.+?) \| (.+) \|$", re.MULTILINE)
TEST = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")


def sentences() -> list[str]:
    """Return the sentences of "What is promised" in docs/design.md, without headings and the targets of links."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.split("\n## What is promised\n")[1].split("\n## ")[0]
    paragraphs = (" ".join(lines.split()).removeprefix("- ") for lines in re.split(r"\n\n|\n(?=- )", section))
    plain = (HEADING.sub("", LINK.sub(r"\1", paragraph)) for paragraph in paragraphs if paragraph)
    return [sentence for paragraph in plain for sentence in SENTENCE_END.split(paragraph)]


@cache
def table() -> list[tuple[str, str]]:
    """Return the rows of the table: a sentence, and its tests, or the reason why there is none."""
    return ROW.findall((TESTS / "promises" / "README.md").read_text(encoding="utf-8"))


@cache
def promised() -> set[tuple[str, str]]:
    """Return the table's tests: the file's path below tests/, and the function's name."""
    return {test for _, tests in table() for test in TEST.findall(tests)}
