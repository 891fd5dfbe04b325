"""Owns the step: an unmodified torch optimizer that is handed 1-D views of shards. Called by the user, or the engine.

Each parameter that has elements in a shard is one 1-D tensor there, in its own param group: so it keeps its own state, step
count and hyperparameters, and one that no rank used in a step is left alone, as plain PyTorch leaves it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.collectives import Collectives
from zeroshard.core.schedule import Schedule
from zeroshard.core.unit import NamedParameter, Unit
from zeroshard.errors import UsageError
from zeroshard.optim.grad_clip import clip_coefficient, scale_, sum_of_squares


@dataclass(frozen=True)
class ShardView:
    """The part of one parameter in one shard: the tensor that the optimizer updates, and its gradient (both 1-D)."""

    named: NamedParameter
    unit: Unit
    index: int
    start: int
    """Where it begins in the flattened parameter."""
    value: Tensor
    gradient: Tensor

    def lend_gradient(self, used: bool) -> None:
        """Let the optimizer see the gradient, in the dtype of what it updates, or none."""
        self.value.grad = self.gradient.to(self.value.dtype) if used else None


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over this rank's shards; schedulers, `param_groups` and `state_dict` as ever.

    Args:
        inner: the user's optimizer, over the parameters of the units. Its `param_groups` are given the shards' views
            instead, in the same groups; `step` is its own.

    `param_groups` and `state` are the inner optimizer's own objects, so a change of `lr` by whatever scheduler takes effect.
    """

    def __init__(self, inner: torch.optim.Optimizer, schedule: Schedule, collectives: Collectives) -> None:
        self.inner = inner
        self._schedule, self._collectives = schedule, collectives
        self._used: dict[tuple[Unit, int], bool] = {}
        self._used_at = -1  # how many gradients the schedule had taken when `_used` was agreed upon
        trainable = [unit for unit in schedule.units if unit.trainable]
        self._flags = [(unit, index) for unit in trainable for index in range(len(unit.named))]
        self.views = [view for unit in trainable for view in _views(unit)]
        # The gradients that this rank updates with, per rank that owns them, padding included (it is zero).
        self._gradients: dict[int, list[Tensor]] = {}
        for unit in trainable:
            for bucket in unit.buckets:
                for shard in bucket.optimizer_shards():
                    self._gradients.setdefault(shard.rank, []).append(shard.gradient)
        by_parameter: dict[int, list[Tensor]] = {}
        for view in self.views:
            by_parameter.setdefault(id(view.named.parameter), []).append(view.value)
        for group in inner.param_groups:
            group["params"] = [value for p in group["params"] for value in by_parameter.get(id(p), [])]
        self._is_laid_out = False
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self._is_laid_out = True

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.inner!r})"

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters with the mean gradients. Every rank must call it."""
        if closure is not None:
            raise UsageError(
                "ShardedOptimizer.step takes no closure: the gradients of a repeated backward would have to be reduced "
                "within the step. Call backward yourself, then step()."
            )
        if self._used_at != self._schedule.gradients_taken:
            self._exchange(norm=False)
        for view in self.views:
            view.lend_gradient(self._used[view.unit, view.index])
        self._schedule.settle()
        result = self.inner.step()
        for view in self.views:
            view.value.grad = None
        self._schedule.sync_parameters()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Their buffers stay, to be overwritten."""
        self._used_at = -1
        self._schedule.forget_gradients()

    # ------------------------------------------------------------------ the norm

    def grad_norm(self) -> float:
        """The L2 norm of the mean gradients of all parameters. Every rank must call it, after the last backward."""
        return self._exchange(norm=True)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        Every rank must call it, after the last backward of the step.
        """
        norm = self.grad_norm()
        if math.isfinite(norm):
            coefficient = clip_coefficient(norm, max_norm)
            for gradients in self._gradients.values():
                scale_(gradients, coefficient)
        return norm

    def _exchange(self, norm: bool) -> float:
        """One small message: who used which parameter, and, where asked for, each rank's sum of squares."""
        self._schedule.finish_gradients()
        sums = {
            rank: float(torch.stack([sum_of_squares(g) for g in gradients]).sum()) if norm and gradients else 0.0
            for rank, gradients in self._gradients.items()
        }
        own_flags = bytes(index in unit.used for unit, index in self._flags)
        message = struct.pack("<d", sums.get(self._collectives.rank, 0.0)) + own_flags
        messages = self._collectives.exchange(message, "the gradient norm and the flags of used parameters")
        everyone = [struct.unpack("<d", data[:8])[0] for data in messages]
        # An unsharded optimizer holds every rank's shard, bit for bit the same as its owner's.
        total = sum(sums.get(rank, everyone[rank]) for rank in range(self._collectives.world_size))
        used_anywhere = (any(flags) for flags in zip(*(data[8:] for data in messages), strict=True))
        self._used = dict(zip(self._flags, used_anywhere, strict=True))
        self._used_at = self._schedule.gradients_taken
        return math.sqrt(total)

    # ------------------------------------------------------------------ torch.optim's surface

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of the optimizer state. Runs no collective."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank, with the same world size and policy."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the shards are laid out."""
        if self._is_laid_out:
            raise UsageError("the layout of shards is fixed: give the optimizer all its param groups before zeroshard.")
        super().add_param_group(param_group)


def _views(unit: Unit) -> Sequence[ShardView]:
    return [
        ShardView(
            unit.named[piece.index], unit, piece.index, piece.parameter_start,
            shard.master[piece.start : piece.start + piece.numel].detach(),
            shard.gradient[piece.start : piece.start + piece.numel],
        )
        for bucket in unit.buckets
        for shard in bucket.optimizer_shards()
        for piece in shard.pieces
    ]  # fmt: skip
