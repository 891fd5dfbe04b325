"""Owns the reading of the documentation: its headings, links and code, and the choice of code to run.

A page's code runs from top to bottom, in an empty folder:

- `python` runs in one namespace, `diff` runs as its new side, and `bash` runs unchanged;
- a block with `title="name"` is written to that file, and runs only if a later block starts it;
- a comment `<!-- run first: ... -->` contains Python that readers already have, such as a model;
- a comment `<!-- not run: why -->` before a block exempts it.
"""

from __future__ import annotations

import pydoc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNS = ("python", "diff", "bash")
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?$')
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A piece of code in a page.

    Attributes:
        title: the file to which the code is written.
        exempt: the reason why the code is not run.
        hidden: whether readers do not see the code.
    """

    line: int
    language: str
    text: str
    title: str | None = None
    exempt: str | None = None
    hidden: bool = False

    @property
    def runs(self) -> bool:
        """Whether the code is run, or written to a file that a later block runs."""
        return self.exempt is None and not self.hidden and (self.title is not None or self.language in RUNS)

    def side(self, mark: str) -> str:
        """Return one side of a diff."""
        return "\n".join(line[1:] for line in self.text.splitlines() if line[:1] in ("", " ", mark)) + "\n"


def pages() -> list[Path]:
    """Return the files of the documentation."""
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def blocks(page: Path) -> list[Block]:
    """Return a page's code, in order."""
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
    """Return a page's lines without its code and comments."""
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
    """Return (level, text) of each heading."""
    found = [re.match(r"(#+) (.*)", line) for line in prose(page)]
    return [(len(match.group(1)), match.group(2)) for match in found if match is not None]


def slug(heading: str) -> str:
    """Return the anchor of a heading, which is the same on GitHub and on the site."""
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return a page's targets for links: headings, elements with an id, and objects of the API."""
    text = "\n".join(prose(page))
    ids = re.findall(r'<a id="([^"]+)"></a>', text)
    objects = re.findall(r"^::: (\S+)$", text, re.M)
    members = [f"{name}.{member}" for name in objects for member in dir(pydoc.locate(name))]
    return {*(slug(text) for _, text in headings(page)), *ids, *objects, *members}


def links(page: Path) -> list[str]:
    """Return the targets of links within the repository."""
    return [target for line in prose(page) for target in _LINK.findall(line) if "://" not in target]


def program(page: Path, only: str | None = None) -> str:
    """Return a Python program that runs a page's code. With `only`, the program runs only the blocks of that language."""
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
