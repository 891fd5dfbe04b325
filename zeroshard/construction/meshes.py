"""Owns the dimensions of a mesh: the ranks that shard a model, and those that divide its DTensors already."""

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
        UsageError: there are several meshes, or one has a placement that zeroshard does not take.
    """
    for name, buffer in model.named_buffers():
        if is_distributed(buffer):
            raise UsageError(
                f"buffer {name} is a DTensor, and zeroshard takes ordinary buffers: give it back its local values, "
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
    """Raise if ranks that shard one model hold different parts of its DTensors. Every rank must call it."""
    numbers = collectives.exchange_json(others.rank, "the dimensions of the mesh")
    if len(set(numbers)) > 1:
        raise UsageError(
            f"the ranks of group= hold parts {numbers} of the DTensors: they are rows of one dimension of the mesh only where all "
            'hold the same part. Make one mesh, and pass its data-parallel dimension, group=mesh["dp"].'
        )


def placed(parameter: Tensor) -> str:
    """Describe the placement of a DTensor; "" for other parameters."""
    distributed: Any = parameter
    return f" {distributed.placements}" if is_distributed(parameter) else ""


def refuse_beside_others(
    model: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup | None, precision: Precision, *, whole_parameters: bool
) -> None:
    """Raise if settings for a model with DTensors need more than each rank's own part.

    Args:
        mesh: the mesh of the DTensors.
        group: the group of the data-parallel ranks.

    Raises:
        UsageError: names the parameter and the remedy.
    """
    divided = mesh.mesh.flatten().tolist()
    own = ranks_of(group)
    shared = {*own} & {*divided} - {dist.get_rank()}
    if shared:
        first = next(name for name, parameter in model.named_parameters() if is_distributed(parameter))
        raise UsageError(
            f"parameter {first} is a DTensor over ranks {divided}, and zeroshard would shard it over ranks {own}: both have "
            f'{sorted(shared)}. Name the data-parallel dimension of the mesh: shard(..., group=mesh["dp"]).'
        )
    for name, parameter in model.named_parameters():
        if mesh.size() > 1 and isinstance(parameter, BornSharded):
            raise UsageError(
                f"parameter {name} was born sharded (sharded_init), beside DTensors over {mesh.size()} ranks: build "
                "the model without sharded_init."
            )
        if not is_distributed(parameter):
            continue
        wanted = precision.resolve(parameter.dtype).param
        if wanted != parameter.dtype:
            raise UsageError(
                f"parameter {name} is a DTensor of {parameter.dtype}, and would have to become {wanted}: convert the "
                f"model first, model.to({wanted}), and then divide it. Master weights are still in fp32."
            )
        if whole_parameters and not placement_of(name, parameter).is_whole:
            raise UsageError(
                f"parameter {name} is divided over {mesh.size()} ranks already, and this optimizer needs whole "
                "parameters: use one that treats each element by itself, such as AdamW."
            )


def refuse_different_replicas(model: nn.Module, context: Context) -> None:
    """Raise if ranks of the other dimension each hold a parameter or buffer as a whole, with different values.

    Only the first data-parallel rank's values are compared, since they are used. Every rank must call it.

    Raises:
        UsageError: names the first that differs.
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
    answers = everyone.exchange_json(whole, "the values of what is not divided")
    firsts = [answer for rank, answer in enumerate(answers) if everyone.data_rank(rank) == 0]
    for name in whole:
        if len({answer[name] for answer in firsts}) > 1:
            raise UsageError(
                f"{name} is whole on each of the {len(firsts)} ranks that divide other parameters, and differs between them: build "
                "it from the same seed or file on each, or make it a DTensor, which takes the first rank's values."
            )
