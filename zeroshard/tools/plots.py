"""Owns what all drawings share: the check for matplotlib, which is an optional dependency, and the writing of a figure."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib(purpose: str) -> None:
    """Raise UsageError if matplotlib is not installed. Call it before the work whose results are drawn.

    Args:
        purpose: the option or call that draws, as the user wrote it.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(f"{purpose} needs matplotlib, which is not installed: pip install 'zeroshard[plots]'.")


def save(figure: Figure, path: Path) -> None:
    """Write a figure without frame lines at the top and the right. The path's suffix names the format."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
