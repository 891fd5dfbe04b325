"""Owns the tensor that an optimizer is handed for a parameter's part of a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from zeroshard.layout.named_parameter import NamedParameter


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
