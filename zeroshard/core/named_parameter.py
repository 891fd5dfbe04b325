"""Owns the interface that ordinary parameters and DTensors share: names, this rank's part, and its place in the whole.

`torch.compile(module)` returns a new module, which holds the original as `_orig_mod`; `checkpoint_wrapper(module)` holds it as
`_checkpoint_wrapped_module`. zeroshard's names omit these parts: in files, states and errors. So files load into wrapped and
plain models and have the names that PEFT and transformers use. `named_parameters`, `named_buffers` and `named_modules` yield
such names; names of torch's methods are only for finding a module in the model again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.placement import Placement
from zeroshard.errors import UsageError
from zeroshard.torch_private import distributed_by, distribution_of, is_distributed, local_of, part_as, show_local

EP = "ep"
"""The name of the mesh dimension over which experts are divided, with different batches on its ranks."""

_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def name_of(fqn: str) -> str:
    """Remove the parts of a dotted name that torch's wrappers inserted."""
    if _WRAPPED.isdisjoint(parts := fqn.split(".")):
        return fqn
    return ".".join(part for part in parts if part not in _WRAPPED)


def named_parameters(module: nn.Module, *, all_names: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter); with `all_names`, tied parameters under each of their names."""
    for fqn, parameter in module.named_parameters(remove_duplicate=not all_names):
        yield name_of(fqn), parameter


def named_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer), each buffer once."""
    for fqn, buffer in module.named_buffers():
        yield name_of(fqn), buffer


def named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module), each module once. A wrapper comes before its module, under the same name."""
    for fqn, one in module.named_modules(prefix=prefix):
        yield name_of(fqn), one


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
    def kind(self) -> str:
        """The kind of a DTensor, as a suffix of labels; "" for an ordinary parameter."""
        if not self.is_distributed:
            return ""
        if self.placement.is_whole:
            return " (whole DTensors)"
        distributed: Any = self.parameter
        return " (experts)" if divides_experts(distributed.device_mesh) else " (tensor-parallel)"

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


def divides_experts(mesh: Any) -> bool:
    """Return whether the ranks of a DTensor's mesh divide experts, and so have different batches."""
    return EP in (mesh.mesh_dim_names or ())


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
                f"parameter {name_of(name)} is a DTensor, whose values are divided over ranks, and {what} takes ordinary "
                f"parameters. {remedy}"
            )
