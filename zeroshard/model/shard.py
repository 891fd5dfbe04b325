"""Owns `shard(model, optimizer, policy)`, for loops in plain PyTorch.

optimizer = torch.optim.AdamW(model.parameters(), fused=True)
zeroshard.shard(model, optimizer, 2)
for batch in data:
    model(batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from zeroshard.checkpoint.checkpoints import Checkpoints
from zeroshard.checkpoint.display import Display
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.core.bucketing import Group, group_parameters, kept_in_fp32, refuse_shared_memory
from zeroshard.core.classes import notes_data, whole_class
from zeroshard.core.context import Context, Experts, Live, own_writes_of
from zeroshard.core.eight_bits import BLOCK_NUMEL, CODES, is_coded
from zeroshard.core.hooks import Hooks
from zeroshard.core.model_tree import ModelTree
from zeroshard.core.module_hooks import refuse_cuda_graphs
from zeroshard.core.named_parameter import named_buffers, named_modules, named_parameters
from zeroshard.core.optimizer_states import OptimizerStates
from zeroshard.core.parking import Parking
from zeroshard.core.placement import Placement
from zeroshard.core.quantised import prepare_modules, quantised_kind, scales_of
from zeroshard.core.schedule import Schedule
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.storage.buffers import BufferPool
from zeroshard.core.storage.storages import Storages
from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.members import expert_mesh_of, group_of
from zeroshard.core.unit import make_units
from zeroshard.core.users_optimizer import NoOptimizer, is_known, refuse_other_states
from zeroshard.errors import UsageError
from zeroshard.launch import join_ranks
from zeroshard.model.born import BornSharded, is_shown
from zeroshard.model.emulation import warn_if_emulated
from zeroshard.model.freezing import Freezing
from zeroshard.model.meshes import (
    experts_of,
    mesh_of,
    placed,
    refuse_beside_others,
    refuse_crossed,
    refuse_different_replicas,
    refuse_unfit_experts,
)
from zeroshard.model.sharded import Sharded
from zeroshard.model.unsharded import home_of, register
from zeroshard.optim.several import Several, optimizers_of
from zeroshard.optim.states import looks_at_whole_parameters, needs_whole_parameters
from zeroshard.policy import Place, Policy, Precision, Units
from zeroshard.torch_private import Feature, distributed_class, is_distributed, past_torch_function, require

DEFAULT_BUCKET_NUMEL = 500_000_000
"""The default bucket size in elements, as in DeepSpeed: usually, a bucket is a unit or a large parameter."""


@dataclass(frozen=True)
class Backend:
    """The platform of a sharded model.

    Attributes:
        collectives: creates the transport between the model's ranks (see `create_collectives`).
        storages: creates the storages of the model's states.
        join_ranks: joins the ranks that a launcher started into one group.
        parameter_class: the class of the model's parameters.
    """

    collectives: Callable[..., Collectives] = create_collectives
    storages: Callable[..., Storages] = Storages
    join_ranks: Callable[[torch.device], None] = join_ranks
    parameter_class: type = nn.Parameter


BACKEND = Backend()

Optimizers = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    | None
)
"""The types of the `optimizer` argument of `shard`."""


def shard(
    model: nn.Module, optimizer: Optimizers, policy: Policy | int | None = None, *,
    precision: Precision | None = None, bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    overlap: bool = True, elementwise: bool | None = None, units: Units | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None, attributes: type | None = None,
) -> Sharded:  # fmt: skip
    """Shard a model's states over data-parallel ranks.

    Every rank of the group must call it. All ranks start from rank 0's values.

    Args:
        model: any module. It stays the user's own and keeps its parameters.
        optimizer: a torch optimizer over the model's parameters that has not stepped yet, or a callable that creates
            one from the parameters that require a gradient. Its `step` becomes the sharded step, and its states cover
            this rank's shards. In a list of several optimizers, each steps its own parameters. None: the model is for
            evaluation only and does not take memory for gradients or optimizer states.
        policy: the residencies of model states, or the number of a ZeRO stage; default: stage 2.
        precision: the dtypes; by default, each parameter keeps its own dtype and has fp32 master weights.
        bucket_numel: the most elements that are communicated at once. It limits the size of transient buffers.
        overlap: whether to overlap collectives with the computation. Results are bit-identical with and without it.
        elementwise: a fact about the optimizer. Without this argument, `shard` refuses an optimizer of an unknown
            class. True: it updates each element only from that element's own history, so ranks may divide a parameter.
            False: it reads whole parameters, so each parameter stays whole on one rank. An optimizer that reads several
            parameters together, for example to compute a norm of all gradients, cannot be sharded.
        units: the parameters that are unsharded together; by default, each block in a list of blocks is one unit.
        group: the data-parallel process group, or a mesh with only that dimension, `mesh["dp"]`; default: all ranks. If
            torch.distributed is not initialised, `shard` joins the ranks that a launcher started. Parameters may be DTensors
            over another dimension of the mesh (tensor parallelism): each rank then shards its own part of them. A mesh of two
            dimensions, of which one is named "ep", has all ranks: experts that are DTensors over `mesh["ep"]` are sharded over
            the ranks with the same experts, and other parameters over all ranks, which all get different batches.
        attributes: a class whose properties the parameters gain while they are sharded, for code that reads attributes
            of parameters. It has an effect only if the policy shards parameters (stage 3). See `parameter_states` for
            the values that these properties may return.

    Raises:
        UsageError: the model or the optimizer cannot be sharded; the message names the parameter and the remedy.
        PolicyError: `policy` is not the number of a ZeRO stage.
        StorageError: a folder or the memory does not have room for the model states.
        CollectiveError: some ranks did not call it.
    """
    sharded = shard_on(
        BACKEND, model, optimizer, policy, precision, bucket_numel, overlap, elementwise, units, group, attributes
    )
    warn_if_emulated(model, group_of(group))
    return sharded


def shard_on(
    backend: Backend, model: nn.Module, optimizer: Optimizers, policy: Policy | int | None,
    precision: Precision | None, bucket_numel: int, overlap: bool, elementwise: bool | None = None,
    units: Units | None = None, group: dist.ProcessGroup | DeviceMesh | None = None, attributes: type | None = None,
) -> Sharded:  # fmt: skip
    """Shard as `shard` does, on the given backend, without `warn_if_emulated`."""
    _refuse_wrong_types(model, optimizer)
    _refuse_unready(model)
    ranks_of_experts = expert_mesh_of(group)
    group = group_of(group)
    policy = policy_of(policy)
    _refuse_unfit_torch(policy)
    precision = precision or Precision()
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError(
            f"the model ({type(model).__name__}) has no parameters, so there is nothing to shard. Pass a model that "
            "has some."
        )
    backend.join_ranks(parameters[0].device)
    free_for_sharding(model)
    refuse_cuda_graphs(model)
    refuse_shared_memory(model)
    shown = [name for name, p in named_parameters(model) if is_shown(p)]
    if shown:
        raise UsageError(f"shard() was called inside zeroshard.unsharded(), which holds {shown[0]}. Call it outside.")
    if optimizer is None:
        optimizer = NoOptimizer()
        elementwise = True
    elif isinstance(optimizer, Sequence):
        optimizer = optimizer[0] if len(optimizer) == 1 else Several(optimizer)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameter for parameter in parameters if parameter.requires_grad)
    if not isinstance(optimizer, NoOptimizer):
        _check_optimizer(model, optimizer)
    whole = needs_whole_parameters(optimizer, elementwise)
    live = Live()
    if not policy.parameters.sharded:
        moves = policy.parameters.place is not Place.ACCELERATOR
        attributes = notes_data(live, moves=moves) if _has_copies(policy, optimizer, precision) else None
    device = parameters[0].device
    mesh = mesh_of(model)
    refuse_unfit_experts(model, mesh, ranks_of_experts, policy)
    if mesh is not None:
        refuse_beside_others(
            model, mesh, group, precision, whole_parameters=whole, are_experts=ranks_of_experts is not None
        )
    with ExitStack() as undo:
        collectives, others, experts = _transports(backend, group, device, mesh, ranks_of_experts, policy, undo)
        kind = None if mesh is None else distributed_class()
        storages = backend.storages(policy, device, _itemsize(model, precision))
        undo.callback(storages.close)
        context = Context(
            policy, precision, collectives, BufferPool(device, storages.scratch), storages, bucket_numel, whole_parameters=whole,
            live=live, whole_class=whole_class(attributes, backend.parameter_class), others=others, experts=experts,
            distributed_class=None if kind is None else whole_class(attributes, kind),
        )  # fmt: skip
        with collectives.operation("shard()"):
            sharded = _shard(model, optimizer, context, units, overlap=overlap)
        undo.pop_all()
    return sharded


def _transports(
    backend: Backend, group: dist.ProcessGroup | None, device: torch.device, mesh: DeviceMesh | None,
    ranks_of_experts: DeviceMesh | None, policy: Policy, undo: ExitStack,
) -> tuple[Collectives, Collectives, Experts | None]:  # fmt: skip
    """Create the transports of data-parallel ranks, of ranks that divide the model, and of experts. Every rank must call it.

    Args:
        mesh: the mesh of the model's DTensors, if it has any.
        ranks_of_experts: what `expert_mesh_of` returned.
        undo: gets what to undo if a later call raises.
    """
    create = partial(backend.collectives, device=device, what="shard()")
    collectives = create(group, within=policy.within)
    undo.callback(collectives.close)
    if mesh is None:
        return collectives, Alone(), None
    if ranks_of_experts is not None and mesh.size() > 1:
        return collectives, Alone(), experts_of(collectives, ranks_of_experts, create, undo)
    others = create(mesh.get_group())
    undo.callback(others.close)
    refuse_crossed(collectives, others)
    return collectives, others, None


def _shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, context: Context, units: Units | None, *, overlap: bool
) -> Sharded:
    collectives = context.collectives
    storages = context.storages
    policy = context.policy
    optimized = {id(p) for g in optimizer.param_groups for p in g["params"]}
    groups: list[Group] = []
    refusal: UsageError | None = None
    try:
        groups = group_parameters(
            model, optimized, units, _of_own_class(model, context), kept_in_fp32(model, context.precision)
        )
    except UsageError as error:  # other ranks, whose models may differ, wait in the comparison
        refusal = error
    _refuse_different_models(model, groups, context, overlap=overlap)
    if refusal is not None:
        raise refusal
    refuse_different_replicas(model, context)
    _refuse_norms_of_two_dtypes(model, context.precision)
    if context.everyone.world_size > 1:
        _refuse_max_norm(model, {id(entry.parameter) for group in groups if group.trainable for entry in group.named})
    _take_buffers(model, collectives, context.precision)
    _refuse_integers(groups, policy)
    _refuse_classes(groups, policy)
    _refuse_own_steps(optimizer, context)
    _refuse_subtracted_states(optimizer, context)
    _refuse_unfit_codes(optimizer, groups, context)
    context.live.own_writes = own_writes_of(list(model.parameters()))
    units_made = make_units(groups, context)
    prepare_modules(model)
    schedule = Schedule(units_made, ModelTree(model), context, overlap=overlap)
    if isinstance(optimizer, Several):
        optimizer.connect()  # not before: a refused `shard` leaves the user's optimizers unchanged
    step = ShardedStep(optimizer, schedule, context)
    OptimizerStates(step)  # the optimizer's hooks keep it alive
    if step.replicas is not None:
        step.replicas.watch(model)
    schedule.optimized = optimized
    hooks = Hooks(model, schedule)
    register(schedule.units, hooks, step)
    schedule.reductions.forget()  # sharded gradients have needed memory for the optimizer's views of them
    display = Display(speaks=not dist.is_initialized() or dist.get_rank() == 0)
    checkpoints = Checkpoints(LiveModel(model, schedule, step, context), display)
    parking = Parking(schedule, step, storages, context.pool)
    freezing = Freezing(schedule, hooks, context, step)
    return Sharded(model, optimizer, policy, checkpoints, display, schedule, hooks, context, parking, freezing, step)


def policy_of(policy: Policy | int | None) -> Policy:
    """Return the policy itself, or the preset for the number of a ZeRO stage; None means stage 2.

    Raises:
        UsageError: the argument has a wrong type.
        PolicyError: `policy` is not the number of a ZeRO stage.
    """
    if policy is None:
        return Policy.stage(2)
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, int) and not isinstance(policy, bool):
        return Policy.stage(policy)
    raise UsageError(f"the policy is {_described(policy)}. Pass a Policy, or the number of a ZeRO stage.")


def _described(value: object) -> str:
    if isinstance(value, str | bool):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
"""The names of torch's classes that reduce or shard model states. Importing some of these classes would take a second."""


def _refuse_wrong_types(model: object, optimizer: object) -> None:
    """Raise if an argument has the wrong type, or another wrapper manages the model's states."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {_described(model)}, not a torch.nn.Module. Pass a module.")
    if isinstance(optimizer, list | tuple) and optimizer:
        wrong = [one for one in optimizer if not isinstance(one, torch.optim.Optimizer)]
    else:
        is_right = optimizer is None or callable(optimizer) or isinstance(optimizer, torch.optim.Optimizer)
        wrong = [] if is_right else [optimizer]
    if wrong:
        raise UsageError(
            f"the optimizer is {_described(wrong[0])}: pass shard(model, optimizer, policy) a torch optimizer, a list "
            "of several, or None for evaluation only."
        )
    for fqn, module in named_modules(model):
        bases = {base.__name__ for base in type(module).__mro__ if base.__module__.startswith("torch.")}
        found = bases & {*_WRAPPERS}
        if found:
            raise UsageError(
                f"{fqn or 'the model'} is managed by {found.pop()}, which reduces or shards its states itself. "
                "Pass the model without it (the `.module` of a wrapper)."
            )


def _refuse_unfit_torch(policy: Policy) -> None:
    """Raise if torch lacks a private name that every step needs."""
    require(Feature.SHARDING)
    if policy.parameters.sharded:
        require(Feature.STAGE_3)


def _refuse_unready(model: nn.Module) -> None:
    """Raise if a parameter or buffer has no shape yet, or no memory of its own, or autograd could not use it."""
    for fqn, tensor in [*named_parameters(model), *named_buffers(model)]:
        if is_lazy(tensor):
            raise UsageError(
                f"{fqn} is lazy and has no shape yet. Run the model once on every rank, then make the optimizer and "
                "call `shard`."
            )
        # Tensors of other layouts, such as jagged ones, are refused later, with another remedy.
        is_dense = tensor.layout is torch.strided
        if is_dense and hasattr(type(tensor), "__tensor_flatten__") and not is_distributed(tensor):
            package = type(tensor).__module__.partition(".")[0]
            raise UsageError(
                f"{fqn} is of {package}'s class {type(tensor).__name__}, which keeps its values in several tensors, and zeroshard "
                "takes only tensors with memory of their own. Quantise frozen weights with bitsandbytes (Params4bit, Int8Params), "
                "or leave this one unquantised."
            )
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "shard() was called inside torch.inference_mode(), where it would make tensors that cannot be trained. Call it outside."
        )
    with past_torch_function():
        made_there = [fqn for fqn, parameter in named_parameters(model) if parameter.is_inference()]
    if made_there:
        raise UsageError(
            f"parameter {made_there[0]} was made inside torch.inference_mode() and cannot train. Build the model outside."
        )


def _itemsize(model: nn.Module, precision: Precision) -> int:
    """Return the bytes of an element of the first parameter in the forward; of fp32, if any parameters stay in it."""
    first = next(model.parameters())
    return precision.resolve(first.dtype, in_fp32=bool(kept_in_fp32(model, precision))).param.itemsize


def _has_copies(policy: Policy, optimizer: torch.optim.Optimizer, precision: Precision) -> bool:
    """Return whether whole parameters have other values, which would undo a write through `data`.

    These are master weights of a different dtype, and values that rest in CPU memory.
    """
    if policy.parameters.place is not Place.ACCELERATOR:
        return True
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    dtypes = [precision.resolve(dtype) for dtype in {parameter.dtype for parameter in parameters}]
    return any(dtype.master != dtype.param for dtype in dtypes)


def _refuse_integers(groups: Sequence[Group], policy: Policy) -> None:
    """Raise for integer parameters that would become placeholders: these hold NaN, which integers cannot represent."""
    if not policy.parameters.sharded and policy.parameters.place is Place.ACCELERATOR:
        return
    for group in groups:
        if not group.dtype.is_floating_point and not group.stays and not group.is_quantised:
            raise UsageError(
                f"parameter {group.named[0].fqn} holds integers ({group.dtype}) and cannot leave its place. Register "
                "it as a buffer, or use Policy.stage(2) or below."
            )


def _of_own_class(model: nn.Module, context: Context) -> set[int]:
    """Return the `id`s of parameters whose classes are the user's own: only zeroshard's classes tell of reads and gradients."""
    ordinary = (nn.Parameter, context.whole_class, distributed_class())
    return {
        id(parameter)
        for parameter in model.parameters()
        if type(parameter) not in ordinary and not isinstance(parameter, BornSharded)
    }


def _refuse_classes(groups: Sequence[Group], policy: Policy) -> None:
    """Raise if a parameter of a user's own class would be trained, or would be sharded at rest."""
    for group in groups:
        if not group.is_of_own_class or not (group.trainable or (policy.parameters.sharded and not group.persistent)):
            continue
        entry = group.named[0]
        if quantised_kind(entry.parameter):
            raise UsageError(
                f"parameter {entry.fqn} is a {type(entry.parameter).__name__} and to be trained, but its bytes take no gradient: "
                "freeze it with requires_grad_(False), and train adapters (LoRA)."
            )
        remedy = "" if group.trainable else ", or Policy.stage(2) or below"
        raise UsageError(
            f"parameter {entry.fqn} is of the class {type(entry.parameter).__name__}, and zeroshard "
            f"{'trains' if group.trainable else 'shards'} only ordinary parameters. Use nn.Parameter{remedy}."
        )


def _refuse_own_steps(optimizer: torch.optim.Optimizer, context: Context) -> None:
    """Raise if an optimizer's step, which runs once over all shards in memory, would find some of them elsewhere or rounded."""
    policy, storages = context.policy, context.storages
    places = {policy.optimizer.place, policy.gradients.place if policy.gradients.sharded else Place.ACCELERATOR}
    are_apart = storages.host is not storages.accelerator and len(places) > 1
    users = [one for one in optimizers_of(optimizer) if not isinstance(one, NoOptimizer)]
    unknown = [type(one).__name__ for one in users if not is_known(one)]
    if unknown and context.precision.state_dtype is not None:
        raise UsageError(
            f"{unknown[0]}.step() is not torch's: zeroshard runs it once in each step, over all shards, and states in 16 or 8 bits "
            "are opened a sub-group at a time. Use a torch.optim class, or leave out state_dtype (in a config, "
            "bf16_optimizer_states or data_types.state_dtype)."
        )
    if unknown and (Place.DISK in places or are_apart):
        raise UsageError(
            f"{unknown[0]}.step() is not torch's: zeroshard runs it once in each step, over all shards in memory, and this policy "
            "keeps states on disk, or gradients and optimizer states in different places. Use a torch.optim class, or keep both in "
            "one place: on the accelerator, or (at stages 2 and 3) in CPU memory."
        )


def _refuse_subtracted_states(optimizer: torch.optim.Optimizer, context: Context) -> None:
    """Raise if states in fewer bits would be subtracted: a variance, whose root is taken, would become negative."""
    if context.precision.state_dtype is None:
        return
    for one in optimizers_of(optimizer):
        if any(group.get("centered") for group in one.param_groups):
            raise UsageError(
                f"states are to rest in {context.precision.state_dtype}, and {type(one).__name__}(centered=True) takes the root of "
                "their difference, which rounding can make negative: parameters would become NaN. Leave out centered, or "
                "state_dtype (in a config, bf16_optimizer_states or data_types.state_dtype)."
            )


def _refuse_unfit_codes(optimizer: torch.optim.Optimizer, groups: Sequence[Group], context: Context) -> None:
    """Raise if states cannot rest in 8 bits: their blocks would depend on the ranks, or their values need more digits."""
    if context.precision.state_dtype != CODES:
        return
    remedy = "Use state_dtype=torch.bfloat16, or leave state_dtype out."
    for one in optimizers_of(optimizer):
        if isinstance(one, torch.optim.ASGD):
            raise UsageError(
                f"states are to rest in 8 bits, and those of ASGD are averaged weights, which need more digits. {remedy}"
            )
        if context.whole_parameters and looks_at_whole_parameters(type(one)) is not False:
            raise UsageError(
                f"states are to rest in 8 bits, and {type(one).__name__} needs whole parameters: only states of elementwise "
                f"optimizers, such as AdamW, rest in 8 bits. {remedy}"
            )
    for group in groups:
        ranks = (context.of_experts() if group.is_cut else context).others.world_size
        for entry in group.named if group.trainable and ranks > 1 else ():
            place = entry.placement
            if place.is_whole or not is_coded(place.shape):
                continue
            # As each part but the last has its size, the second rank's first element tells for all.
            first = Placement.chunk(place.shape, place.dim, 1, ranks).start * prod(place.shape[1:])
            if place.dim or first % BLOCK_NUMEL:
                raise UsageError(
                    f"states are to rest in 8 bits, and {entry.fqn} is divided over {ranks} ranks in dimension {place.dim}, not "
                    f"between blocks of {BLOCK_NUMEL} elements, so results would depend on their number. {remedy}"
                )


def _take_buffers(model: nn.Module, collectives: Collectives, precision: Precision) -> None:
    """Copy rank 0's buffers to all ranks, in the buffer dtype of the run, and the scales of quantised parameters.

    They stay whole on every rank.
    """
    for _, scale in scales_of(model):
        collectives.broadcast(scale.view(-1).view(torch.uint8))
    for name, buffer in named_buffers(model):
        if buffer.is_meta or buffer.layout is not torch.strided:
            raise UsageError(
                f"buffer {name} has no dense values ({buffer.device}, {buffer.layout}). Materialise it first."
            )
        values = buffer.data.contiguous()
        collectives.broadcast(values.view(-1).view(torch.uint8))
        if values.data_ptr() != buffer.data_ptr():
            try:
                buffer.data.copy_(values)
            except RuntimeError:  # some elements share memory, as in an expanded buffer
                buffer.data = values
        if precision.buffer_dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(precision.buffer_dtype)


def _refuse_max_norm(model: nn.Module, trained: set[int]) -> None:
    """Raise for trained embeddings with `max_norm`: each rank's forward would rescale only the rows of its own batch."""
    for name, module in named_modules(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm and id(module.weight) in trained:
            raise UsageError(
                f"{name or 'the model'} has max_norm={module.max_norm}: a forward would rescale only the rows of its own rank's "
                "batch, so ranks would differ. Pass max_norm=None, and rescale all rows between steps, inside "
                "zeroshard.unsharded(embedding, modifier_rank=0): embedding.weight.renorm_(2, 0, max_norm)."
            )


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _refuse_norms_of_two_dtypes(model: nn.Module, precision: Precision) -> None:
    """Raise for a BatchNorm whose weights and running statistics would have two dtypes, which torch refuses."""
    in_fp32 = kept_in_fp32(model, precision)
    for name, module in named_modules(model):
        if not isinstance(module, _BATCH_NORMS) or module.weight is None:
            continue
        statistics = module.running_mean
        weight = precision.resolve(module.weight.dtype, in_fp32=id(module.weight) in in_fp32).param
        if statistics is not None and (precision.buffer_dtype or statistics.dtype) != weight:
            raise UsageError(
                f"{name or 'the model'} is a {type(module).__name__}, for which torch requires weights ({weight}) and "
                f"running statistics ({statistics.dtype}) of one dtype. Train in fp32 under autocast, or convert the "
                "statistics with Precision(buffer_dtype=...) (in a config, data_types.buffer_dtype)."
            )


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = ", ".join(type(one).__name__ for one in optimizers_of(optimizer))
    for one in optimizers_of(optimizer):
        try:
            one.register_state_dict_pre_hook(lambda *_: None).remove()
        except AttributeError as error:
            raise UsageError(
                f"{type(one).__name__} has no hooks of torch.optim.Optimizer, whose __init__ it did not call, as wrappers of "
                "another optimizer do (Lookahead). Pass shard() the optimizer that it wraps, and go on calling the wrapper."
            ) from error
        refuse_other_states(one)
    steps = [float(state.get("step", 1)) for state in optimizer.state.values()]
    if any(steps):  # Adagrad has a state from the start
        raise UsageError(
            f"the optimizer ({names}) has stepped already, or has loaded states, which shard() would "
            "lose. Shard first, and then call optimizer.load_state_dict(), or load a checkpoint."
        )
    known = {id(p) for p in model.parameters()}
    groups = [p for g in optimizer.param_groups for p in g["params"]]
    strangers = sum(id(p) not in known for p in groups)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(groups)} tensors are not parameters of the model. Make the optimizer "
            "from this model's parameters(), after you move and wrap the model."
        )
    if not any(p.requires_grad for p in groups):
        raise UsageError(
            "none of the optimizer's parameters requires a gradient, so there is nothing to train. Unfreeze some, or "
            "pass optimizer=None to evaluate."
        )


_SCHEDULE = (
    "within",
    "reshard_after_forward",
    "prefetch_numel",
    "max_live_numel",
    "max_reuse_numel",
)
"""The names of the policy's fields that change which buffers the ranks send, and when."""


def _refuse_different_models(model: nn.Module, groups: Sequence[Group], context: Context, *, overlap: bool) -> None:
    """Raise for the first difference in models or settings: the ranks would send different buffers."""
    collectives = context.everyone
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}{placed(p)}"
        for name, p in model.named_parameters()  # with the names of wrappers, in which ranks may differ
    ]
    lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    lines += [f"unit {group.label}{group.kind} of {[named.fqn for named in group.named]}" for group in groups]
    states = ("parameters", "gradients", "optimizer")
    lines += [
        f"{context.precision}",
        f"buckets of {context.bucket_numel} elements",
        f"sharded: {[name for name in states if getattr(context.policy, name).sharded]}",
        f"whole_parameters={context.whole_parameters}",
        f"overlap={overlap}",
        *(f"{name}={getattr(context.policy, name)}" for name in (*states, *_SCHEDULE)),
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    everyone = collectives.exchange_if_different(digest, "the shapes of the model")
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        of_lines = collectives.exchange_json([zlib.crc32(line.encode()) for line in lines], "the shapes of the model")
        compared = enumerate(zip_longest(*of_lines))
        first = next((number for number, sums in compared if len(set(sums)) > 1), 0)
        mine = [*lines, "nothing more"][first]
        raise UsageError(
            f"the ranks built different models: ranks {different} differ from rank 0, first at parameter, buffer or setting "
            f"{first + 1}, where rank {collectives.rank} has: {mine}. Build the same model, with the same settings, on every rank."
        )


def free_for_sharding(model: nn.Module) -> None:
    """Run a `remove` that was deferred to this call. Raise if the model is still sharded. Every rank must call it."""
    for parameter in model.parameters():
        home = home_of(parameter)
        hooks = None if home is None else home.hooks()
        if hooks is not None and hooks.before_next_sharding is not None:
            hooks.before_next_sharding()  # afterwards its other parameters have no home
    taken = [name for name, p in named_parameters(model) if home_of(p) is not None]
    if taken:
        raise UsageError(
            f"the model is sharded already (parameter {taken[0]}): call remove() on the result of shard(), or "
            "destroy() on the engine of initialize, or make a new model. If two models share parameters, shard one module that "
            "holds both, with a list of their optimizers."
        )
