"""Owns the check for matplotlib, which is an optional dependency."""

from importlib.util import find_spec

from zeroshard.errors import UsageError


def require_matplotlib(purpose: str) -> None:
    """Raise an error that names the remedy if matplotlib is not installed.

    Call it before the work whose results are drawn, so that the work is not lost.

    Args:
        purpose: the option or call that draws, as the user wrote it.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError(f"{purpose} needs matplotlib, which is not installed: pip install 'zeroshard[plots]'.")
