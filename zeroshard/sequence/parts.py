"""Owns how tokens are cut into parts that run one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Choice = Callable[[Sequence[slice]], Iterable[slice]]
"""Returns those of the parts that run, in order. All of one length but the last are alike."""

_CHOICE: ContextVar[Choice] = ContextVar("parts", default=iter)


def parts(count: int, most: int) -> Iterable[slice]:
    """Return the parts of `count` tokens, with at most `most` tokens in each: one after another, as they are asked for."""
    return _CHOICE.get()([slice(start, min(start + most, count)) for start in range(0, count, most)])


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Run only some of the parts: for a dry run, whose tensors have no values."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)
