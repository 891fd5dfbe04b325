"""Owns the wheel's long description: README without what only works in the repository.

Package indexes show it outside of the repository, where relative links and pictures lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def described(readme: str) -> str:
    """Return README's text without comments, pictures, and relative links, whose text stays."""
    text = re.sub(r"<!--.*?-->\n?", "", readme, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)


class LongDescription(MetadataHookInterface):
    """Adds `readme` to the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": described(text)}
