"""Owns the interface that ordinary parameters and DTensors share: names, this rank's part, and its place in the whole.

`torch.compile(module)` returns a new module, which holds the original as `_orig_mod`. Names in checkpoints and exports omit
that part, so files load into compiled and plain models and have the names that PEFT and transformers use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.placement import Placement
from zeroshard.torch_private import distributed_by, distribution_of, is_distributed, local_of, part_as, show_local

_WRAPPED = "_orig_mod"


def name_of(fqn: str) -> str:
    """Remove the parts of a dotted name that `torch.compile` inserted."""
    if _WRAPPED not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part != _WRAPPED)


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of the user's model.

    Attributes:
        fqns: all its names in the model, starting with the first.
        shape: the shape of this rank's part: of the parameter, or of a DTensor's local tensor.
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
        return is_distributed(self.parameter)

    @property
    def local(self) -> Tensor:
        return local_of(self.parameter) if self.is_distributed else self.parameter.data

    def show(self, values: Tensor) -> None:
        if self.is_distributed:
            show_local(self.parameter, values)
        else:
            self.parameter.data = values

    def as_parameter(self, local: Tensor) -> Tensor:
        """Wrap this rank's part in a DTensor with the parameter's placements; for an ordinary parameter, return it unchanged."""
        return distributed_by(distribution_of(self.parameter), local) if self.is_distributed else local

    def own_part(self, gradient: Tensor) -> Tensor:
        """Return this rank's part of a gradient. All ranks of a DTensor's mesh must call it, since it may sum over them."""
        return part_as(self.parameter, gradient) if self.is_distributed else gradient


def placement_of(fqn: str, parameter: nn.Parameter) -> Placement:
    """Find the place of this rank's part of a parameter. An ordinary parameter is whole on each rank.

    Raises:
        UsageError: a DTensor has several mesh dimensions, a placement other than Shard and Replicate, or unequal chunks. (The
            last chunk may be smaller, but not empty.)
    """
    if not is_distributed(parameter):
        return Placement.whole(parameter.shape)
    cut: Any = parameter
    mesh = cut.device_mesh
    if mesh.ndim != 1:
        raise UsageError(
            f"parameter {fqn} is a DTensor over {mesh.ndim} dimensions of a mesh, {cut.placements}: divide it over "
            'one dimension (tensor parallelism), and shard over another, group=mesh["dp"].'
        )
    (kind,) = cut.placements
    if type(kind).__name__ not in ("Shard", "Replicate"):
        raise UsageError(
            f"parameter {fqn} is a DTensor placed as {kind}, but zeroshard takes only Shard and Replicate: use those in "
            "the plan of parallelize_module."
        )
    placement = last = Placement.whole(parameter.shape)
    if type(kind).__name__ == "Shard":
        dim = kind.dim % parameter.ndim
        placement = Placement.chunk(parameter.shape, dim, mesh.get_local_rank(), mesh.size())
        last = Placement.chunk(parameter.shape, dim, mesh.size() - 1, mesh.size())
    own = tuple(local_of(parameter).shape)
    if own != placement.local_shape or (0 in last.local_shape and parameter.numel()):
        raise UsageError(
            f"parameter {fqn} of shape {tuple(parameter.shape)} is a DTensor cut over {mesh.size()} ranks, of which "
            f"this one has {own}: choose a number of ranks that gives equal chunks (the last may be smaller, but not "
            "empty)."
        )
    return placement


def refuse_distributed(
    parameters: Iterable[tuple[str, Tensor]],
    what: str,
    remedy: str = 'Call zeroshard.shard(model, optimizer, stage, group=mesh["dp"]), which takes DTensors.',
) -> None:
    """Raise `UsageError` if one of the named parameters is a DTensor: the feature `what` takes only ordinary ones."""
    for name, parameter in parameters:
        if is_distributed(parameter):
            raise UsageError(
                f"parameter {name} is a DTensor, whose values are divided over ranks, and {what} takes ordinary parameters. "
                f"{remedy}"
            )
