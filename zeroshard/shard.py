"""Owns the plain-PyTorch road: `shard(model, optimizer, policy)`, then the user's own loop. Called by users and engine.

sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), fused=True), Policy.stage(2))
for batch in data:
    model(batch).backward()
    sharded.clip_grad_norm_(1.0)
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.born import is_shown
from zeroshard.checkpoint.checkpoints import Checkpoints
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.choose import create_collectives
from zeroshard.emulation import warn_if_emulated
from zeroshard.errors import UsageError
from zeroshard.launch import join_ranks
from zeroshard.layout.bucketing import Group, group_parameters
from zeroshard.observe.display import Display
from zeroshard.parameters.context import Context
from zeroshard.parameters.shown import whole_class
from zeroshard.policy import Place, Policy, Precision, Units
from zeroshard.schedule.compiled import refuse_cuda_graphs
from zeroshard.schedule.hooks import Hooks
from zeroshard.schedule.make_units import make_units
from zeroshard.schedule.schedule import Schedule
from zeroshard.sharded import Sharded
from zeroshard.step.elementwise import needs_whole_parameters
from zeroshard.step.no_optimizer import NoOptimizer
from zeroshard.step.parking import Parking
from zeroshard.step.sharded_optimizer import ShardedOptimizer
from zeroshard.storage.buffer_pool import BufferPool
from zeroshard.storage.storages import Storages
from zeroshard.unsharded import is_taken, register

DEFAULT_BUCKET_NUMEL = 500_000_000
"""As DeepSpeed's reduce_bucket_size: in practice, a bucket is a unit or a large parameter."""


@dataclass(frozen=True)
class Backend:
    """What a sharded model runs on.

    Attributes:
        collectives: how its ranks talk, see `create_collectives`.
        storages: where its states rest.
        join_ranks: makes one group of the ranks that a launcher started.
        parameter_class: of the model's parameters.
    """

    collectives: Callable[..., Collectives] = create_collectives
    storages: Callable[..., Storages] = Storages
    join_ranks: Callable[[torch.device], None] = join_ranks
    parameter_class: type = nn.Parameter


BACKEND = Backend()


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    policy: Policy | None = None,
    *,
    precision: Precision | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    overlap: bool = True,
    elementwise: bool | None = None,
    units: Units | None = None,
    group: dist.ProcessGroup | None = None,
    attributes: type | None = None,
) -> Sharded:
    """Shard a model's states over data-parallel ranks. Every rank of the group must call it; rank 0's values are taken.

    Args:
        model: any module; it stays the user's, with its own ordinary parameters.
        optimizer: a torch optimizer over the model's parameters that has not stepped yet, or what makes one from them.
            It is changed in place: its param groups hold views of shards from now on. None: the model is for evaluation
            alone, and takes no memory for gradients and optimizer states.
        policy: where model states rest; default ZeRO-2.
        precision: dtypes; by default each parameter keeps its own, with fp32 master weights.
        bucket_numel: the most elements that are communicated at once; bounds the transient buffers.
        overlap: run collectives behind the computation. The result is the same bit for bit.
        elementwise: your word on an optimizer unknown to us: True, it updates each element from that element's own
            history alone, so parameters may be cut; False, it looks at whole parameters, so each lies whole on one rank.
        units: which parameters are brought together at once, where each block of a list of blocks is not what you want.
        group: the data-parallel process group; default: all ranks. Where a launcher started several and torch.distributed is not
            initialised, they are joined.
        attributes: a class whose properties the parameters show beside their own while the model is sharded, under policies
            that shard parameters: for code that asks parameters themselves. `parameter_states` says what such properties may tell.

    Raises:
        UsageError: the model or the optimizer cannot be sharded; says which parameter and what to do.
    """
    sharded = shard_on(
        BACKEND,
        model,
        optimizer,
        policy,
        precision=precision,
        bucket_numel=bucket_numel,
        overlap=overlap,
        elementwise=elementwise,
        units=units,
        group=group,
        attributes=attributes,
    )
    warn_if_emulated(model, group)
    return sharded


def shard_on(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    policy: Policy | None = None,
    *,
    precision: Precision | None = None,
    bucket_numel: int = DEFAULT_BUCKET_NUMEL,
    overlap: bool = True,
    elementwise: bool | None = None,
    units: Units | None = None,
    group: dist.ProcessGroup | None = None,
    attributes: type | None = None,
) -> Sharded:
    """As `shard`, on what the caller names."""
    policy, precision = policy or Policy.stage(2), precision or Precision()
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError(f"the model ({type(model).__name__}) has no parameters: there is nothing to shard.")
    backend.join_ranks(parameters[0].device)
    refuse_sharded(model)
    refuse_cuda_graphs(model)
    shown = [name for name, p in model.named_parameters() if is_shown(p)]
    if shown:
        raise UsageError(f"shard() inside zeroshard.unsharded(), which holds {shown[0]}. Call it outside.")
    if optimizer is None:
        optimizer, elementwise = NoOptimizer(), True
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameter for parameter in parameters if parameter.requires_grad)
    if not isinstance(optimizer, NoOptimizer):
        _check_optimizer(model, optimizer)
    whole = needs_whole_parameters(optimizer, elementwise)

    device = parameters[0].device
    collectives = backend.collectives(
        group, device, precision.predivide_factor, what="shard()", within=policy.within, wire=policy.wire
    )
    storages = backend.storages(policy, device, precision.resolve(parameters[0].dtype).param.itemsize, collectives)
    context = Context(
        policy, precision, collectives, BufferPool(device, collectives.shareable), storages, bucket_numel, whole_parameters=whole,
        whole_class=whole_class(attributes if policy.parameters.sharded else None, backend.parameter_class),
    )  # fmt: skip
    try:
        with collectives.operation("shard()"):
            return _shard(model, optimizer, context, units, overlap=overlap)
    except BaseException:
        storages.close()
        collectives.close()
        raise


def _shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, context: Context, units: Units | None, *, overlap: bool
) -> Sharded:
    collectives, storages, policy = context.collectives, context.storages, context.policy
    _refuse_different_models(model, context)
    _take_buffers(model, collectives, context.precision)
    optimized = {id(p) for g in optimizer.param_groups for p in g["params"]}
    groups = group_parameters(model, optimized, units)
    _refuse_integers(groups, policy)
    schedule = Schedule(make_units(groups, context), context, overlap=overlap)
    sharded_optimizer = ShardedOptimizer(
        optimizer, schedule, collectives, storages, policy, whole_parameters=context.whole_parameters
    )
    schedule.optimized = optimized
    hooks = Hooks(model, schedule)
    register(schedule.units, hooks, sharded_optimizer)
    display = Display(speaks=not dist.is_initialized() or dist.get_rank() == 0)
    checkpoints = Checkpoints(LiveModel(model, schedule, sharded_optimizer, collectives, policy), display)
    parking = Parking(schedule, sharded_optimizer, storages, context.pool)
    return Sharded(model, sharded_optimizer, policy, checkpoints, display, schedule, hooks, context, parking)


def _refuse_integers(groups: Sequence[Group], policy: Policy) -> None:
    """A parameter whose values are away shows NaN, and integers have none."""
    leaves = policy.parameters.sharded or policy.parameters.place is not Place.ACCELERATOR
    for group in groups if leaves else ():
        if not group.dtype.is_floating_point and not group.persistent:
            raise UsageError(
                f"parameter {group.named[0].fqn} holds integers ({group.dtype}) and cannot leave its place: register it as "
                "a buffer, or use Policy.stage(2) or below."
            )


def _take_buffers(model: nn.Module, collectives: Collectives, precision: Precision) -> None:
    """Buffers stay whole on every rank: rank 0's values, in the dtype of the forward.

    They travel as bytes, whatever their dtype.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer.layout is not torch.strided:
            raise UsageError(
                f"buffer {name} has no dense values ({buffer.device}, {buffer.layout}): materialise it first."
            )
        if not buffer.is_contiguous():  # expanded, say: no two elements may be one
            buffer.data = buffer.data.contiguous()
        collectives.broadcast(buffer.data.reshape(-1).view(torch.uint8))
        dtype = precision.buffer_dtype or precision.param_dtype
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if any(
        float(state.get("step", 1)) != 0 for state in optimizer.state.values()
    ):  # Adagrad has a state from the start
        raise UsageError(
            f"the optimizer ({type(optimizer).__name__}) has stepped already: its state would be lost. "
            "Shard before the first step, and load a checkpoint after."
        )
    known = {id(p) for p in model.parameters()}
    groups = [p for g in optimizer.param_groups for p in g["params"]]
    strangers = sum(id(p) not in known for p in groups)
    if strangers:
        raise UsageError(
            f"{strangers} of the optimizer's {len(groups)} tensors are not parameters of the model: make the optimizer "
            "from model.parameters() of the same model, after it was moved and wrapped."
        )
    if not any(p.requires_grad for p in groups):
        raise UsageError("none of the optimizer's parameters requires a gradient: there is nothing to train.")


def _refuse_different_models(model: nn.Module, context: Context) -> None:
    """Ranks that build different models, or train them by other settings, would exchange buffers of different sizes: find the first
    difference."""
    collectives = context.collectives
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    policy = context.policy
    sharded = [name for name in ("parameters", "gradients", "optimizer") if getattr(policy, name).sharded]
    lines += [
        f"{context.precision}",
        f"{policy.wire}",
        f"buckets of {context.bucket_numel} elements",
        f"sharded: {sharded}",
    ]
    digest, digests = hashlib.sha256(), []
    for line in lines:
        digest.update(line.encode() + b"\n")
        digests.append(digest.digest())
    everyone = collectives.exchange(digests[-1] + len(lines).to_bytes(8, "little"), "the shapes of the model")
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        # Bisect to the first line that differs; all ranks walk the same path, since all see the same answers.
        low, high = 0, min(int.from_bytes(data[-8:], "little") for data in everyone)
        while low < high:
            middle = (low + high) // 2
            same = collectives.exchange(digests[middle], "the shapes of the model")
            low, high = (middle + 1, high) if all(other == same[0] for other in same) else (low, middle)
        mine = lines[low] if low < len(lines) else "nothing more"
        raise UsageError(
            f"the ranks built different models: ranks {different} differ from rank 0, first at parameter, buffer or setting "
            f"{low + 1}, where rank {collectives.rank} has: {mine}. Build the same model, with the same settings, on every rank."
        )


def refuse_sharded(model: nn.Module) -> None:
    """Raise where a model is in zeroshard's hands already."""
    taken = [name for name, p in model.named_parameters() if is_taken(p)]
    if taken:
        raise UsageError(
            f"the model is sharded already (parameter {taken[0]}): call remove() on what shard() returned, or destroy() on the "
            "engine of initialize, or make a new model."
        )
