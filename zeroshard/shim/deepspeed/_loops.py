"""Parts of training loops: a loader without an end, activation checkpointing, generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import zeroshard
from zeroshard import checkpointing


class RepeatingLoader:
    """A loader that starts again where another ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, and compute its activations again in the backward instead of keeping them."""
    if not kwargs:
        return checkpointing.checkpoint(function, *args)
    # As arguments by position: tensors among them take part in the gradients.
    return checkpointing.checkpoint(partial(_call, function, len(args), tuple(kwargs)), *args, *kwargs.values())


def _call(function: Callable[..., Any], count: int, names: tuple[str, ...], *values: Any) -> Any:
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Unshard the engine's parameters inside, so that each rank may generate independently."""
    with zeroshard.unsharded(model.parameters()):
        yield model
