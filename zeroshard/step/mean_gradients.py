"""Owns the mean gradients of this rank's shards as the optimizer will see them: scaled, or still to be scaled when they are lent.

Called by sharded_optimizer. fp32 gradients that are memory where the optimizer steps are multiplied in place. Those in 16
bits would
lose digits, and those elsewhere would have to be brought twice: their factors are kept, and applied as they are lent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from zeroshard.gradients.norm import scale_, sum_of_squares
from zeroshard.gradients.shard import Shard
from zeroshard.step.shard_view import ShardView
from zeroshard.storage.buffer_pool import BufferPool


class MeanGradients:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """A new step begins: nothing is to be scaled."""
        self._narrow_coefficient = 1.0
        self._coefficients: list[float] = []

    @contextmanager
    def opened(self, shard: Shard, *, write: bool = False) -> Iterator[Tensor]:
        """The mean gradient of a shard as memory where the optimizer steps, as it was reduced."""
        shard.gradient.wait()
        # Scratch that is not kept: the norm of a step needs none, see `Shard.squares`.
        with shard.gradient.borrowed(shard.step, BufferPool(shard.step.device), write=write) as gradient:
            yield gradient

    def get(self, shard: Shard, view: ShardView) -> Tensor:
        """A view's part of the mean gradient, 1-D, in the master weights' dtype, scaled as the optimizer will see it."""
        with self.opened(shard) as gradient:
            part = gradient[view.start : view.start + view.numel]
            if _is_narrow(shard):
                return part.to(shard.master.dtype) * self._narrow_coefficient
            if not _is_away(shard):
                return part
            part = part.clone()
            for coefficient in self._coefficients:
                scale_([part], coefficient)
            return part

    def set(self, shard: Shard, view: ShardView, value: Tensor) -> None:
        """Overwrite what `get` gives."""
        if _is_narrow(shard):
            value = value / self._narrow_coefficient
        elif _is_away(shard):
            value = value / math.prod(self._coefficients)
        shard.squares = None
        with self.opened(shard, write=True) as gradient:
            gradient[view.start : view.start + view.numel].copy_(value)

    def scale(self, shards: Iterable[Shard], coefficient: float) -> None:
        """Multiply the gradients: at once, or as they are lent: in fp32, those in 16 bits; those that are elsewhere."""
        if coefficient == 1.0:
            return
        for shard in shards:
            if not _is_narrow(shard) and not _is_away(shard):
                with self.opened(shard) as gradient:
                    scale_([gradient], coefficient)
                shard.squares = None
        self._narrow_coefficient *= coefficient
        self._coefficients.append(coefficient)

    def lent(self, shard: Shard, flat: Tensor) -> Tensor:
        """A shard's gradient, which is memory where the optimizer steps now, with what is still to be multiplied."""
        if _is_narrow(shard):
            flat = flat.to(shard.master.dtype)
            scale_([flat], self._narrow_coefficient)
        else:
            for coefficient in self._coefficients:
                scale_([flat], coefficient)
        return flat

    def sum_of_squares(self, shard: Shard) -> Tensor:
        """As fp64 of shape [], of the gradient as the optimizer will see it."""
        scaled = not _is_narrow(shard) and _is_away(shard) and bool(self._coefficients)
        if shard.squares is None or scaled:
            with self.opened(shard) as gradient:
                for coefficient in self._coefficients if scaled else ():
                    scale_([gradient], coefficient)
                squares = sum_of_squares(gradient)
        else:
            squares = shard.squares
        return squares * self._narrow_coefficient**2 if _is_narrow(shard) else squares


def _is_away(shard: Shard) -> bool:
    """Whether the gradient is not memory where the optimizer steps."""
    return shard.gradient.memory_in(shard.step) is None


def _is_narrow(shard: Shard) -> bool:
    """Whether the gradient has fewer digits than what it updates."""
    return shard.gradient.dtype != shard.master.dtype
