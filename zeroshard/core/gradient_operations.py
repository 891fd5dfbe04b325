"""Owns torch's operations on `parameter.grad` between the last backward and the step, when the mean over ranks is in shards.

`torch.nn.utils.clip_grad_norm_` takes each gradient's norm and multiplies all gradients by one factor. `clip_grad_value_`
clamps each gradient. The first norm fetches the norms of all parameters in one message. A factor waits for the step, or for the
next norm: if all gradients have the same factors, the shards are scaled as `sharded.clip_grad_norm_` scales them.

Norms are bit-identical under every policy: each shard's part of a parameter is summed by itself, then the parts in one tree by the
shards' numbers.

[Note: one call for each gradient]
torch calls each operation once for each gradient. The first call does the work for all of them, and the others look its result up
(`known_norm`, `multiplied`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence, Set
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.classes import TakenGradient
from zeroshard.core.context import Context
from zeroshard.core.norm import sums_of_squares
from zeroshard.core.resident import MeanGradients, Resident, ShardView
from zeroshard.core.schedule import Schedule
from zeroshard.core.unit import Unit
from zeroshard.core.users_optimizer import DroppedGradients
from zeroshard.errors import UsageError
from zeroshard.torch_private import labelled, version_of

Flag = tuple[Unit, int]
"""A trainable parameter: its unit, and its index there."""


class Numbered:
    """The trainable parameters, numbered, with this rank's parts of them.

    Args:
        flags: the parameters in their order.
        residents: this rank's shards of them.
    """

    def __init__(self, flags: Sequence[Flag], residents: Sequence[Resident]) -> None:
        self.flags = flags
        self.residents = residents
        self.units = list(dict.fromkeys(unit for unit, _ in flags))
        self.number_of = {flag: number for number, flag in enumerate(flags)}
        self.ids = [id(unit.named[index].parameter) for unit, index in flags]
        """The parameters' `id`s."""
        self.number_of_id = {parameter: number for number, parameter in enumerate(self.ids)}
        self.parts: list[list[ShardView]] = [[] for _ in flags]
        """This rank's parts of each parameter."""
        for resident in residents:
            for view in resident.views:
                self.parts[view.flag].append(view)
        self.alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        """The numbers of the parameters of each dtype and device."""
        for number, (unit, index) in enumerate(flags):
            parameter = unit.named[index].parameter
            self.alike.setdefault((parameter.dtype, parameter.device), []).append(number)


class GradientOperations:
    """The operations on gradients in one step. The first operation creates this object. See the module's docstring.

    Args:
        gradients: the mean over ranks, in this rank's shards.
        dropped: the gradients that an optimizer has dropped, after which operations on the others are refused.
        numbered: the parameters whose gradients are operated on.
    """

    def __init__(
        self,
        schedule: Schedule,
        context: Context,
        gradients: MeanGradients,
        dropped: DroppedGradients,
        numbered: Numbered,
    ) -> None:
        self._schedule = schedule
        self._context = context
        self._gradients = gradients
        self._dropped = dropped
        self._numbered = numbered
        self._flags = numbered.flags
        self._residents = numbered.residents
        self._changed: set[int] = set()
        self._factors: dict[int, list[float]] = {}
        self._is_finished = False
        """Whether this object has waited for the mean, and no gradient has arrived since then."""
        self._is_agreed = False
        """Whether ranks have exchanged norms since then, and so see the same gradients."""
        self._norms: dict[float, Tensor] = {}
        """By order, the norms of all parameters' gradients as they are now, in fp64 in CPU memory."""
        self._known: dict[float, dict[int, Tensor]] = {}
        """By order and `id` of the parameter, the norms in `_norms` that no call has returned yet, of shape []."""
        self._factor: tuple[Tensor, int, float] | None = None
        """The factor that a gradient was multiplied by last, the count of writes to it, and its value."""
        self._multiplied: list[int] = []
        """The `id`s of the parameters whose gradients `multiplied` has multiplied by it. `_take_multiplied` empties the list."""
        self._visible_ids: Set[int] = set()
        """The `id`s of the parameters whose gradients were visible when `_norms` were exchanged."""

    @property
    def factors(self) -> dict[int, list[float]]:
        """The factors that are not applied yet, by the parameter's number."""
        self._take_multiplied()
        return self._factors

    @property
    def changed(self) -> set[int]:
        """The numbers of the parameters whose gradients the user has changed on this rank since the last `agree`."""
        self._take_multiplied()
        return self._changed

    def restart(self) -> None:
        """Forget what is known of the gradients, since one has arrived, was replaced, or was dropped."""
        self._is_finished = False
        self._is_agreed = False
        self.forget_norms()

    def forget_norms(self) -> None:
        """Forget norms, since gradients were changed. The callers do so on every rank alike."""
        self._take_multiplied()
        self._factor = None
        self._norms.clear()
        self._known.clear()

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
            return operation(self, self._numbered.number_of[flag], *args, **kwargs)
        except TypeError:
            if _takes(operation, args, kwargs):
                raise
            return NotImplemented  # arguments that shards do not support

    # ------------------------------------------------------------------ the short path

    def known_norm(self, gradient: TakenGradient, order: Any) -> Tensor | None:
        """Return the norm of a gradient if the last exchange computed it; None if `operate` must decide."""
        known = self._known.get(order)
        # Each is returned once, since the caller may write to it.
        return None if known is None else known.pop(gradient.key, None)

    def multiplied(self, gradient: TakenGradient, factor: Any) -> TakenGradient | None:
        """Multiply a gradient by the factor that another was multiplied by last. None: `operate` must decide."""
        last = self._factor
        if last is None or factor is not last[0] or version_of(factor) != last[1]:
            return None
        if gradient.key not in self._visible_ids:
            return None
        self._multiplied.append(gradient.key)
        return gradient

    def _take_multiplied(self) -> None:
        if self._multiplied:
            assert self._factor is not None
            value = self._factor[2]
            number_of = self._numbered.number_of_id
            for parameter in self._multiplied:
                self._factors.setdefault(number_of[parameter], []).append(value)
            self._changed.update([number_of[parameter] for parameter in self._multiplied])
            self._multiplied.clear()

    # ------------------------------------------------------------------ operations, with torch's arguments

    def _norm(
        self, number: int, gradient: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:  # fmt: skip
        if ord is None or ord == "fro":
            ord = 2.0
        if not isinstance(ord, Real) or float(ord) <= 0 or dim is not None or keepdim:
            return NotImplemented
        norm = self._norms_of_all(float(ord))[number]
        return norm.to(gradient.device, dtype or _dtype_of_norm(gradient.dtype), copy=True)

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
        self._known.clear()
        self._factor = None
        if self._is_agreed and isinstance(other, Tensor) and not other.is_inference():
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
        self.forget_norms()
        for view in self._numbered.parts[number]:
            self._gradients.set(view, self._gradients.get(view).clamp(min, max))
        return gradient

    # ------------------------------------------------------------------ over ranks

    def agree(self, messages: Sequence[bytes]) -> None:
        """Check that all ranks changed the same gradients, and clear `changed`.

        Args:
            messages: one per rank, in rank order, with one byte per parameter: 0 if the rank left the gradient unchanged. One for
                all if they are equal.

        Raises:
            UsageError: some ranks changed a gradient, and others did not.
        """
        self._refuse_some_ranks(messages, "was changed")
        self.changed.clear()

    def _refuse_some_ranks(self, messages: Sequence[bytes], what: str) -> None:
        if messages.count(messages[0]) == len(messages):
            return
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
        if not self._is_finished:
            # torch lists all gradients before it changes one: its list would keep a tensor that is taken now.
            for unit, index in self._schedule.gradients_of_users():
                raise UsageError(
                    f"{unit.named[index].fqn}.grad was set after a backward, and an operation on the gradients of all parameters "
                    "would miss it. Set it before any backward, or call sharded.clip_grad_norm_(max_norm)."
                )
            self._schedule.finish_gradients()
            self._is_finished = True
        self.apply_factors()

    def apply_factors(self, used: Set[int] | None = None) -> None:
        """Multiply gradients by their factors. If all have the same factors, the shards are scaled as a whole.

        Args:
            used: the numbers of parameters for which a rank computed and kept a gradient; None if ranks have not agreed
                on them.
        """
        if not self.factors:
            return
        factors = self._factors
        self._factors = {}
        self.forget_norms()
        if used is None and self._is_agreed:
            used = {number for number, is_visible in enumerate(self._visible_flags()) if is_visible}
        # A shard also has parts of gradients that only other ranks computed.
        if used is not None and used <= factors.keys() and len({tuple(each) for each in factors.values()}) == 1:
            for factor in next(iter(factors.values())):
                self._gradients.scale([resident.shard for resident in self._residents], factor)
            return
        for number, each in factors.items():
            for view in self._numbered.parts[number]:
                value = self._gradients.get(view)
                for factor in each:
                    value = value * factor
                self._gradients.set(view, value)

    def _visible(self) -> dict[Unit, set[int]]:
        """Return the parameters with a gradient that the user has not dropped, by unit."""
        return {unit: unit.used - unit.dropped_gradients() for unit in dict.fromkeys(unit for unit, _ in self._flags)}

    def _norms_of_all(self, order: float) -> Tensor:
        """Return the norms of all parameters' mean gradients, fp64. Every rank must call it: at most one message is exchanged."""
        self._finish()
        if order not in self._norms:
            count = len(self._flags)
            visible = self._visible_flags()
            changed = self.changed
            own = visible + (bytes(number in changed for number in range(count)) if changed else bytes(count))
            what = f"gradient norms of order {order}"
            everyone = self._context.everyone
            with labelled("exchange of gradient norms"):
                found = everyone.agree(
                    own, what, self._own_row(order), torch.maximum if math.isinf(order) else torch.add
                )
            messages = [own] if found.are_equal else everyone.exchange(own, what)  # for the names of ranks
            self._refuse_some_ranks([message[:count] for message in messages], "is visible")
            self.agree([message[count : 2 * count] for message in messages])
            self._norms[order] = _roots_of(torch.tensor(found.values, dtype=torch.float64, device="cpu"), order)
            self._is_agreed = True
            self._make_known(order, visible)
        return self._norms[order]

    def _visible_flags(self) -> bytes:
        """Return one byte for each parameter: 1 if it has a gradient that the user has not dropped."""
        if not any(unit.replaced_gradients for unit in self._numbered.units):
            return b"".join([unit.used_flags for unit in self._numbered.units])
        visible = self._visible()
        return bytes(index in visible[unit] for unit, index in self._flags)

    def _make_known(self, order: float, visible: bytes) -> None:
        """Make the tensors that `known_norm` returns for the visible gradients: one tensor for each dtype and device."""
        ids = self._numbered.ids
        norms = self._norms[order]
        known: dict[int, Tensor] = {}
        for (dtype, device), numbers in self._numbered.alike.items():
            alike = norms if len(numbers) == len(ids) else norms[numbers]
            known |= zip(
                [ids[number] for number in numbers], alike.to(device, _dtype_of_norm(dtype)).unbind(), strict=True
            )
        if 0 in visible:
            known = {ids[number]: known[ids[number]] for number, is_visible in enumerate(visible) if is_visible}
        self._known[order] = known
        self._visible_ids = set(known)

    def _own_row(self, order: float) -> list[float]:
        """Return the sums of |x|^order (or largest |x|) of this rank's shard, one for each parameter.

        A parameter that is whole on every rank of another dimension counts on the first of them.
        """
        row = [0.0] * len(self._flags)
        views: list[ShardView] = []
        parts: list[Tensor] = []
        for resident in self._residents:
            if resident.shard.number == resident.unit.counted_shard:
                views += resident.views
                parts += self._gradients.parts(resident.shard, resident.views)
        for view, power in zip(views, _powers(parts, order), strict=True):
            before = row[view.flag]
            row[view.flag] = _larger(before, power) if math.isinf(order) else before + power
        return row


# A norm of a positive order, or infinity, of a tensor in parts: (sum of |x|^order)^(1 / order), or the largest |x|.


def _powers(parts: Sequence[Tensor], order: float) -> list[float]:
    """Return the sum of |x|^order (or the largest |x|) of each tensor."""
    if not parts:
        return []
    if order == 2.0:
        powers = sums_of_squares(parts)
    else:
        norms = [torch.linalg.vector_norm(part, order, dtype=torch.float64) for part in parts]
        powers = norms if math.isinf(order) else [norm**order for norm in norms]
    device = powers[0].device
    values: list[float] = torch.stack([power.to(device) for power in powers]).tolist()
    return values


def _larger(one: float, other: float) -> float:
    """Return the larger number, or NaN if one of them is NaN."""
    return one + other if math.isnan(one) or math.isnan(other) else max(one, other)


def _roots_of(totals: Tensor, order: float) -> Tensor:
    """Return the norms, from the combined contributions of all parts."""
    if math.isinf(order):
        return totals
    return totals.sqrt() if order == 2.0 else totals ** (1 / order)


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
    "clamp_min_": lambda self, number, gradient, min: self._clamp(number, gradient, min),
    "clamp_max_": lambda self, number, gradient, max: self._clamp(number, gradient, None, max),
}
"""The operations, by torch's names for them."""


def _takes(operation: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation can be called with these arguments, as Python binds them."""
    try:
        inspect.signature(operation).bind(None, 0, *args, **kwargs)
    except TypeError:
        return False
    return True
