"""README.md, the table of promises, is whole: it has each sentence of docs/design.md, and the tests that it names exist."""

from __future__ import annotations

import re

from folders import TESTS
from promises import TEST, promised, sentences, table


def test_each_sentence_has_its_tests_or_the_reason_why_there_is_none() -> None:
    assert [sentence for sentence, _ in table()] == sentences()
    for sentence, tests in table():
        assert tests.startswith("no test") or not TEST.sub("", tests).strip(", "), sentence


def test_each_test_exists() -> None:
    assert len(promised()) > 30
    for file, name in promised():
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"
