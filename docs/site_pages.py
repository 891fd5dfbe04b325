"""Owns what the site has beside docs/: pages made of files elsewhere in the repository, and the links to them. Called by mkdocs.

Links in the sources are those that work on the repository's own pages. Here they are turned into links between pages of the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN/index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Files of the repository that are pages, and the name of the page."""
SOURCES = ["examples/*.py"]
"""Python files that have a page each, with their text."""
COPIES = ["examples/*.json", "examples/*.ipynb", "examples/*.sbatch", "benchmarks/results/*", "LICENSE"]
"""Files that are on the site as they are."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files from outside of docs/."""
    for source, page in PAGES.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in _matching(SOURCES):
        text = f"# {path}\n\n```python\n{(ROOT / path).read_text(encoding='utf-8')}```\n"
        page = File.generated(config, _site_path(path), content=text)
        page.inclusion = page.inclusion.NOT_IN_NAV
        files.append(page)
    for path in _matching(COPIES):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links from file to file into links from page to page."""
    own = page.file.src_uri
    origin = next((source for source, name in PAGES.items() if name == own), f"docs/{own}")

    def turned(match: re.Match[str]) -> str:
        path, mark, anchor = match.group(2).partition("#")
        if not path or "://" in path:
            return match.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not (ROOT / target).is_file():
            return match.group()  # mkdocs says so
        there = posixpath.relpath(_site_path(target), posixpath.dirname(own) or ".")
        return f"{match.group(1)}{there}{mark}{anchor}{match.group(3)}"

    return LINK.sub(turned, markdown)


def _site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    return f"{path.removesuffix('.py')}.md" if path.endswith(".py") else path


def _matching(patterns: list[str]) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))
