"""Owns the step: an unmodified torch optimizer that is handed views of shards. Called by the user, or the engine.

Each parameter that has elements in a shard is one 1-D tensor there, in its own param group: so it keeps its own state, step
count and hyperparameters, and one that no rank used in a step is left alone, as plain PyTorch leaves it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.bucket import Shard
from zeroshard.core.collectives import Collectives
from zeroshard.core.layout import Piece
from zeroshard.core.schedule import Schedule
from zeroshard.core.unit import NamedParameter
from zeroshard.errors import UsageError
from zeroshard.optim.grad_clip import clip_coefficient, scale_, sum_of_squares
from zeroshard.optim.muon import MuonWithAdamW


@dataclass(frozen=True)
class ShardView:
    """The part of one parameter in one shard: the tensor that the optimizer updates.

    `value` is 1-D, or, where parameters are not cut, of the parameter's shape. `start` and `numel` say where it lies in the shard,
    `parameter_start` where in the flattened parameter.
    """

    named: NamedParameter
    flag: int
    """Which of the flags of used parameters is this one's."""
    value: Tensor
    start: int
    numel: int
    parameter_start: int

    def lend_gradient(self, flat: Tensor | None) -> None:
        """Let the optimizer see its part of the shard's gradient, or none."""
        self.value.grad = None if flat is None else flat[self.start : self.start + self.numel].view_as(self.value)


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over this rank's shards; schedulers, `param_groups` and `state_dict` as ever.

    Args:
        inner: the user's optimizer, over the parameters of the units. Its `param_groups` are given the shards' views
            instead, in the same groups; `step` is its own.
        whole_parameters: the layout cuts no parameter, and `inner` is to see their true shapes.

    `param_groups` and `state` are the inner optimizer's own objects, so a change of `lr` by whatever scheduler takes effect.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        collectives: Collectives,
        *,
        whole_parameters: bool = False,
    ) -> None:
        self.inner = inner
        self._schedule, self._collectives = schedule, collectives
        self._used: tuple[bool, ...] = ()
        self._used_at = -1  # how many gradients the schedule had taken when `_used` was agreed upon
        self._narrow_coefficient = 1.0
        """What gradients in a dtype narrower than the master weights' are still to be multiplied by, see `_scale`."""
        self._whole_parameters = whole_parameters
        self.views: list[ShardView] = []
        self._first_state = dict(next(iter(inner.state.values()), {}))
        """What an optimizer keeps of a parameter before its first step: nothing, or, as Adagrad, some constants."""
        inner.state.clear()
        self.groups = [[id(parameter) for parameter in group["params"]] for group in inner.param_groups]
        """`id`s of the user's parameters, group by group."""
        self.lay_out()
        self._is_laid_out = False
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self._is_laid_out = True

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.inner!r})"

    def lay_out(self) -> None:
        """Find what this rank updates of the schedule's units. A view that was there before stays the tensor that it was."""
        before = {(view.value.data_ptr(), view.numel): view.value for view in self.views}
        trainable = [unit for unit in self._schedule.units if unit.trainable]
        self._flags = [(unit, index) for unit in trainable for index in range(len(unit.named))]
        flag_of = {flag: number for number, flag in enumerate(self._flags)}
        # A shard's padding is zero.
        self._shards = [
            (shard, [_view(shard, piece, unit.named[piece.index], flag_of[unit, piece.index], self._whole_parameters, before)
                     for piece in shard.pieces])
            for unit in trainable for bucket in unit.buckets for shard in bucket.optimizer_shards()
        ]  # fmt: skip
        self.views = [view for _, views in self._shards for view in views]
        by_parameter: dict[int, list[Tensor]] = {}
        for view in self.views:
            by_parameter.setdefault(id(view.named.parameter), []).append(view.value)
        for group, parameters in zip(self.inner.param_groups, self.groups, strict=True):
            group["params"] = [value for parameter in parameters for value in by_parameter.get(parameter, [])]
        for view in self.views if self._first_state else ():
            if view.value not in self.inner.state:
                self.inner.state[view.value] = {
                    name: first.clone() if first.ndim == 0 else torch.full_like(view.value, first.reshape(-1)[0].item())
                    for name, first in self._first_state.items()
                }
        alive = {view.value for view in self.views}
        for value in [value for value in self.inner.state if value not in alive]:
            del self.inner.state[value]

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
        for shard, views in self._shards:
            flat = shard.gradient
            if _is_narrow(shard):
                flat = flat.to(shard.master.dtype)
                scale_([flat], self._narrow_coefficient)
            for view in views:
                view.lend_gradient(flat if self._used[view.flag] else None)
        self._schedule.begin_step()
        result = self.inner.step()
        for view in self.views:
            view.lend_gradient(None)
        self._schedule.sync_parameters()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Their buffers stay, to be overwritten."""
        self._used_at, self._narrow_coefficient = -1, 1.0
        self._schedule.forget_gradients()

    # ------------------------------------------------------------------ the norm

    def grad_norm(self) -> float:
        """The L2 norm of the mean gradients of all parameters. Every rank must call it, after the last backward."""
        return self._exchange(norm=True)

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> float:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        Every rank must call it, after the last backward of the step. A norm that is not finite leaves them as they are.

        Args:
            max_norm: None leaves the norm as it is.
            loss_scale: what the loss was multiplied by before the backward; the gradients are divided by it first.
        """
        norm = self.grad_norm() / loss_scale
        if math.isfinite(norm):
            clip = 1.0 if max_norm is None else clip_coefficient(norm, max_norm)
            self._scale(clip / loss_scale)
        return norm

    def not_finite(self) -> tuple[str, ...]:
        """The fqns of the parameters whose gradient has an element that is infinite or NaN. Every rank must call it."""
        self._schedule.finish_gradients()
        own = bytearray(len(self._flags))
        for shard, views in self._shards:
            for view in views:
                part = shard.gradient[view.start : view.start + view.numel]
                own[view.flag] |= not bool(torch.isfinite(part).all())
        messages = self._collectives.exchange(bytes(own), "the flags of gradients that are not finite")
        anywhere = [any(flags) for flags in zip(*messages, strict=True)]
        return tuple(unit.named[i].fqn for (unit, i), found in zip(self._flags, anywhere, strict=True) if found)

    def used(self) -> dict[str, bool]:
        """By fqn, whether any rank used the parameter in this step. Every rank must call it, after the last backward."""
        if self._used_at != self._schedule.gradients_taken:
            self._exchange(norm=False)
        return {unit.named[i].fqn: used for (unit, i), used in zip(self._flags, self._used, strict=True)}

    def shards(self) -> Iterator[tuple[Shard, list[ShardView]]]:
        """What this rank updates: the shards, and their parts by parameter."""
        yield from self._shards

    def mean_gradient(self, shard: Shard, view: ShardView) -> Tensor:
        """A view's part of the mean gradient, 1-D, in the master weights' dtype, scaled as the optimizer will see it."""
        part = shard.gradient[view.start : view.start + view.numel]
        return part.to(shard.master.dtype) * self._narrow_coefficient if _is_narrow(shard) else part

    def set_mean_gradient(self, shard: Shard, view: ShardView, value: Tensor) -> None:
        """Overwrite what `mean_gradient` gives."""
        part = shard.gradient[view.start : view.start + view.numel]
        part.copy_(value / self._narrow_coefficient if _is_narrow(shard) else value)

    def _scale(self, coefficient: float) -> None:
        """Multiply the gradients: at once, or, where 16 bits would lose digits or underflow, when they are lent in fp32."""
        scale_([shard.gradient for shard, _ in self._shards if not _is_narrow(shard)], coefficient)
        self._narrow_coefficient *= coefficient

    def _sum_of_squares(self, shard: Shard) -> Tensor:
        squares = sum_of_squares(shard.gradient)
        return squares * self._narrow_coefficient**2 if _is_narrow(shard) else squares

    def _exchange(self, norm: bool) -> float:
        """One small message: who used which parameter, and, where asked for, each rank's sum of squares."""
        self._schedule.finish_gradients()
        squares: dict[int, list[Tensor]] = {}
        for shard, _ in self._shards if norm else ():
            squares.setdefault(shard.rank, []).append(self._sum_of_squares(shard))
        sums = {rank: float(torch.stack(parts).sum()) for rank, parts in squares.items()}
        own_flags = bytes(index in unit.used for unit, index in self._flags)
        message = struct.pack("<d", sums.get(self._collectives.rank, 0.0)) + own_flags
        messages = self._collectives.exchange(message, "the gradient norm and the flags of used parameters")
        everyone = [struct.unpack("<d", data[:8])[0] for data in messages]
        # An unsharded optimizer holds every rank's shard, bit for bit the same as its owner's.
        total = sum(sums.get(rank, everyone[rank]) for rank in range(self._collectives.world_size))
        self._used = tuple(any(flags) for flags in zip(*(data[8:] for data in messages), strict=True))
        self._used_at = self._schedule.gradients_taken
        return math.sqrt(total)

    # ------------------------------------------------------------------ torch.optim's surface

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of the optimizer state. Runs no collective."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank, with the same world size and policy."""
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @property
    def groups_are_known(self) -> bool:
        """Whether there is anything to update at all."""
        return not isinstance(self.inner, NoOptimizer)

    def list_group(self, param_group: dict[str, Any]) -> None:
        """Know of another param group, over the user's parameters; `lay_out` gives it their views."""
        if isinstance(self.inner, MuonWithAdamW):
            raise UsageError(
                "MuonWithAdamW takes its groups when it is made: list the parameters there, frozen as they are."
            )
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        known = {parameter for group in self.groups for parameter in group}
        again = sum(id(parameter) in known for parameter in parameters)
        if again:
            raise UsageError(f"{again} of the new param group's parameters are in a group of the optimizer already.")
        self.groups.append([id(parameter) for parameter in parameters])
        self.inner.add_param_group({**param_group, "params": parameters})
        self.inner.param_groups[-1]["params"] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the shards are laid out."""
        if self._is_laid_out:
            raise UsageError(
                "the shards are laid out: give the optimizer its param groups before zeroshard, or free parameters with "
                "sharded.update_trainable(param_group)."
            )
        super().add_param_group(param_group)


class NoOptimizer(torch.optim.Optimizer):
    """What stands for the optimizer of a model that is for evaluation alone."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """There is nothing to update."""
        raise UsageError("this model was sharded without an optimizer, for evaluation alone: it cannot take a step.")


def _view(
    shard: Shard, piece: Piece, named: NamedParameter, flag: int, whole: bool, before: Mapping[tuple[int, int], Tensor]
) -> ShardView:
    value = shard.master[piece.start : piece.start + piece.numel].detach()
    value = before.get((value.data_ptr(), piece.numel), value.view(named.shape) if whole else value)
    return ShardView(named, flag, value, piece.start, piece.numel, piece.parameter_start)


def _is_narrow(shard: Shard) -> bool:
    """Whether the gradient has fewer digits than what it updates."""
    return shard.gradient.dtype != shard.master.dtype
