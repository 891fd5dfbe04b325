"""Owns the mean gradients of this rank's shards for the optimizer: scaled, or with factors to apply when they are lent.

fp32 gradients in the optimizer's memory are multiplied in place. Others are not: 16-bit gradients would lose digits,
and those in other places would be copied twice. Their factors are kept, and applied when they are lent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor

from zeroshard.gradients.gradient_bucket import Shard
from zeroshard.gradients.norm import scale_, sum_of_parts, sums_of_squares
from zeroshard.step.resident import ShardView
from zeroshard.storage.base import Storage
from zeroshard.storage.buffers import BufferPool


class MeanGradients:
    """The mean gradients of this rank's shards, see the module's docstring.

    Args:
        accelerator: the storage of unsharded gradients, even if the optimizer steps elsewhere.
    """

    def __init__(self, accelerator: Storage) -> None:
        self._accelerator = accelerator
        self.changes = 0
        """The number of changes, on any rank: the same number on every rank. The caller of `set` counts."""
        self.reset()

    def reset(self) -> None:
        """Begin a new step, without factors."""
        self._factors: list[float | Tensor] = []

    @property
    def _product(self) -> float | Tensor:
        return math.prod(self._factors, start=1.0)

    def _multiply(self, shard: Shard, gradient: Tensor) -> None:
        """Multiply values of a shard in place by the factors that `scale` has left for later: one product in 16 bits."""
        for factor in [self._product] if _is_narrow(shard) else self._factors:
            scale_([gradient], factor)

    @contextmanager
    def opened(self, shard: Shard, *, write: bool = False, where: Storage | None = None) -> Iterator[Tensor]:
        """Open a shard's mean gradient, as it was reduced, in memory of `where`; default: where the optimizer steps."""
        where = where or shard.step
        shard.gradient.wait(where.device)
        # Scratch that is not kept: the norm of a step needs none, see `_sums_of_squares`.
        with shard.gradient.borrowed(where, BufferPool(where.device, where.room), write=write) as gradient:
            yield gradient

    def get(self, shard: Shard, view: ShardView) -> Tensor:
        """Return a view's part of the mean gradient, 1-D, in the master weights' dtype, scaled as the optimizer will see it."""
        with self.opened(shard) as gradient:
            part = gradient[view.start : view.start + view.numel]
            if _is_scaled_at_once(shard):
                return part
            part = part.to(shard.master.dtype, copy=True)
            self._multiply(shard, part)
            return part

    def set(self, shard: Shard, view: ShardView, value: Tensor) -> None:
        """Overwrite the values that `get` returns."""
        if not _is_scaled_at_once(shard):
            value = value / self._product
        shard.squares = None
        with self.opened(shard, write=True) as gradient:
            gradient[view.start : view.start + view.numel].copy_(value)

    def scale(self, shards: Iterable[Shard], coefficient: float | Tensor) -> None:
        """Multiply fp32 gradients in place. Gradients in 16 bits (then in fp32) or in other memory are multiplied when lent.

        Args:
            coefficient: a number, or a tensor of shape [] on the accelerator.
        """
        shards = list(shards)
        if isinstance(coefficient, Tensor) and any(shard.step.device.type == "cpu" for shard in shards):
            coefficient = coefficient.item()  # the CPU steps: it waits for the accelerator in any case
        if not isinstance(coefficient, Tensor) and coefficient == 1.0:
            return
        self.changes += 1
        here = [shard for shard in shards if _is_scaled_at_once(shard)]
        with ExitStack() as stack:
            scale_([stack.enter_context(self.opened(shard)) for shard in here], coefficient)
        for shard in here:
            shard.squares = None
        self._factors.append(coefficient)

    @property
    def is_to_be_scaled(self) -> bool:
        """Whether `scale` has left factors for later."""
        return bool(self._factors)

    def apply_factors(self, shards: Iterable[Shard]) -> None:
        """Apply the factors that `scale` has left for later, before gradients of another backward are added."""
        for shard in shards:
            if not _is_scaled_at_once(shard):
                with self.opened(shard, write=True) as gradient:
                    self._multiply(shard, gradient)
                shard.squares = None
        self.reset()

    def lent(self, shard: Shard, flat: Tensor) -> Tensor:
        """Return a shard's gradient `flat`, now in memory where the optimizer steps, with the remaining factors applied."""
        flat = flat.to(shard.master.dtype)
        self._multiply(shard, flat)
        return flat

    def squares_by_shard(self, shards: Sequence[Shard]) -> dict[int, Tensor]:
        """Sum squares over all shards of a number, by that number, as fp64 of shape [], of gradients as the optimizer will see
        them."""
        parts: dict[int, list[Tensor]] = {}
        for shard, squares in zip(shards, self._sums_of_squares(shards), strict=True):
            parts.setdefault(shard.number, []).append(squares)
        return {number: sum_of_parts(own) for number, own in parts.items()}

    def _sums_of_squares(self, shards: Sequence[Shard]) -> list[Tensor]:
        found: dict[Shard, Tensor] = {}
        # Each is summed where it is memory: whole gradients lie on the accelerator even where the CPU steps.
        unknown = [shard for shard in shards if shard.squares is None and not self._is_scaled_later(shard)]
        here = {shard: memory for shard in unknown if (memory := self._memory_of(shard)) is not None}
        with ExitStack() as stack:
            gradients = [stack.enter_context(self.opened(shard, where=memory)) for shard, memory in here.items()]
            found |= zip(here, sums_of_squares(gradients), strict=True)
        for shard in shards:
            if shard.squares is not None and not self._is_scaled_later(shard):
                found[shard] = shard.squares
            elif shard not in found:
                with self.opened(shard) as gradient:
                    if not _is_narrow(shard):
                        self._multiply(shard, gradient)
                    found[shard] = sums_of_squares([gradient])[0]
            if _is_narrow(shard):
                found[shard] = found[shard] * self._product**2
        return [found[shard] for shard in shards]

    def _is_scaled_later(self, shard: Shard) -> bool:
        """Return whether `scale` has left factors that change the bits of the squares."""
        return bool(self._factors) and not _is_narrow(shard) and _is_away(shard)

    def _memory_of(self, shard: Shard) -> Storage | None:
        """Return the storage in which the gradient is memory."""
        places = (self._accelerator, shard.step)
        return next((place for place in places if shard.gradient.memory_in(place) is not None), None)


def _is_away(shard: Shard) -> bool:
    """Return whether the gradient is in other memory than the optimizer's step."""
    return shard.gradient.memory_in(shard.step) is None


def _is_scaled_at_once(shard: Shard) -> bool:
    """Return whether `scale` multiplies the gradient in place."""
    return not _is_narrow(shard) and not _is_away(shard)


def _is_narrow(shard: Shard) -> bool:
    """Return whether the gradient has another dtype than the master weights."""
    return shard.gradient.dtype != shard.master.dtype
