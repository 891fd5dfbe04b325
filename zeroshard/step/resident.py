"""Owns one shard as the optimizer's step sees it, in memory where the optimizer steps. For others see travelling.py.

The optimizer finds the 1-D tensors that it updates, and the state of each, by identity. So those tensors stay, and
their memory is exchanged: see `placeholder`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from zeroshard.errors import StorageError
from zeroshard.gradients.gradient_bucket import Shard
from zeroshard.layout.named_parameter import NamedParameter
from zeroshard.storage.base import Slot


@dataclass(frozen=True)
class ShardView:
    """The part of one parameter in one shard: the tensor that the optimizer updates.

    `value` is 1-D, or, where parameters are not cut, of the parameter's shape. `start` and `numel` are its place in the shard,
    and `parameter_start` that in the flattened parameter.
    """

    named: NamedParameter
    flag: int
    """Which of the flags of used parameters is this one's."""
    value: Tensor
    start: int
    numel: int
    parameter_start: int

    def part_of(self, flat: Tensor) -> Tensor:
        """Return the view's part of a tensor with the shard's elements, in the view's shape."""
        return flat[self.start : self.start + self.numel].view_as(self.value)


def runs_along(state: Any, name: str, value: Tensor) -> TypeGuard[Tensor]:
    """Return whether the optimizer's state `name` has one number for each element of `value`."""
    return isinstance(state, Tensor) and state.ndim > 0 and state.numel() == value.numel() and name != "step"


class Resident:
    """A shard whose values are all in memory where the optimizer steps.

    Args:
        views: the parts of parameters in it.
        optimizer: has the states, by the views' tensors.

    Attributes:
        gradient: the memory of the mean gradient [numel]; None while it is elsewhere.
        gradient_parts: the parts of the gradient, by view, where they are the same in every step.
    """

    is_in_place = True

    def __init__(self, shard: Shard, views: Sequence[ShardView], optimizer: torch.optim.Optimizer) -> None:
        self.shard = shard
        self.views = views
        self._optimizer = optimizer
        self.gradient = shard.gradient.memory_in(shard.step)
        lent = self.gradient if shard.gradient.dtype == shard.master.dtype else None
        self.gradient_parts = None if lent is None else [view.part_of(lent) for view in views]
        self.unpark()

    def park(self) -> None:
        """Detach the optimizer's tensors from their memory, which will be parked."""
        self._look(None)

    def unpark(self) -> None:
        """Attach the optimizer's tensors to their memory again."""
        self._look(self.shard.master.memory_in(self.shard.step))

    def _look(self, master: Tensor | None) -> None:
        for view in self.views:
            view.value.data = placeholder(view.value) if master is None else view.part_of(master)

    @property
    def is_copied_to_rest(self) -> bool:
        """Whether a step copies updated values to other memory, where the parameters rest."""
        shard = self.shard
        return shard.rest is not shard.master and shard.rest.memory_in(shard.step) is None

    def expect_new_states(self) -> None:
        """Take the optimizer's states, when the shard is opened next, for values to keep, as after `load_state_dict`."""
        return

    def enter(self) -> None:
        """Block until the optimizer's tensors look at all values of the shard, and no transfer is under way.

        Raises:
            UsageError: user code wrote to the memory of these tensors meanwhile.
        """
        for slot in (self.shard.rest, self.shard.master, self.shard.gradient):
            slot.wait()

    def leave(self, *, write: bool, update_rest: bool) -> None:
        """Start to write changes to their place.

        Args:
            write: master weights and states may have changed.
            update_rest: the parameters at rest follow the master weights.
        """
        if update_rest and self.shard.rest is not self.shard.master:
            master = self.shard.master.memory_in(self.shard.step)
            assert master is not None
            self.shard.rest.write(master)

    def abandon(self) -> None:
        """Drop values in flight, after an error. The values at rest are those that were last written."""
        for slot in self._all_slots():
            with suppress(StorageError):
                slot.wait()

    def _all_slots(self) -> list[Slot]:
        return [self.shard.rest, self.shard.master, self.shard.gradient]


def placeholder(tensor: Tensor) -> Tensor:
    """Return the data of a tensor whose values are elsewhere: one NaN (0, if it holds integers), expanded to its shape."""
    value = float("nan") if tensor.is_floating_point() else 0
    return tensor.new_full((1,) * tensor.ndim, value).expand(tensor.shape)


def is_placeholder(tensor: Tensor) -> bool:
    """Return whether the tensor still shows its placeholder's NaN."""
    return bool(tensor.as_strided((1,), (1,)).isnan())
