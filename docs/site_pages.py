"""Owns the pages of the site that are made of files outside of docs/, and the links to them. mkdocs calls it.

Beside each page lies its text, `page.md`, for assistants, which llms.txt leads to.

Links in the sources are those that work on the repository's own pages. Here they are turned into links between pages of the site.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
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
NOTEBOOKS = ["examples/*.ipynb"]
"""Notebooks that have a page each, with the text, code and pictures that they hold."""
COPIES = ["examples/*.json", "examples/*.sbatch", "benchmarks/results/*", "LICENSE"]
"""Files that are on the site as they are."""
_texts: dict[str, str] = {}
"""The text of each page of the site, by its place in the sources."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_pre_build(**_: Any) -> None:
    """Refuse to build with pictures that are not what their script draws."""
    if runpy.run_path(str(ROOT / "docs" / "pictures.py"))["outdated"]():
        raise PluginError("the pictures of docs/ are outdated: run `python docs/pictures.py`.")


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
    for path in _matching(NOTEBOOKS):
        files.append(File.generated(config, _site_path(path), content=_notebook(ROOT / path)))
    for path in _matching(COPIES):
        file = File.generated(config, path, abs_src_path=str(ROOT / path))
        if path.endswith(".md"):
            file.inclusion = file.inclusion.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links from file to file into links from page to page."""
    own = page.file.src_uri
    outside = {_site_path(path): path for path in [*PAGES, *_matching(NOTEBOOKS), *_matching(COPIES)]}
    origin = outside.get(own, f"docs/{own}")

    def turned(match: re.Match[str]) -> str:
        path, mark, anchor = match.group(2).partition("#")
        if not path or "://" in path or path.startswith("data:"):
            return match.group()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not (ROOT / target).is_file():
            return match.group()  # mkdocs says so
        there = posixpath.relpath(_site_path(target), posixpath.dirname(own) or ".")
        return f"{match.group(1)}{there}{mark}{anchor}{match.group(3)}"

    _texts[own] = LINK.sub(turned, markdown)
    return _texts[own]


def on_post_build(config: Any, **_: Any) -> None:
    """Write the text of each page beside it."""
    for page, text in _texts.items():
        path = Path(config["site_dir"]) / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _site_path(path: str) -> str:
    """Return the place on the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    stem, dot, ending = path.rpartition(".")
    return f"{stem}.md" if dot and ending in ("py", "ipynb") else path


def _notebook(path: Path) -> str:
    """Turn a notebook into Markdown: its text and code, and the output of each cell."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                picture = base64.b64encode(base64.b64decode(output["data"]["image/png"])).decode()
                parts.append(f"![The cell's plot](data:image/png;base64,{picture})")
    return "\n\n".join(parts) + "\n"


def _matching(patterns: list[str]) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))
