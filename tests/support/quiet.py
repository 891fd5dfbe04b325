"""Owns what lets tests pass on any machine: the check that zeroshard does not warn, and a reason to skip."""

from __future__ import annotations

import locale
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

WITH_INDUCTOR = pytest.mark.skipif(
    "utf" not in locale.getpreferredencoding(False).lower(),
    reason="torch's compiler reads its own sources in the locale's encoding, and cannot be imported in this one",
)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Turn UserWarnings into errors, except that of a CPU without 16-bit instructions: it depends on the machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "this CPU has no instructions for")
        yield
