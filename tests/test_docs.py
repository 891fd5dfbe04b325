"""The documentation: its links, the API page, the messages of errors, both languages, and the code, which is run."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import json5
import pytest
from documents import DOCS, ROOT, Block, blocks, headings, links, pages, program, prose, slug

import zeroshard
from zeroshard import ZeroshardError
from zeroshard.errors import TROUBLESHOOTING

PACKAGE = Path(zeroshard.__file__).parent
RUN = {
    "README.md": (2, 2),
    "docs/quick_start.md": (4, 2),
    "docs/loops.md": (7, 0),
    "docs/tutorials/gpt.md": (7, 1),
    "docs/tutorials/llama_lora.md": (4, 1),
    "docs/tutorials/offload.md": (6, 1),
    "docs/tutorials/resume.md": (3, 1),
    "docs/tutorials/configs.md": (5, 0),
    "docs/migration/deepspeed.md": (1, 2),
    "docs/migration/fsdp2.md": (1, 0),
    "docs/migration/ddp.md": (2, 0),
}
"""Pages whose code is run: (blocks that run, or are files that others run; blocks that do not). Others are only parsed."""
ENGLISH_ONLY = {"docs/loops.md"}
TRANSLATED = {"README.zh-CN.md": "README.md"} | {
    f"docs/zh-CN/{page.removeprefix('docs/')}": page
    for page in RUN
    if page.startswith("docs/") and page not in ENGLISH_ONLY
}
NAMES = [name for name in zeroshard.__all__ if name != "checkpointing"]


def names_of(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


# ---------------------------------------------------------------------- links


def test_links_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.is_file():
                broken.append(f"{page}: {link}: there is no such file")
            elif anchor and anchor not in {slug(text) for _, text in headings(target)}:
                broken.append(f"{page}: {link}: there is no such heading")
    assert not broken, "\n".join(broken)


def test_every_page_is_on_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert f" {page.relative_to(DOCS).as_posix()}\n" in menu, page


# ---------------------------------------------------------------------- the API page


def directives() -> dict[str, str]:
    """The objects of the API page, by the name that they have there."""
    found = re.findall(r"^::: (\S+)\n    options: \{heading: ([^,(]+)", (DOCS / "api.md").read_text(), re.M)
    return {heading.strip(): target for target, heading in found}


def test_the_api_page_has_every_public_name() -> None:
    found = directives()
    for public in NAMES:
        module, _, attribute = found[f"zeroshard.{public}"].rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(zeroshard, public), public
    assert importlib.import_module(found["zeroshard.checkpointing"]) is zeroshard.checkpointing


def members(cls: type) -> dict[str, Any]:
    """What a class of ours offers beside what torch or Python gave it."""
    own = [one for one in cls.__mro__ if one.__module__.startswith("zeroshard.")]
    return {name: value for one in reversed(own) for name, value in vars(one).items() if not name.startswith("_")}


def test_every_public_method_is_documented() -> None:
    missing = []
    for name in NAMES:
        value = getattr(zeroshard, name)
        found = members(value) if inspect.isclass(value) else {}
        called = {n: v for n, v in found.items() if callable(v) or isinstance(v, property | classmethod | staticmethod)}
        missing += [f"{name}.{member}" for member in called if not inspect.getdoc(getattr(value, member))]
    assert not missing


# ---------------------------------------------------------------------- errors


def errors() -> list[type[ZeroshardError]]:
    found = [getattr(zeroshard, name) for name in NAMES]
    return [one for one in found if inspect.isclass(one) and issubclass(one, ZeroshardError)]


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__name__)
def test_an_error_says_where_to_read_on(error: type[ZeroshardError]) -> None:
    page, _, anchor = error.read_on().partition("#")
    assert anchor in {slug(text) for level, text in headings(ROOT / page) if level == 2}
    raised = error("a sentence.")
    assert str(raised) == "a sentence."
    assert traceback.format_exception_only(raised)[-1] == f"see {page}#{anchor}\n"


def test_an_error_of_a_private_class_leads_to_its_public_one() -> None:
    private = type("_Private", (zeroshard.UsageError,), {})
    assert private.read_on() == f"{TROUBLESHOOTING}#usageerror"


def test_the_messages_are_those_of_the_code() -> None:
    said = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        said |= {node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    classes, seen = {error.__name__ for error in errors()}, 0
    section = ""
    for level, text in headings(ROOT / TROUBLESHOOTING):
        section = text if level == 2 else section
        if level == 3 and section in classes and not text[0].isupper():
            seen += 1
            assert any(text in sentence for sentence in said), text
    assert seen > 40


# ---------------------------------------------------------------------- languages


def test_both_languages_are_in_step() -> None:
    for translated, original in TRANSLATED.items():
        there, here = ROOT / translated, ROOT / original
        assert [level for level, _ in headings(there)] == [level for level, _ in headings(here)], translated
        assert [_code(block) for block in blocks(there)] == [_code(block) for block in blocks(here)], translated
        assert _tables(there) == _tables(here), f"{translated}: rows of tables"
    assert set(names_of(list((DOCS / "zh-CN").rglob("*.md")))) == set(TRANSLATED) - {"README.zh-CN.md"}


def _code(block: Block) -> tuple[Any, ...]:
    return block.language, block.title, block.text, block.exempt is None, block.hidden


def _tables(page: Path) -> list[int]:
    """Cells of each row."""
    return [line.count("|") for line in prose(page) if line.startswith("|")]


# ---------------------------------------------------------------------- code


def test_it_is_known_what_runs() -> None:
    counts = {}
    for name in RUN:
        shown = [block for block in blocks(ROOT / name) if not block.hidden]
        counts[name] = (sum(block.runs for block in shown), sum(not block.runs for block in shown))
    assert counts == RUN


def test_code_can_be_read() -> None:
    """Also what does not run: it is Python or JSON, and what it names in zeroshard is there."""
    for page in pages():
        for block in blocks(page):
            if block.language == "json":
                json5.loads(block.text if block.text.lstrip().startswith("{") else f"{{{block.text}}}")
            for text in _python(block):
                tree = ast.parse(text, f"{page}, line {block.line}")
                for node in ast.walk(tree):
                    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zeroshard":
                        assert hasattr(zeroshard, node.attr) or importlib.import_module(f"zeroshard.{node.attr}"), page


def _python(block: Block) -> list[str]:
    if block.language == "diff":
        return [block.side("-"), block.side("+")]
    return [block.text] if block.language == "python" else []


@pytest.mark.full
@pytest.mark.parametrize("name", RUN)
def test_code_runs(name: str, tmp_path: Path) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="120", PYTHONPATH=f"{ROOT}")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    script = tmp_path / "page.py"
    script.write_text(program(ROOT / name))
    folder = tmp_path / "empty"
    folder.mkdir()
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
