"""Owns how the tests read the documentation: its headings, links and code, and what of the code is run.

A page's code runs from top to bottom, in an empty folder:

- `python` in one namespace, `diff` as its new side, `bash` as it stands;
- a block with `title="name"` is written to that file, and runs where a later block starts it;
- a comment `<!-- run first: ... -->` holds Python that a reader has anyway, such as a model;
- a comment `<!-- not run: why -->` before a block exempts it.
"""

from __future__ import annotations

import pydoc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RUNS = ("python", "diff", "bash")
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?$')
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A piece of code of a page.

    Attributes:
        title: the file that it is written to.
        exempt: why it is not run.
        hidden: from readers.
    """

    line: int
    language: str
    text: str
    title: str | None = None
    exempt: str | None = None
    hidden: bool = False

    @property
    def runs(self) -> bool:
        """It is run, or written for others to run."""
        return self.exempt is None and not self.hidden and (self.title is not None or self.language in RUNS)

    def side(self, mark: str) -> str:
        """One side of a diff."""
        return "\n".join(line[1:] for line in self.text.splitlines() if line[:1] in ("", " ", mark)) + "\n"


def pages() -> list[Path]:
    """All of the documentation."""
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def blocks(page: Path) -> list[Block]:
    """A page's code, in order."""
    found, exempt = [], None
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if line.startswith("<!-- run first:"):
            found.append(Block(number, "python", _until(lines, "-->"), hidden=True))
        elif line.startswith("<!-- not run:"):
            exempt = line.removeprefix("<!-- not run:").removesuffix("-->").strip()
        elif fence is not None:
            text = _until(lines, "```")
            found.append(Block(number, fence.group(1), text, fence.group(2), exempt))
            exempt = None
        else:
            assert not line.startswith("```"), f"{page}:{number}: a fence of another kind: {line}"
            assert exempt is None, f"{page}:{number}: `not run` stands before no block"
    return found


def _until(lines: Iterator[tuple[int, str]], end: str) -> str:
    text = []
    for _, line in lines:
        if line == end:
            break
        text.append(line)
    return "".join(f"{line}\n" for line in text)


def prose(page: Path) -> list[str]:
    """A page's lines without its code and comments."""
    kept, end = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        if end is not None:
            end = None if line.endswith(end) else end
        elif line.startswith("```"):
            end = "```"
        elif line.startswith("<!--"):
            end = None if line.endswith("-->") else "-->"
        else:
            kept.append(line)
    return kept


def headings(page: Path) -> list[tuple[int, str]]:
    """(level, text) of each."""
    found = [re.match(r"(#+) (.*)", line) for line in prose(page)]
    return [(len(match.group(1)), match.group(2)) for match in found if match is not None]


def slug(heading: str) -> str:
    """The anchor that the repository's page and the site give a heading."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the places of a page that a link can name: its headings, what has an id, and objects of the API."""
    text = "\n".join(prose(page))
    ids = re.findall(r'<a id="([^"]+)"></a>', text)
    objects = re.findall(r"^::: (\S+)$", text, re.M)
    members = [f"{name}.{member}" for name in objects for member in dir(pydoc.locate(name))]
    return {*(slug(text) for _, text in headings(page)), *ids, *objects, *members}


def links(page: Path) -> list[str]:
    """Targets of links within the repository."""
    return [target for line in prose(page) for target in _LINK.findall(line) if "://" not in target]


def program(page: Path, only: str | None = None) -> str:
    """A Python program that does what a reader of the page does; with `only`, runs the blocks of one language."""
    steps = ["import subprocess\nfrom pathlib import Path\n\nnamespace = {'__name__': 'page'}\n"]
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}, line {block.line}"
        if block.exempt is not None or (only is not None and (block.language != only or block.title is not None)):
            continue
        if block.title is not None:
            steps.append(f"Path({block.title!r}).write_text({block.text!r})\n")
        elif block.language == "bash":
            steps.append(
                f"print({where!r}, flush=True)\nsubprocess.run(['bash', '-euc', {block.text!r}], check=True)\n"
            )
        elif block.language in ("python", "diff"):
            text = block.side("+") if block.language == "diff" else block.text
            steps.append(f"print({where!r}, flush=True)\nexec(compile({text!r}, {where!r}, 'exec'), namespace)\n")
    return "".join(steps)
