"""Owns torch's operations on `parameter.grad` between the last backward and the step, when the mean over ranks is in shards.

`torch.nn.utils.clip_grad_norm_` takes each gradient's norm and multiplies all gradients by one factor. `clip_grad_value_`
clamps each gradient. The first norm fetches the norms of all parameters in one message. A factor waits for the step, or for the
next norm: if all gradients have the same factors, the shards are scaled as `sharded.clip_grad_norm_` scales them.

Norms are bit-identical under every policy: each shard's part of a parameter is summed by itself, then the parts in shard order.

[Note: one call for each gradient]
torch calls each operation once for each gradient. The first call does the work for all of them, and the others look its result up
(`known_norm`, `multiplies`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence, Set
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.gradients.norm import sums_of_squares
from zeroshard.parameters.context import Context
from zeroshard.schedule.schedule import Schedule
from zeroshard.schedule.unit import Unit
from zeroshard.step.resident import MeanGradients, Resident, ShardView
from zeroshard.step.users_optimizer import DroppedGradients
from zeroshard.torch_private import version_of

Flag = tuple[Unit, int]
"""A trainable parameter: its unit, and its index there."""


class GradientOperations:
    """The operations on gradients in one step. The first operation creates this object. See the module's docstring.

    Args:
        gradients: the mean over ranks, in this rank's shards.
        dropped: the gradients that an optimizer has dropped, after which operations on the others are refused.
        flags: the parameters whose gradients are operated on.
        residents: this rank's shards of them.
    """

    def __init__(
        self,
        schedule: Schedule,
        context: Context,
        gradients: MeanGradients,
        dropped: DroppedGradients,
        flags: Sequence[Flag],
        residents: Sequence[Resident],
    ) -> None:
        self._schedule = schedule
        self._context = context
        self._gradients = gradients
        self._dropped = dropped
        self._flags = list(flags)
        self._number_of = {flag: number for number, flag in enumerate(flags)}
        self._residents = list(residents)
        self._parts: list[list[ShardView]] = [[] for _ in flags]
        for resident in self._residents:
            for view in resident.views:
                self._parts[view.flag].append(view)
        self.changed: set[int] = set()
        """The numbers of the parameters whose gradients the user has changed on this rank since the last `agree`."""
        self.factors: dict[int, list[float]] = {}
        """The factors that are not applied yet, by the parameter's number."""
        self._norms: dict[float, list[float]] = {}
        """By order, the norms of all parameters' gradients as they were at `_norms_at`."""
        self._norms_at = (0, 0)
        self._known: dict[float, dict[int, Tensor]] = {}
        """By order and `id` of the parameter, the norms in `_norms` that no call has returned yet, of shape []."""
        self._factor: tuple[Tensor, int, float] | None = None
        """The factor that a gradient was multiplied by last, the count of writes to it, and its value."""
        self._number_of_visible: dict[int, int] = {}
        """By the parameter's `id`, the number of each parameter in `_known`."""
        self._finished_at = -1
        """The schedule's `gradients_taken` when this object last waited for the mean; -1 before the first wait."""

    def operate(self, flag: Flag, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on a parameter's gradient. Every rank must call it.

        Args:
            name: the operation's name in torch.
            args, kwargs: the operation's arguments; the first is the gradient.

        Returns:
            The operation's result; NotImplemented if shards do not support it.
        """
        operation = _OPERATIONS.get(name)
        if operation is None:
            return NotImplemented
        try:
            return operation(self, self._number_of[flag], *args, **kwargs)
        except TypeError:
            if _takes(operation, args, kwargs):
                raise
            return NotImplemented  # arguments that shards do not support

    # ------------------------------------------------------------------ the short path

    def known_norm(self, parameter: Tensor, order: Any) -> Tensor | None:
        """Return the norm of a parameter's gradient if the last exchange computed it; None if `operate` must decide."""
        if self._norms_at != self._now or self.factors or self._dropped.exist:
            return None
        # Each is returned once, since the caller may write to it.
        return self._known.get(order, {}).pop(id(parameter), None)

    def multiplies(self, parameter: Tensor, factor: Any) -> bool:
        """Multiply a parameter's gradient by the factor that another was multiplied by last. False: `operate` must decide."""
        if self._factor is None or self._norms_at != self._now or self._dropped.exist:
            return False
        last, version, value = self._factor
        number = self._number_of_visible.get(id(parameter))
        if number is None or factor is not last or version_of(factor) != version:
            return False
        self.factors.setdefault(number, []).append(value)
        self.changed.add(number)
        return True

    # ------------------------------------------------------------------ operations, with torch's arguments

    def _norm(
        self, number: int, gradient: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:  # fmt: skip
        if ord is None or ord == "fro":
            ord = 2.0
        if not isinstance(ord, Real) or float(ord) <= 0 or dim is not None or keepdim:
            return NotImplemented
        norm = self._norms_of_all(float(ord))[number]
        return torch.tensor(norm, dtype=dtype or _dtype_of_norm(gradient.dtype), device=gradient.device)

    def _p_norm(
        self, number: int, gradient: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, out: Any = None,
        dtype: Any = None,
    ) -> Any:  # fmt: skip
        if out is not None:
            return NotImplemented
        return self._norm(number, gradient, p, dim, keepdim, dtype=dtype)

    def _multiply(self, number: int, gradient: Tensor, other: Any) -> Any:
        value = _number(other)
        if value is None:
            return NotImplemented
        self.factors.setdefault(number, []).append(value)
        self.changed.add(number)
        self._factor = None
        if isinstance(other, Tensor) and not other.is_inference():
            self._factor = (other, version_of(other), value)
        return gradient

    def _divide(self, number: int, gradient: Tensor, other: Any, *, rounding_mode: Any = None) -> Any:
        value = _number(other)
        if not value or rounding_mode is not None:
            return NotImplemented
        return self._multiply(number, gradient, 1 / value)

    def _clamp(self, number: int, gradient: Tensor, min: Any = None, max: Any = None) -> Any:
        bounds = [bound for bound in (min, max) if bound is not None]
        if any(_number(bound) is None for bound in bounds):
            return NotImplemented
        self._finish()
        self.changed.add(number)
        self._gradients.changes += 1
        for view in self._parts[number]:
            self._gradients.set(view, self._gradients.get(view).clamp(min, max))
        return gradient

    def _clamp_min(self, number: int, gradient: Tensor, min: Any) -> Any:
        return self._clamp(number, gradient, min)

    def _clamp_max(self, number: int, gradient: Tensor, max: Any) -> Any:
        return self._clamp(number, gradient, None, max)

    # ------------------------------------------------------------------ over ranks

    def agree(self, messages: Sequence[bytes]) -> None:
        """Check that all ranks changed the same gradients, and clear `changed`.

        Args:
            messages: one per rank, in rank order, with one byte per parameter: 0 if the rank left the gradient unchanged.

        Raises:
            UsageError: some ranks changed a gradient, and others did not.
        """
        self._refuse_some_ranks(messages, "was changed")
        self.changed = set()

    def _refuse_some_ranks(self, messages: Sequence[bytes], what: str) -> None:
        for number, answers in enumerate(zip(*messages, strict=True)):
            if any(answers) and not all(answers):
                unit, index = self._flags[number]
                ranks = [rank for rank, answer in enumerate(answers) if answer]
                raise UsageError(
                    f"the gradient of {unit.named[index].fqn} {what} through its `grad` on ranks {ranks} only, but "
                    "each rank has a part of the mean. Change gradients on every rank; to clip where ranks use "
                    "different parameters, call sharded.clip_grad_norm_(max_norm)."
                )

    def _finish(self) -> None:
        """Wait for the mean and apply factors, once for all parameters, although it is called for each."""
        if self._finished_at != self._schedule.gradients_taken:
            # torch lists all gradients before it changes one: its list would keep a tensor that is taken now.
            for unit, index in self._schedule.gradients_of_users():
                raise UsageError(
                    f"{unit.named[index].fqn}.grad was set after a backward, and an operation on the gradients of all parameters "
                    "would miss it. Set it before any backward, or call sharded.clip_grad_norm_(max_norm)."
                )
            self._schedule.finish_gradients()
            self._finished_at = self._schedule.gradients_taken
        self.apply_factors()

    def apply_factors(self, used: Set[int] | None = None) -> None:
        """Multiply gradients by their factors. If all have the same factors, the shards are scaled as a whole.

        Args:
            used: the numbers of parameters for which a rank computed and kept a gradient; None if ranks have not agreed
                on them.
        """
        if not self.factors:
            return
        factors = self.factors
        self.factors = {}
        self._gradients.changes += 1
        if used is None and self._norms and self._norms_at[0] == self._schedule.gradients_taken:
            # Ranks that have exchanged norms see the same gradients.
            visible = self._visible()
            used = {number for number, (unit, index) in enumerate(self._flags) if index in visible[unit]}
        # A shard also has parts of gradients that only other ranks computed.
        if used is not None and used <= factors.keys() and len({tuple(each) for each in factors.values()}) == 1:
            for factor in next(iter(factors.values())):
                self._gradients.scale((resident.shard for resident in self._residents), factor)
            return
        for number, each in factors.items():
            for view in self._parts[number]:
                value = self._gradients.get(view)
                for factor in each:
                    value = value * factor
                self._gradients.set(view, value)

    def _visible(self) -> dict[Unit, set[int]]:
        """Return the parameters with a gradient that the user has not dropped, by unit."""
        return {unit: unit.used - unit.dropped_gradients() for unit in dict.fromkeys(unit for unit, _ in self._flags)}

    def _norms_of_all(self, order: float) -> list[float]:
        """Return the norm of each parameter's mean gradient. Every rank must call it: at most one message is exchanged."""
        self._finish()
        if self._norms_at != self._now:
            self._norms.clear()
            self._known.clear()
            self._norms_at = self._now
        if order not in self._norms:
            count = len(self._flags)
            visible = self._visible()
            own = bytes(index in visible[unit] for unit, index in self._flags)
            own += bytes(number in self.changed for number in range(count))
            own += torch.tensor(self._own_row(order), dtype=torch.float64).numpy().tobytes()
            messages = self._context.everyone.exchange(own, f"gradient norms of order {order}")
            self._refuse_some_ranks([message[:count] for message in messages], "is visible")
            self.agree([message[count : 2 * count] for message in messages])
            rows = [
                torch.frombuffer(bytearray(message[2 * count :]), dtype=torch.float64).tolist() for message in messages
            ]
            in_order = [row[1:] for row in sorted(rows)]
            self._norms[order] = [_root_of(_combined(parts, order), order) for parts in zip(*in_order, strict=True)]
            self._make_known(order, visible)
        return self._norms[order]

    def _make_known(self, order: float, visible: dict[Unit, set[int]]) -> None:
        """Make the tensors that `known_norm` returns for the visible gradients: one tensor for each dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._number_of_visible = {}
        for number, (unit, index) in enumerate(self._flags):
            if index in visible[unit]:
                parameter = unit.named[index].parameter
                self._number_of_visible[id(parameter)] = number
                alike.setdefault((parameter.dtype, parameter.device), []).append(number)
        known = self._known[order] = {}
        for (dtype, device), numbers in alike.items():
            norms = torch.tensor(
                [self._norms[order][number] for number in numbers], dtype=_dtype_of_norm(dtype), device=device
            )
            for number, norm in zip(numbers, norms.unbind(), strict=True):
                unit, index = self._flags[number]
                known[id(unit.named[index].parameter)] = norm

    @property
    def _now(self) -> tuple[int, int]:
        """Numbers that change when gradients do, on every rank alike."""
        return self._schedule.gradients_taken, self._gradients.changes

    def _own_row(self, order: float) -> list[float]:
        """Return the place of this rank's shard, and its sums of |x|^order (or largest |x|), one for each parameter.

        A parameter that is whole on every rank of another dimension counts on the first of them.
        """
        collectives = self._context.collectives
        first = self._context.others.rank * collectives.world_size
        row: list[list[float]] = [[] for _ in self._flags]
        for resident in self._residents:
            if resident.shard.number != collectives.shard:
                continue  # an unsharded optimizer has the other ranks' shards, too
            views = [view for view in resident.views if not (first and view.named.placement.is_whole)]
            for view, power in zip(views, _powers(self._gradients.parts(resident.shard, views), order), strict=True):
                row[view.flag].append(power)
        return [first + collectives.shard, *(_combined(own, order) for own in row)]


# A norm of a positive order, or infinity, of a tensor in parts: (sum of |x|^order)^(1 / order), or the largest |x|.


def _powers(parts: Sequence[Tensor], order: float) -> list[float]:
    """Return the sum of |x|^order (or the largest |x|) of each tensor."""
    if order == 2.0:
        return list(map(float, sums_of_squares(parts)))
    norms = [torch.linalg.vector_norm(part, order, dtype=torch.float64) for part in parts]
    return [float(norm if math.isinf(order) else norm**order) for norm in norms]


def _combined(parts: Sequence[float], order: float) -> float:
    """Return the combined contribution of several parts, in their order."""
    if not math.isinf(order) or any(map(math.isnan, parts)):
        return sum(parts)
    return max(parts, default=0.0)


def _root_of(total: float, order: float) -> float:
    """Return the norm, from the combined contribution of all parts."""
    if math.isinf(order):
        return total
    if order == 2.0:
        return math.sqrt(total)
    return math.pow(total, 1 / order)


def _dtype_of_norm(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _number(value: Any) -> float | None:
    """Return a factor or a bound as a number, or None for other values. For a tensor of one element the host waits."""
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return None


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": GradientOperations._norm,
    "norm": GradientOperations._p_norm,
    "mul_": GradientOperations._multiply,
    "__imul__": GradientOperations._multiply,
    "div_": GradientOperations._divide,
    "__itruediv__": GradientOperations._divide,
    "clamp_": GradientOperations._clamp,
    "clamp_min_": GradientOperations._clamp_min,
    "clamp_max_": GradientOperations._clamp_max,
}
"""The operations, by torch's names for them."""


def _takes(operation: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation can be called with these arguments, as Python binds them."""
    try:
        inspect.signature(operation).bind(None, 0, *args, **kwargs)
    except TypeError:
        return False
    return True
