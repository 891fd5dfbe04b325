"""Owns the division of tokens into parts that run one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

Choice = Callable[[Sequence[slice]], Iterable[slice]]
"""A function that returns the parts that run, in order. All of one length except the last are alike."""

_CHOICE: ContextVar[Choice] = ContextVar("parts", default=iter)


def parts(count: int, most: int) -> Iterable[slice]:
    """Yield the parts of `count` tokens, with at most `most` tokens in each."""
    return _CHOICE.get()([slice(start, min(start + most, count)) for start in range(0, count, most)])


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Run only some of the parts: for a dry run, whose tensors have no values."""
    token = _CHOICE.set(choice)
    try:
        yield
    finally:
        _CHOICE.reset(token)
