"""Owns the way from a DTensor to the place of its local tensor, and refuses those that have none that integers describe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.placement import Placement
from zeroshard.torch_private import is_distributed, local_of


def placement_of(fqn: str, parameter: nn.Parameter) -> Placement:
    """Find the place of this rank's part of a parameter. A parameter that is no DTensor is whole on each rank.

    Raises:
        UsageError: a DTensor over several dimensions of a mesh, or of a placement other than Shard and Replicate, or one of which
            this rank has nothing.
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
            f"parameter {fqn} is a DTensor placed as {kind}, and zeroshard takes Shard and Replicate: name those in "
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
            f"this one has {own}: choose a number of ranks that gives chunks of one size, of which the last may "
            "be smaller and none empty."
        )
    return placement


def refuse_distributed(parameters: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise where a parameter is a DTensor.

    Args:
        parameters: (name, parameter).
        what: the feature that takes ordinary parameters.
    """
    for name, parameter in parameters:
        if is_distributed(parameter):
            raise UsageError(
                f"parameter {name} is a DTensor, whose values are divided over ranks, and {what} takes ordinary parameters. "
                'Call zeroshard.shard(model, optimizer, stage, group=mesh["dp"]), which takes DTensors.'
            )
