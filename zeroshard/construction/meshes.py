"""Owns the dimensions of a mesh: the ranks that shard a model, and the ranks that divide its DTensors."""

from __future__ import annotations

import zlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.collectives.base import Collectives
from zeroshard.collectives.members import ranks_of
from zeroshard.construction.born import BornSharded
from zeroshard.errors import UsageError
from zeroshard.layout.named_parameter import placement_of
from zeroshard.parameters.context import Context
from zeroshard.policy import Precision
from zeroshard.storage.buffers import memory_of
from zeroshard.torch_private import is_distributed, local_of


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the model's DTensors, or None if it has none.

    Raises:
        UsageError: there are several meshes, a buffer is a DTensor, or zeroshard does not support a placement.
    """
    for name, buffer in model.named_buffers():
        if is_distributed(buffer):
            raise UsageError(
                f"buffer {name} is a DTensor, but zeroshard needs ordinary buffers: replace it by its local values, "
                "`module.name = module.name.to_local()`."
            )
    meshes: dict[str, DeviceMesh] = {}
    for name, parameter in model.named_parameters():
        placement_of(name, parameter)
        if is_distributed(parameter):
            distributed: Any = parameter
            meshes[name] = distributed.device_mesh
    if not meshes:
        return None
    first, mesh = next(iter(meshes.items()))
    for name, other in meshes.items():
        if other != mesh:
            raise UsageError(
                f"parameters {first} and {name} are DTensors over different meshes, {mesh} and {other}: divide "
                "all by one dimension of one mesh."
            )
    return mesh


def refuse_crossed(collectives: Collectives, others: Collectives) -> None:
    """Raise if ranks that shard one model have different parts of its DTensors. Every rank must call it."""
    numbers = collectives.exchange_json(others.rank, "the dimensions of the mesh")
    if len(set(numbers)) > 1:
        raise UsageError(
            f"the ranks of group= have parts {numbers} of the DTensors, but all ranks of a data-parallel dimension must have the "
            'same part. Make one mesh, and pass its data-parallel dimension, group=mesh["dp"].'
        )


def placed(parameter: Tensor) -> str:
    """Describe the placements of a DTensor; "" for other parameters."""
    distributed: Any = parameter
    return f" {distributed.placements}" if is_distributed(parameter) else ""


def refuse_beside_others(
    model: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup | None, precision: Precision, *, whole_parameters: bool
) -> None:
    """Raise if settings require more than each rank's own part of a model with DTensors.

    Args:
        model: the model.
        mesh: the mesh of its DTensors.
        group: the data-parallel ranks.
        precision: the dtypes of the run.
        whole_parameters: whether the optimizer needs whole parameters.

    Raises:
        UsageError: the message names the parameter and the remedy.
    """
    divided = mesh.mesh.flatten().tolist()
    own = ranks_of(group)
    shared = {*own} & {*divided} - {dist.get_rank()}
    if shared:
        first = next(name for name, parameter in model.named_parameters() if is_distributed(parameter))
        raise UsageError(
            f"parameter {first} is a DTensor over ranks {divided}, and zeroshard would shard it over ranks {own}: both include "
            f'{sorted(shared)}. Pass the data-parallel dimension of the mesh: shard(..., group=mesh["dp"]).'
        )
    for name, parameter in model.named_parameters():
        if mesh.size() > 1 and isinstance(parameter, BornSharded):
            raise UsageError(
                f"parameter {name} was born sharded (sharded_init), but the model has DTensors over {mesh.size()} ranks: build "
                "the model without sharded_init."
            )
        if not is_distributed(parameter):
            continue
        wanted = precision.resolve(parameter.dtype).param
        if wanted != parameter.dtype:
            raise UsageError(
                f"parameter {name} is a DTensor of {parameter.dtype}, whose dtype cannot change to {wanted}: convert the model "
                f"with model.to({wanted}) before you divide it. Master weights are still in fp32."
            )
        if whole_parameters and not placement_of(name, parameter).is_whole:
            raise UsageError(
                f"parameter {name} is already divided over {mesh.size()} ranks, but this optimizer needs whole "
                "parameters: use one that treats each element separately, such as AdamW."
            )


def refuse_different_replicas(model: nn.Module, context: Context) -> None:
    """Raise if a parameter or buffer that is whole on the ranks of the other dimension differs between them.

    Only the values of the first data-parallel ranks are compared, since only these are used. Every rank must call it.

    Raises:
        UsageError: the message names the first parameter or buffer that differs.
    """
    everyone = context.everyone
    if context.others.world_size == 1:
        return
    whole: dict[str, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, nn.Parameter) and not placement_of(name, tensor).is_whole:
            continue
        values = local_of(tensor) if is_distributed(tensor) else tensor.detach()
        whole[name] = zlib.crc32(memory_of(values.cpu().contiguous().view(-1)))
    answers = everyone.exchange_json(whole, "the values of whole parameters and buffers")
    firsts = [answer for rank, answer in enumerate(answers) if everyone.data_rank(rank) == 0]
    for name in whole:
        if len({answer[name] for answer in firsts}) > 1:
            raise UsageError(
                f"{name} is whole on each of the {len(firsts)} ranks that divide other parameters, but differs between them: build "
                "it from the same seed or file on each, or make it a DTensor, which gets the first rank's values."
            )
