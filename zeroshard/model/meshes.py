"""Owns the dimensions of a mesh: the ranks that shard a model, and the ranks that divide its DTensors."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.core.bucketing import kept_in_fp32
from zeroshard.core.context import Context, Experts
from zeroshard.core.named_parameter import EP, divides_experts, named_buffers, named_parameters, placement_of
from zeroshard.core.storage.buffers import memory_of
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.members import ranks_of, ranks_of_mesh
from zeroshard.errors import UsageError
from zeroshard.model.born import BornSharded
from zeroshard.policy import Policy, Precision
from zeroshard.torch_private import is_distributed, local_of


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the model's DTensors, or None if it has none.

    Raises:
        UsageError: there are several meshes, a buffer is a DTensor, or zeroshard does not support a placement.
    """
    for name, buffer in named_buffers(model):
        if is_distributed(buffer):
            raise UsageError(
                f"buffer {name} is a DTensor, but zeroshard needs ordinary buffers: replace it by its local values, "
                "`module.name = module.name.to_local()`."
            )
    meshes: dict[str, DeviceMesh] = {}
    for name, parameter in named_parameters(model):
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


def data_dimension_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimension of an `expert_mesh_of` whose ranks have the same experts."""
    (name,) = {*(mesh.mesh_dim_names or ())} - {EP}
    return mesh[name]


def refuse_unfit_experts(model: nn.Module, mesh: DeviceMesh | None, ranks: DeviceMesh | None, policy: Policy) -> None:
    """Raise if experts are not divided over the dimension "ep" of the mesh that `shard` got, or cannot be.

    Args:
        model: the model.
        mesh: the mesh of its DTensors, if it has any.
        ranks: what `expert_mesh_of` returned for `group=`.
        policy: the policy.

    Raises:
        UsageError: the message names the parameter, or the argument, and the remedy.
    """
    if ranks is None or ranks[EP].size() == 1:
        return
    size = ranks[EP].size()
    if mesh is None or ranks_of_mesh(mesh) != ranks_of_mesh(ranks[EP]):
        raise UsageError(
            f"group= is a mesh whose dimension {EP!r} divides experts over {size} ranks, but the model has "
            f"{'no DTensors' if mesh is None else f'DTensors over {mesh}'}: divide the experts with "
            f'mesh["{EP}"] (docs: Mixtures of experts), or pass only mesh["dp"] for tensor parallelism.'
        )
    for name, parameter in named_parameters(model):
        if not is_distributed(parameter):
            continue
        placement = placement_of(name, parameter)
        if placement.is_whole:
            raise UsageError(
                f"{name} is a DTensor that is whole on each of the {size} ranks that divide experts, which have different batches: "
                "leave it an ordinary parameter, whose gradient is averaged over all ranks."
            )
        if placement.shape[placement.dim] % size:
            raise UsageError(
                f"{name} has {placement.shape[placement.dim]} experts, which {size} ranks cannot divide evenly: choose a divisor."
            )
    refuse_unfit_policy(policy)


def refuse_unfit_policy(policy: Policy) -> None:
    """Raise if a policy is not supported beside experts over their own ranks."""
    if policy.within is not None:
        raise UsageError(
            "within (zero_hpz_partition_size, mics_shard_size in a config) is not supported beside experts over their own ranks: "
            "leave it out."
        )
    if policy.uses_disk:
        raise UsageError(
            "offload to disk is not supported beside experts over their own ranks. Use CPU memory instead: Place.CPU, or "
            '"device": "cpu" in a config.'
        )


def experts_of(
    dense: Collectives, ranks: DeviceMesh, collectives: Callable[[dist.ProcessGroup], Collectives], undo: ExitStack
) -> Experts:
    """Create the transports of experts. Every rank must call it.

    Args:
        dense: the collectives of all ranks.
        ranks: what `expert_mesh_of` returned.
        collectives: creates those of a group.
        undo: what to undo if a later call raises.
    """
    made = []
    for mesh in (data_dimension_of(ranks), ranks[EP]):
        made.append(collectives(mesh.get_group()))
        undo.callback(made[-1].close)
    same, others = made
    refuse_crossed(same, others)
    experts = Experts(same, others, tuple(dense.exchange_json(same.rank, "the ranks of experts")))
    experts.join(dense)
    return experts


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
    model: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup | None, precision: Precision, *, whole_parameters: bool,
    are_experts: bool,
) -> None:  # fmt: skip
    """Raise if settings require more than each rank's own part of a model with DTensors.

    Args:
        model: the model.
        mesh: the mesh of its DTensors.
        group: the data-parallel ranks.
        are_experts: whether the DTensors are experts, whose ranks have different batches.
        precision: the dtypes of the run.
        whole_parameters: whether the optimizer needs whole parameters.

    Raises:
        UsageError: the message names the parameter and the remedy.
    """
    divided = ranks_of_mesh(mesh)
    own = ranks_of(group)
    if divides_experts(mesh) and not are_experts and len(divided) > 1:
        first = next(name for name, parameter in named_parameters(model) if is_distributed(parameter))
        raise UsageError(
            f"parameter {first} is a DTensor over the dimension {EP!r} of a mesh, whose ranks have different batches: pass the "
            f'mesh of both dimensions, ("dp", {EP!r}), as group=. If these ranks have the same batches, name their dimension "tp".'
        )
    shared = {*own} & {*divided} - {dist.get_rank()}
    if shared and not are_experts:
        first = next(name for name, parameter in named_parameters(model) if is_distributed(parameter))
        raise UsageError(
            f"parameter {first} is a DTensor over ranks {divided}, and zeroshard would shard it over ranks {own}: both include "
            f'{sorted(shared)}. Pass the data-parallel dimension of the mesh: shard(..., group=mesh["dp"]).'
        )
    in_fp32 = kept_in_fp32(model, precision)
    for name, parameter in named_parameters(model):
        if mesh.size() > 1 and isinstance(parameter, BornSharded):
            raise UsageError(
                f"parameter {name} was born sharded (sharded_init), but the model has DTensors over {mesh.size()} ranks: build "
                "the model without sharded_init."
            )
        if not is_distributed(parameter):
            continue
        wanted = precision.resolve(parameter.dtype, in_fp32=id(parameter) in in_fp32).param
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
    for name, tensor in [*named_parameters(model), *named_buffers(model)]:
        if isinstance(tensor, nn.Parameter) and not placement_of(name, tensor).is_whole:
            continue
        values = local_of(tensor) if is_distributed(tensor) else tensor.detach()
        whole[name] = zlib.crc32(memory_of(values.cpu().contiguous().view(-1)))
    what = "the values of whole parameters and buffers"
    differ = not context.others.agree(hashlib.sha256(json.dumps(whole).encode()).digest(), what).are_equal
    # The other data-parallel ranks get the values of the first.
    if not everyone.agree(bytes([differ and context.collectives.rank == 0]), what).some[0]:
        return
    answers = everyone.exchange_json(whole, what)
    firsts = [answer for rank, answer in enumerate(answers) if everyone.data_rank(rank) == 0]
    for name in whole:
        if len({answer[name] for answer in firsts}) > 1:
            raise UsageError(
                f"{name} is whole on each of the {len(firsts)} ranks that divide other parameters, but differs between them: build "
                "it from the same seed or file on each, or make it a DTensor, which gets the first rank's values."
            )
