"""Owns one view of ordinary parameters and DTensors: this rank's part, with its names and its place in the whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from zeroshard.layout.placement import Placement
from zeroshard.torch_private import distributed_as, is_distributed, local_of, part_as, show_local


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of the user's model.

    Attributes:
        fqns: all its names in the model, first name first.
        shape: that of the part on this rank: its own, or that of a DTensor's local tensor.
        placement: the place of this part in the whole.
    """

    fqns: tuple[str, ...]
    parameter: nn.Parameter
    shape: torch.Size
    placement: Placement

    @property
    def fqn(self) -> str:
        return self.fqns[0]

    @cached_property
    def is_distributed(self) -> bool:
        """Whether it is a DTensor."""
        return is_distributed(self.parameter)

    @property
    def local(self) -> Tensor:
        """Return this rank's local tensor of it."""
        return local_of(self.parameter) if self.is_distributed else self.parameter.data

    def show(self, values: Tensor) -> None:
        """Point the parameter at these values."""
        if self.is_distributed:
            show_local(self.parameter, values)
        else:
            self.parameter.data = values

    def as_parameter(self, local: Tensor) -> Tensor:
        """Wrap this rank's part in a DTensor with the parameter's placements; an ordinary tensor stays as it is."""
        return distributed_as(self.parameter, local) if self.is_distributed else local

    def own_part(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of a gradient. All ranks of a DTensor must call it: it may run a sum over them."""
        return part_as(self.parameter, gradient) if self.is_distributed else gradient
