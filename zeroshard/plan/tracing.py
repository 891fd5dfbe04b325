"""Owns the one thing that model libraries take a dry run for, and it is not: the tracing of a graph. Called by dry_run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def not_traced() -> Iterator[None]:
    """Inside, transformers builds the masks that it builds in a real run.

    It takes tensors without values for those of torch.compile, which may not ask for values, and makes a mask of [batch, 1, length,
    length] to be safe. A dry run answers what it is asked.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "is_tracing"):
        yield
        return
    before = masks.is_tracing
    masks.is_tracing = lambda *_: False
    try:
        yield
    finally:
        masks.is_tracing = before
