"""The documentation: links, the API page, error messages, both languages, and the code, which is run."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import json5
import pytest
import torch
from documents import DOCS, ROOT, Block, anchors, blocks, headings, links, pages, program, prose

import zeroshard

PACKAGE = Path(zeroshard.__file__).parent
RUN = (
    "README.md", "docs/quick_start.md", "docs/loops.md", "docs/tutorials/gpt.md", "docs/tutorials/llama_lora.md",
    "docs/tutorials/offload.md", "docs/tutorials/resume.md", "docs/migration/deepspeed.md",
    "docs/migration/fsdp2.md", "docs/migration/ddp.md", "docs/cookbook.md", "docs/sequences.md",
    "docs/composing.md", "docs/mixtures_of_experts.md",
)  # fmt: skip
"""Pages whose code is run. That of others is only parsed."""
LONGER = {"docs/design.md": 3000, "docs/troubleshooting.md": 2850}
LLMS = DOCS / "llms.txt"
TROUBLES = DOCS / "troubleshooting.md"
NAMES = [name for name in zeroshard.__all__ if name != "checkpointing"]


def names_of(paths: Iterable[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(paths)]


TRANSLATED = {page.replace("/zh-CN/", "/"): page for page in names_of((DOCS / "zh-CN").rglob("*.md"))}
TRANSLATED["README.md"] = "README.zh-CN.md"


# ---------------------------------------------------------------------- links


def test_links_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.is_file():
                broken.append(f"{page}: {link}: there is no such file")
            elif anchor and anchor not in anchors(target):
                broken.append(f"{page}: {link}: there is no such heading")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("script", ["pictures.py", "site_pages.py"])
def test_the_site_is_built_without_zeroshard_and_torch(script: str) -> None:
    """`make docs` installs the extra `docs` only."""
    tree = ast.parse((DOCS / script).read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "mkdocs"}


def test_every_page_is_on_the_menu_or_linked_from_a_page_that_is() -> None:
    """The menu fits on a screen; links lead to the other pages."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = re.findall(r"^      - .*: (\S+)\.md$", menu, re.MULTILINE)
    assert len(entries) <= 35
    outside = {"index": "README.md", "zh-CN/index": "README.zh-CN.md", "CONTRIBUTING": "CONTRIBUTING.md"}
    to_read = [ROOT / outside[entry] if entry in outside else DOCS / f"{entry}.md" for entry in entries]
    to_read = [page for page in to_read if page.is_file()]  # the changes, and the notebook's page, lead nowhere else
    reached = set(to_read)
    while to_read:
        page = to_read.pop()
        linked = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        to_read += [one for one in linked - reached if one.suffix == ".md" and one.is_file()]
        reached |= linked
    assert not {*DOCS.rglob("*.md")} - reached


# ---------------------------------------------------------------------- the page for assistants


def test_the_page_for_assistants_leads_to_every_page_of_the_menu() -> None:
    linked = set(re.findall(r"\]\(([^)]+)\)", LLMS.read_text(encoding="utf-8")))
    assert all((DOCS / page).is_file() for page in linked)
    menu = re.findall(r"^      - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    english = {page for page in menu if (DOCS / page).is_file() and not page.startswith("zh-CN/")}
    assert english <= linked


def test_the_script_for_assistants_runs_twice_and_resumes(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", LLMS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    run("import runpy\nfor _ in range(2):\n    runpy.run_path('../train.py')\n", tmp_path)
    lines = (tmp_path / "empty" / "runs" / "steps.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, lines) if "step" in one] == [*range(1, 41)]
    assert (tmp_path / "empty" / "checkpoints" / "latest").read_text().strip() == "step40"


# ---------------------------------------------------------------------- the API page


def api() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))


def directives() -> dict[str, str]:
    """List the objects of the API pages, by the name that they have there."""
    found = re.findall(r"^::: (\S+)\n    options: \{heading: ([^,(]+)", api(), re.M)
    return {heading.strip(): target for target, heading in found}


def test_methods_for_authors_of_trainers_are_on_the_page_of_trainers() -> None:
    """Each method of `Sharded` that the page of training leaves out is there."""
    (left_out,) = re.findall(r'^::: zeroshard\.model\.sharded\.Sharded\n.*"!\^\(([^)]+)\)\$"', api(), re.M)
    found = directives()
    named = {name.removeprefix("Sharded.") for name in found if name.startswith("Sharded.") and " " not in name}
    named.remove("checkpoints")
    assert {*left_out.split("|")} == named
    assert all(found[f"Sharded.{member}"] == f"zeroshard.model.sharded.Sharded.{member}" for member in named)


def test_the_api_page_has_every_public_name() -> None:
    found = directives()
    for public in NAMES:
        module, _, attribute = found[f"zeroshard.{public}"].rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is getattr(zeroshard, public), public
    assert importlib.import_module(found["zeroshard.checkpointing"]) is zeroshard.checkpointing


def test_every_public_name_and_method_is_documented() -> None:
    missing = [name for name in zeroshard.__all__ if not inspect.getdoc(getattr(zeroshard, name))]
    classes = [value for name in NAMES if inspect.isclass(value := getattr(zeroshard, name))]
    for public in classes:
        for owner in [one for one in public.__mro__ if one.__module__.startswith("zeroshard.")]:
            for name, value in vars(owner).items():
                is_called = callable(value) or isinstance(value, property | classmethod | staticmethod)
                if is_called and not name.startswith("_") and not inspect.getdoc(getattr(public, name)):
                    missing.append(f"{public.__name__}.{name}")
    assert not missing


# ---------------------------------------------------------------------- length


@pytest.mark.parametrize("page", names_of(DOCS.rglob("*.md")))
def test_a_page_can_be_read_in_one_go(page: str) -> None:
    """Words outside of code; bars of tables are none. A longer page is split."""
    words = [word for line in prose(ROOT / page) for word in line.split() if any(map(str.isalnum, word))]
    assert len(words) <= LONGER.get(page, 1500)


# ---------------------------------------------------------------------- tables and pictures that a script makes


def test_pictures_are_those_of_their_script() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))
    assert not drawn["outdated"](), "run `python docs/pictures.py`"
    for draw in drawn["PICTURES"].values():
        assert ElementTree.fromstring(draw()).tag.endswith("svg")


def test_the_table_of_stages_is_that_of_the_formulas() -> None:
    written = runpy.run_path(str(DOCS / "stage_memory.py"))
    for page in written["PAGES"]:
        text = page.read_text(encoding="utf-8")
        assert text == written["with_rows"](text), f"{page}: run `python docs/stage_memory.py`"


# ---------------------------------------------------------------------- errors


def test_the_messages_are_those_of_the_code() -> None:
    said = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        said |= {node.value for node in tree if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    shown = prose(TROUBLES)
    tables = [number for number, line in enumerate(shown) if line.startswith("| part of the message |")]
    messages = []
    for start in tables:
        rows = itertools.takewhile(lambda line: line.startswith("|"), shown[start + 2 :])
        messages += [re.findall("`([^`]+)`", row)[0] for row in rows]
    assert len(tables) == 2 and len(messages) > 20
    for message in messages:
        assert any(message in sentence for sentence in said), message


def test_errors_of_torch_itself_are_on_the_page() -> None:
    """The messages are those that torch raises for an fp32 input to a bf16 model."""
    named = re.findall("`([^`]+)`", TROUBLES.read_text(encoding="utf-8"))
    linear, conv = torch.nn.Linear(4, 4).bfloat16(), torch.nn.Conv1d(4, 4, 1).bfloat16()
    norm = torch.nn.LayerNorm(4).bfloat16()
    for layer, shape in ((linear, (2, 4)), (conv, (1, 4, 4)), (norm, (2, 4))):
        with pytest.raises(RuntimeError) as raised:
            layer(torch.randn(*shape))
        assert any(len(message) > 20 and message in str(raised.value) for message in named), raised.value


# ---------------------------------------------------------------------- languages


@pytest.mark.parametrize("original", TRANSLATED)
def test_a_translation_has_the_code_and_the_parts_of_its_original(original: str) -> None:
    """The same headings by level, rows of tables, and words in code: a page that has changed is translated again."""
    there, here = ROOT / TRANSLATED[original], ROOT / original
    assert [_code(block) for block in blocks(there)] == [_code(block) for block in blocks(here)]
    assert [level for level, _ in headings(there)] == [level for level, _ in headings(here)]
    assert _rows(there) == _rows(here)
    assert _named(there) == _named(here)


def _rows(page: Path) -> int:
    return sum(line.startswith("|") for line in prose(page))


def _named(page: Path) -> set[str]:
    return set(re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", "\n".join(prose(page)))))


def _code(block: Block) -> tuple[Any, ...]:
    return block.language, block.title, block.text, block.exempt is None, block.hidden


# ---------------------------------------------------------------------- code


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


def run(text: str, tmp_path: Path, *launcher: str) -> str:
    """Run a program in an empty folder, and return its stdout."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", COLUMNS="120", PYTHONPATH=f"{ROOT}")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    script = tmp_path / "page.py"
    script.write_text(text)
    folder = tmp_path / "empty"
    folder.mkdir()
    command = [sys.executable, *launcher, str(script)]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        # A race in torch at Python's shutdown (pytorch#190489), which a busy machine makes likely.
        if "terminate called without an active exception" not in done.stderr:
            break
        shutil.rmtree(folder)
        folder.mkdir()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", RUN)
def test_code_runs(name: str, tmp_path: Path) -> None:
    printed = run(program(ROOT / name), tmp_path)
    shown = blocks(ROOT / name)
    for number, block in enumerate(shown):
        if block.title is not None:  # a later block runs the file
            assert any(re.search(rf"\b{Path(block.title).stem}\b", later.text) for later in shown[number + 1 :])
        elif block.runs:
            assert f"{name}, line {block.line}\n" in printed, "a block before it has ended the program"


RECIPES = ROOT / "docs" / "cookbook.md"


@pytest.mark.full
def test_recipes_run_on_two_ranks(tmp_path: Path) -> None:
    """Each rank runs every recipe in Python; the one of a script and its commands runs in `test_code_runs`."""
    recipes = [block for block in blocks(RECIPES) if block.language == "python" and block.title is None]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(program(RECIPES, only="python"), tmp_path, *launcher)
    for block in recipes:
        assert len(re.findall(rf"docs/cookbook.md, line {block.line}(?!\d)", printed)) == 2, block.text
