"""Owns this rank's shards as the optimizer's step sees them: the tensors that it updates, and their mean gradients.

States that are stored where the optimizer steps are updated in place, in few calls. For shards that rest elsewhere, see
travelling.py.

The optimizer finds the 1-D tensors that it updates, and the state of each, by identity, so those tensors stay and their memory
is exchanged (see `placeholder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from zeroshard.core.context import Live
from zeroshard.core.gradient_bucket import Shard
from zeroshard.core.named_parameter import NamedParameter
from zeroshard.core.norm import scale_, sum_of_parts, sum_of_squares, sums_of_squares
from zeroshard.core.storage.base import Slot, Storage
from zeroshard.core.storage.buffers import BufferPool
from zeroshard.core.storage.transfers import CPU
from zeroshard.core.unit import Unit
from zeroshard.errors import StorageError
from zeroshard.policy import Policy
from zeroshard.torch_private import storage_users

LENT_NUMEL = 1 << 26
"""The maximum number of gradient elements that are cast to a wider dtype at once for the optimizer: 256 MiB."""
SUB_GROUP_NUMEL = 1 << 22
"""The elements of a sub-group, if the policy allows more: large enough for a disk, small enough that several fit in memory."""


@dataclass(frozen=True)
class ShardView:
    """The part of one parameter in one shard: the tensor that the optimizer updates.

    `value` is 1-D, or, where parameters are not cut, of the parameter's shape. `start` and `numel` are its place in the shard,
    and `parameter_start` is its start in the flattened parameter.
    """

    shard: Shard
    named: NamedParameter
    flag: int
    """The number of the parameter's flag among the flags of used parameters."""
    value: Tensor
    start: int
    numel: int
    parameter_start: int

    def part_of(self, flat: Tensor) -> Tensor:
        """Return the view's part of a tensor with the shard's elements, in the view's shape."""
        return flat[self.start : self.start + self.numel].view_as(self.value)


def runs_along(state: Any, name: str, value: Tensor) -> TypeGuard[Tensor]:
    """Return whether the optimizer's state `name` has one number for each element of `value`."""
    return isinstance(state, Tensor) and state.ndim > 0 and state.shape == value.shape and name != "step"


class Resident:
    """A shard whose values are all stored where the optimizer steps.

    Args:
        unit: the unit of its parameters.
        views: the parts of parameters in it.
        optimizer: the optimizer, whose states are keyed by the views' tensors.

    Attributes:
        gradient: the memory of the mean gradient [numel]; None while it is elsewhere.
        gradient_parts: the parts of the gradient, by view, if they are the same in every step.
    """

    def __init__(self, shard: Shard, unit: Unit, views: Sequence[ShardView], optimizer: torch.optim.Optimizer) -> None:
        self.shard = shard
        self.unit = unit
        self.views = views
        self._optimizer = optimizer
        self._all_slots: list[Slot] = [shard.rest, shard.master, shard.gradient]
        self.gradient = shard.gradient.memory_in(shard.step)
        self.gradient_parts: list[Tensor] | None = None
        if self.gradient is not None and not _is_narrow(shard):
            self.gradient_parts = [view.part_of(self.gradient) for view in views]
        self.unpark()

    def look_at(self, master: Tensor | None) -> None:
        """Point the optimizer's tensors at these master weights, or at placeholders if there are none."""
        for view in self.views:
            view.value.data = placeholder(view.value) if master is None else view.part_of(master)

    def unpark(self) -> None:
        """Attach the optimizer's tensors to their memory again."""
        self.look_at(self.shard.master.memory_in(self.shard.step))

    def enter(self) -> None:
        """Block until the optimizer's tensors have all values of the shard, and no transfer is under way.

        Raises:
            UsageError: user code wrote to these tensors while they were placeholders (`Travelling` only).
        """
        for slot in (self.shard.rest, self.shard.master, self.shard.gradient):
            slot.wait()

    def leave(self, *, write: bool, update_rest: bool) -> None:
        """Start to write changes to their place.

        Args:
            write: whether master weights and states may have changed.
            update_rest: whether to update the parameters at rest from the master weights.
        """
        if update_rest and self.shard.rest is not self.shard.master:
            master = self.shard.master.memory_in(self.shard.step)
            assert master is not None
            self.shard.rest.write(master)

    def abandon(self) -> None:
        """Drop values in flight, after an error. The values at rest are those that were last written."""
        for slot in self._all_slots:
            with suppress(StorageError):
                slot.wait()


def placeholder(tensor: Tensor) -> Tensor:
    """Return the data of a tensor whose values are elsewhere: one NaN (0, if it holds integers), expanded to its shape."""
    value = float("nan") if tensor.is_floating_point() else 0
    return tensor.new_full((1,) * tensor.ndim, value).expand(tensor.shape)


R = TypeVar("R", bound=Resident)


def numel_of(resident: Resident) -> int:
    """Return the number of elements of a resident's shard."""
    return resident.shard.numel


def packed(residents: Iterable[R], *limits: tuple[Callable[[R], int], int]) -> list[list[R]]:
    """Split residents into groups, in their order.

    With an offload ratio, some residents step on the accelerator, in separate groups.

    Args:
        limits: pairs of a function that weighs a resident, and the most that a group of several residents may weigh.
    """
    by_step: dict[Storage, list[R]] = {}
    for resident in residents:
        by_step.setdefault(resident.shard.step, []).append(resident)
    groups: list[list[R]] = []
    for stepping in by_step.values():
        groups.append([])
        used = [0] * len(limits)
        for resident in stepping:
            weights = [weigh(resident) for weigh, _ in limits]
            sums = [before + weight for before, weight in zip(used, weights, strict=True)]
            if any(before and now > most for before, now, (_, most) in zip(used, sums, limits, strict=True)):
                groups.append([])
                sums = weights
            groups[-1].append(resident)
            used = sums
    return groups


class SubGroups:
    """The shards that this rank updates, in groups: one call of the optimizer updates a group."""

    def __init__(self, residents: Sequence[Resident], policy: Policy) -> None:
        self._residents = residents
        here: list[Resident] = []
        copied: list[Resident] = []
        for resident in residents:
            shard = resident.shard
            if shard.rest is not shard.master and shard.rest.memory_in(shard.step) is None:
                copied.append(resident)  # a step copies updated values to where the parameters rest
            else:
                here.append(resident)
        self._in_place = packed(here, (lambda one: one.shard.numel if one.gradient_parts is None else 0, LENT_NUMEL))
        # A part is copied while the next is updated.
        self._in_place += packed(copied, (numel_of, min(SUB_GROUP_NUMEL, policy.offload_optimizer.sub_group_numel)))

    @property
    def nbytes(self) -> int:
        """The bytes of memory through which shards that rest elsewhere pass."""
        return 0

    def run(
        self, on_left: Callable[[Sequence[Resident]], None], *, at_once: bool = False
    ) -> Iterator[Sequence[Resident]]:
        """Yield each group in turn, or all shards `at_once`, in memory.

        After its turn, start to write its changes back and call `on_left(group)`.
        """
        with self._abandoned_on_error():
            for residents in [self._residents] if at_once else self._in_place:
                yield from self._in_memory(residents)
                on_left(residents)

    def _in_memory(self, residents: Sequence[Resident]) -> Iterator[Sequence[Resident]]:
        """Load a group into memory, yield it, and then start writing its changes back."""
        for resident in residents:
            resident.enter()
        yield residents
        for resident in residents:
            resident.leave(write=True, update_rest=True)

    def prefetch(self) -> None:
        """Start to read the next step's values, except its gradients, as far as there is room."""

    @contextmanager
    def opened(self, resident: Resident, *, write: bool = False, read: bool = True) -> Iterator[None]:
        """Point the optimizer's tensors, inside the block, at one shard's master weights and states in memory.

        Args:
            write: whether to store changes made inside the block, and values that are set in the optimizer's state.
            read: whether to read the values; False if all of them will be overwritten.
        """
        resident.shard.master.wait()
        yield

    def settle(self) -> None:
        """Drop values that were read ahead, wait for writes in flight, and raise their errors."""

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Abandon unfinished transfers if the code inside raises, so that a checkpoint can be loaded afterwards."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop values in flight, with their errors. Values at rest will be read or written again."""
        for resident in self._residents:
            resident.abandon()


class Casts:
    """Casts of gradients for the optimizer, in one step.

    In CPU memory the sub-groups of the step use the same buffers, one after the other. In fresh memory, page faults take several
    times as long as the cast.
    """

    def __init__(self) -> None:
        self._pool = BufferPool(CPU)
        self._lent: list[tuple[Tensor, int]] = []
        """Each buffer in use, with the number of users of its storage before the optimizer gets the buffer."""

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of a 1-D tensor in another dtype."""
        if tensor.device != CPU:
            return tensor.to(dtype)
        buffer = self._pool.acquire(tensor.numel(), dtype)
        self._lent.append((buffer, storage_users(buffer)))
        return buffer.copy_(tensor)

    def take_back(self) -> None:
        """End the use of all casts. Memory that the optimizer has kept stays the optimizer's and is not used again."""
        for buffer, own_uses in self._lent:
            if storage_users(buffer) <= own_uses:
                self._pool.release(buffer)
        self._lent.clear()


class MeanGradients:
    """The mean gradients of this rank's shards for the optimizer: scaled, or with factors to apply when it gets them.

    Gradients in the master weights' dtype and the optimizer's memory are multiplied in place. Others are not: 16-bit gradients
    would lose digits, and gradients in other places would be copied twice. Their factors are kept until the optimizer gets them.

    Args:
        accelerator: the storage of unsharded gradients, even if the optimizer steps elsewhere.

        live: the step, with the factors that `scale` has left for later.
    """

    def __init__(self, accelerator: Storage, live: Live) -> None:
        self._accelerator = accelerator
        self._live = live

    @property
    def factors(self) -> list[float | Tensor]:
        """The factors that `scale` has left for later."""
        return self._live.step.factors

    @property
    def _product(self) -> float | Tensor:
        return math.prod(self.factors, start=1.0)

    def _multiply(self, shard: Shard, gradient: Tensor) -> None:
        """Multiply a shard's values in place by the factors that are left; for a 16-bit gradient once, by their product."""
        for factor in [self._product] if _is_narrow(shard) else self.factors:
            scale_([gradient], factor)

    @contextmanager
    def opened(self, shard: Shard, *, write: bool = False) -> Iterator[Tensor]:
        """Open a shard's mean gradient, as it was reduced, in memory where the optimizer steps."""
        where = shard.step
        shard.gradient.wait(where.device)
        # Scratch that is not kept: the norm of a step needs none (see `sum_of_squares`).
        with shard.gradient.borrowed(where, BufferPool(where.device, where.room), write=write) as gradient:
            yield gradient

    def get(self, view: ShardView) -> Tensor:
        """Return a view's part of the mean gradient, 1-D, in the master weights' dtype, scaled as the optimizer will see it."""
        return self.parts(view.shard, [view])[0]

    def parts(self, shard: Shard, views: Sequence[ShardView]) -> list[Tensor]:
        """Return, as `get` does, the parts of several views of one shard."""
        if _is_scaled_at_once(shard):
            gradient = _in_place(shard, shard.step)
            return [gradient[view.start : view.start + view.numel] for view in views]
        with self.opened(shard) as gradient:
            parts = [gradient[view.start : view.start + view.numel] for view in views]
            parts = [part.to(shard.master.dtype, copy=True) for part in parts]
            for part in parts:
                self._multiply(shard, part)
            return parts

    def set(self, view: ShardView, value: Tensor) -> None:
        """Overwrite the values that `get` returns."""
        if not _is_scaled_at_once(view.shard):
            value = value / self._product
        view.shard.squares = None
        with self.opened(view.shard, write=True) as gradient:
            gradient[view.start : view.start + view.numel].copy_(value)

    def drop(self, shard: Shard, views: Sequence[ShardView]) -> None:
        """Set the mean gradient of some of a shard's views to zero."""
        if not views:
            return
        shard.squares = None
        with self.opened(shard, write=True) as gradient:
            for view in views:
                gradient[view.start : view.start + view.numel].zero_()

    def scale(self, shards: Iterable[Shard], coefficient: float | Tensor) -> None:
        """Multiply gradients in place, except 16-bit gradients and gradients in other memory: `lent` applies the factor to those.

        Args:
            coefficient: a number, or a tensor of shape [] on the accelerator.
        """
        shards = list(shards)
        if isinstance(coefficient, Tensor) and any(shard.step.device.type == "cpu" for shard in shards):
            coefficient = coefficient.item()  # the CPU steps: it waits for the accelerator in any case
        if not isinstance(coefficient, Tensor) and coefficient == 1.0:
            return
        here = [shard for shard in shards if _is_scaled_at_once(shard)]
        scale_([_in_place(shard, shard.step) for shard in here], coefficient)
        for shard in here:
            shard.squares = None
        self.factors.append(coefficient)
        if not isinstance(coefficient, Tensor) and coefficient == 0.0:
            self.apply_factors(shards)  # `set` divides by the factors that are left

    def apply_factors(self, shards: Iterable[Shard]) -> None:
        """Apply the factors that are left, before gradients of another backward are added."""
        for shard in shards:
            if not _is_scaled_at_once(shard):
                with self.opened(shard, write=True) as gradient:
                    self._multiply(shard, gradient)
                shard.squares = None
        self.factors.clear()

    def lent(self, shard: Shard, flat: Tensor, casts: Casts) -> Tensor:
        """Return a shard's gradient `flat`, now in memory where the optimizer steps, with the factors that are left applied."""
        if flat.dtype != shard.master.dtype:
            flat = casts.cast(flat, shard.master.dtype)
        self._multiply(shard, flat)
        return flat

    def sum_of_squares(self, shards: Sequence[Shard]) -> Tensor:
        """Return the sum of squares of gradients as the optimizer will see them, as fp64 of shape []."""
        found: dict[Shard, Tensor] = {}
        here: dict[Shard, Storage] = {}
        for shard in shards:
            # Factors of a 16-bit gradient multiply its sum of squares. Other gradients are multiplied before they are squared.
            if self.factors and not _is_narrow(shard) and not _is_scaled_at_once(shard):
                continue
            if shard.squares is not None:
                found[shard] = shard.squares
                continue
            # Each is summed in the memory that holds it: whole gradients are on the accelerator even if the CPU steps.
            for place in (self._accelerator, shard.step):
                if shard.gradient.memory_in(place) is not None:
                    here[shard] = place
                    break
        found |= zip(here, sums_of_squares([_in_place(*at) for at in here.items()]), strict=True)
        parts = []
        for shard in shards:
            if shard not in found:
                with self.opened(shard) as gradient:
                    if not _is_narrow(shard):
                        self._multiply(shard, gradient)
                    found[shard] = sum_of_squares(gradient)
            squares = found[shard]
            if _is_narrow(shard):
                squares = squares * self._product**2
            parts.append(squares)
        if not parts:
            return torch.zeros((), dtype=torch.float64)
        return sum_of_parts(parts)


def _in_place(shard: Shard, storage: Storage) -> Tensor:
    """Return a shard's mean gradient, as it was reduced, which rests in memory of `storage`."""
    slot = shard.gradient
    slot.refuse_empty()
    slot.wait(storage.device)
    memory = slot.memory_in(storage)
    assert memory is not None
    return memory


def _is_scaled_at_once(shard: Shard) -> bool:
    """Return whether `scale` multiplies the gradient in place."""
    return not _is_narrow(shard) and shard.gradient.memory_in(shard.step) is not None


def _is_narrow(shard: Shard) -> bool:
    """Return whether the gradient's dtype differs from the master weights' dtype."""
    return shard.gradient.dtype != shard.master.dtype
