"""Owns the division of a transformers model over tensor-parallel ranks, by the model's own plan.

A plan (`model.tp_plan`) names a style for each module: `{"model.layers.*.mlp.up_proj": "colwise", ...}`, where `*` is
the number of a layer. torch's `parallelize_module` applies the styles and makes the modules' parameters DTensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.core.bucketing import kept_in_fp32
from zeroshard.core.named_parameter import EP, divides_experts, name_of, named_parameters, placement_of
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.members import ranks_of_mesh
from zeroshard.errors import UsageError
from zeroshard.model.born import BornSharded
from zeroshard.policy import Precision, refuse_uneven
from zeroshard.torch_private import is_distributed, local_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

EMBEDDING, COLWISE, ROWWISE = "embedding_rowwise", "colwise", "rowwise"
GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT = ("rowwise_split_input", "rowwise_rep")
NORM = "replicated_with_grad_allreduce"
"""The style of a norm between divided matrices: each rank has the whole norm, but its heads give only part of the gradient."""
WHOLE = "replicate"
STYLES = (COLWISE, *GATHERED, ROWWISE, *SPLIT, EMBEDDING, NORM, WHOLE)
"""The supported styles of a plan."""
_REMEDY = (
    "Leave tensor_parallel out of the config and use stage 3, or first divide the model with torch's `parallelize_module` "
    "(see docs/composing.md)."
)
_HEADS = ("num_attention_heads", "num_key_value_heads")


def plan_of(model: nn.Module, size: int) -> dict[str, str]:
    """Return the styles that a model's plan gives to modules, by full name, without replicated modules.

    Raises:
        UsageError: the model has no plan, or one that `size` tensor-parallel ranks cannot use.
    """
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise UsageError(
            f"tensor parallelism of a PEFT model ({kind}) is not supported: ranks would train different adapters of a divided "
            "matrix. Leave tensor_parallel out of the config, and use stage 3."
        )
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        raise UsageError(f"{kind} has no plan for tensor parallelism (transformers' `model.tp_plan`). {_REMEDY}")
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for key in _HEADS:
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % size:
            raise UsageError(
                f"{kind} has {key} = {heads}, which {size} tensor-parallel ranks cannot divide evenly: choose a divisor of {heads}."
            )
    styles: dict[str, str] = {}
    between = {COLWISE: "out_features", ROWWISE: "in_features"}  # the side that stays divided, between two matrices
    # A module comes after its wrapper, and takes its place here.
    modules = {name_of(fqn): (fqn, module) for fqn, module in model.named_modules()}
    for name, (fqn, module) in modules.items():
        style = plan.get(pattern_of(name))
        if style is None or style == WHOLE:
            continue
        fits = {EMBEDDING: nn.Embedding}.get(style, nn.Linear)
        if style not in STYLES or not (style == NORM or isinstance(module, fits)):
            raise UsageError(
                f'the plan of {kind} divides {name} ({type(module).__name__}) as "{style}", which is not supported. {_REMEDY}'
            )
        side = between.get(style)
        if side is not None and getattr(module, side) % size:
            raise UsageError(
                f"{name} has {side} = {getattr(module, side)}, which {size} tensor-parallel ranks cannot divide evenly. {_REMEDY}"
            )
        styles[fqn] = style
    for name, _ in named_parameters(model, all_names=True):
        pattern = pattern_of(name)
        if plan.get(pattern, WHOLE) != WHOLE:
            raise UsageError(
                f'the plan of {kind} divides the single parameter {name} as "{plan[pattern]}": packed matrices and experts are '
                f"not supported. {_REMEDY}"
            )
    if not set(styles.values()) - {NORM}:
        raise UsageError(f"the plan of {kind} names no module that can be divided. {_REMEDY}")
    return styles


def pattern_of(name: str) -> str:
    """Return the name of a module or parameter as plans write it, with `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def tensor_mesh(size: int, device_type: str) -> DeviceMesh:
    """Create the mesh of the `size` adjacent ranks that divide one model. Every rank of the job must call it.

    Raises:
        UsageError: `size` does not divide the number of ranks, or differs between ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    refuse_uneven(size, world)
    agreed_size(size, device_type, "tensor-parallel ranks")
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("dp", "tp"))["tp"]


def agreed_size(size: int, device_type: str, what: str) -> None:
    """Raise `UsageError` if ranks of the job pass different numbers of `what`. Every rank must call it."""
    sizes = _exchange(size, device_type, f"the number of {what}")
    if len(set(sizes)) > 1:
        raise UsageError(f"the ranks pass different numbers of {what}, {sizes}: pass the same number on every rank.")


def divide(model: nn.Module, mesh: DeviceMesh, precision: Precision) -> dict[nn.Parameter, nn.Parameter]:
    """Divide a model's matrices over the ranks of a mesh, in place, by its plan. Every rank of the mesh must call it.

    All ranks get the first rank's values of parameters and buffers. Parameters are first converted to the dtypes of `precision`;
    buffers keep theirs. Parameters that were tied are tied again.

    Returns:
        The new parameters, keyed by those that they replace.

    Raises:
        UsageError: the plan cannot be used (see `plan_of`), the model is already divided, or a parameter has no values. Only
            after the division: the plan divides tied parameters in two ways.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    styles = plan_of(model, mesh.size())
    before = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in named_parameters(model):
        if is_distributed(parameter):
            raise UsageError(f"parameter {name} is already a DTensor: divide a model only once.")
        if isinstance(parameter, BornSharded) or parameter.is_meta:
            raise UsageError(
                f"parameter {name} has no values here (it was born sharded, or is on the meta device), but tensor parallelism "
                "divides whole parameters: build the model without zero.Init and sharded_init."
            )
    in_fp32 = kept_in_fp32(model, precision)
    for parameter in model.parameters():
        wanted = precision.resolve(parameter.dtype, in_fp32=id(parameter) in in_fp32).param
        parameter.data = parameter.data.to(wanted)
    device = next(iter(before.values())).device
    collectives = create_collectives(mesh.get_group(), device, what="tensor parallelism", lasting=False)
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
            collectives.broadcast(tensor.data.view(-1).view(torch.uint8))
    finally:
        collectives.close()
    for name, style in styles.items():
        module = model.get_submodule(name)
        trained = {key: one.requires_grad for key, one in module.named_parameters(recurse=False)}
        parallelize_module(module, mesh, _style(style))
        for key, one in module.named_parameters(recurse=False):
            one.requires_grad_(trained[key])
        for key, buffer in module.named_buffers(recurse=False):
            if is_distributed(buffer):  # torch makes the buffers DTensors too, with the same values on every rank
                setattr(module, key, local_of(buffer))
    return _tied_again(model, before)


def _tied_again(model: nn.Module, before: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    """Tie the new parameters as the old ones were tied. Return the new parameters, keyed by the old.

    `before` has the old parameters under all of their names.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in before.items():
        now = model.get_parameter(name)
        if now is not parameter:
            made.setdefault(parameter, now)
    for name, parameter in before.items():
        now = model.get_parameter(name)
        wanted = made.get(parameter, parameter)
        if now is wanted:
            continue
        if now is parameter or placement_of(name, now) != placement_of(name, wanted):
            raise UsageError(
                f"{name} is tied to a parameter that the plan of {type(model).__name__} divides in another way: set "
                f"`tie_word_embeddings` to false. {_REMEDY}"
            )
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, wanted)
    return made


def replace_parameters(groups: Iterator[Any] | list[Any], made: Mapping[nn.Parameter, nn.Parameter]) -> list[Any]:
    """Return parameters or param groups with new parameters instead of the old. Groups are changed in place."""
    replaced: list[Any] = []
    for one in groups:
        if isinstance(one, dict):
            parameters = one["params"]
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            one["params"] = replace_parameters(parameters, made)
            replaced.append(one)
        elif isinstance(one, tuple):
            replaced.append((one[0], made.get(one[1], one[1])))
        else:
            replaced.append(made.get(one, one))
    return replaced


def _style(name: str) -> ParallelStyle:
    """Return torch's `ParallelStyle` for a style that a plan names."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if name == NORM:
        return SequenceParallel(sequence_dim=2, use_local_output=True)  # [samples, positions, heads, size of a head]
    if name == COLWISE:
        return ColwiseParallel()
    if name in GATHERED:
        return ColwiseParallel(output_layouts=Replicate())
    if name == ROWWISE:
        return RowwiseParallel()
    return RowwiseParallel(input_layouts=Replicate())  # an embedding, or a matrix that divides its own input


def _exchange(value: Any, device_type: str, what: str) -> list[Any]:
    """Return the values of all ranks of the job. Every rank must call it with a small value."""
    collectives = create_collectives(None, torch.device(device_type), what="tensor parallelism", lasting=False)
    try:
        return collectives.exchange_json(value, what)
    finally:
        collectives.close()


def mesh_around(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of all ranks, with a dimension "dp" beside that of a model's DTensors. Every rank of the job must call it.

    `mesh` has the ranks that divide this rank's model, or its experts.

    Raises:
        UsageError: the meshes of the ranks do not divide the job evenly.
    """
    own = ranks_of_mesh(mesh)
    everyone = _exchange(own, mesh.device_type, "the ranks that divide each model")
    models = sorted({tuple(ranks) for ranks in everyone})
    if (
        sorted(rank for ranks in models for rank in ranks) != list(range(len(everyone)))
        or len({len(one) for one in models}) > 1
    ):
        raise UsageError(
            f"the ranks divide their models over {[list(ranks) for ranks in models]}: each of the {len(everyone)} ranks of the job "
            "must be in one group, and all groups must have one size. Or pass the data-parallel ranks as group=."
        )
    return DeviceMesh(mesh.device_type, models, mesh_dim_names=("dp", EP if divides_experts(mesh) else "tp"))
