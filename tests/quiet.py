"""Owns the check that zeroshard does not warn. It passes on any CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_warnings() -> Iterator[None]:
    """Turn UserWarnings into errors, except that of a CPU without 16-bit instructions: it depends on the machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "this CPU has no instructions for")
        yield
