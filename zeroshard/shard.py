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
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.checkpoint.checkpoints import Checkpoints, Loaded
from zeroshard.checkpoint.saving import Where
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.choose import create_collectives
from zeroshard.errors import UsageError
from zeroshard.layout.bucketing import Group, group_parameters
from zeroshard.observe.memory import formula, live_nbytes, memory_report
from zeroshard.parameters.bucket import Context
from zeroshard.policy import Offload, Place, Policy, Precision, Residency, Units
from zeroshard.schedule.hooks import Hooks
from zeroshard.schedule.schedule import Schedule
from zeroshard.schedule.unit import State, Unit
from zeroshard.step.elementwise import needs_whole_parameters
from zeroshard.step.model_states import PARAMETERS, ModelStates
from zeroshard.step.parking import STATES, Parking
from zeroshard.step.sharded_optimizer import NoOptimizer, ShardedOptimizer
from zeroshard.storage.buffer_pool import BufferPool
from zeroshard.storage.storages import Storages

DEFAULT_BUCKET_NUMEL = 500_000_000
"""As DeepSpeed's reduce_bucket_size: in practice, a bucket is a unit or a large parameter."""

_unit_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
# A phone book, not state: it lets `unsharded` find a parameter's unit without an attribute hung on the parameter.


@dataclass(frozen=True)
class Sharded:
    """A model whose model states are sharded. Made by `shard`.

    Attributes:
        model: the user's own model.
        optimizer: what to call `step`, `zero_grad` and schedulers with.
        policy: the residencies in force.
        checkpoints: where `save` and `load` go, see there.
    """

    model: nn.Module
    optimizer: ShardedOptimizer
    policy: Policy
    _schedule: Schedule
    _hooks: Hooks
    _collectives: Collectives
    _pool: BufferPool
    _precision: Precision
    _context: Context
    checkpoints: Checkpoints
    _parking: Parking
    _frozen: set[str]
    """Parameters that took no gradient when that was last looked at."""

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> float:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        Every rank must call it, after the last backward of the step. (torch.nn.utils.clip_grad_norm_ finds no gradient to
        clip: gradients leave `parameter.grad` as soon as they are made.)

        Args:
            max_norm: None leaves the norm as it is.
            loss_scale: what the loss was multiplied by before the backward, see `DynamicLossScaler`; the gradients are
                divided by it first. A norm that is not finite leaves them as they are: do not step then.
        """
        return self.optimizer.clip_grad_norm_(max_norm, loss_scale)

    @contextmanager
    def accumulate(self, active: bool = True) -> Iterator[None]:
        """Backwards inside are not the last microbatch of their step: policies that may, sum them on this rank.

        With `active` False it does nothing: `with sharded.accumulate(i < n - 1): loss.backward()`.
        """
        before = self._schedule.is_last_microbatch
        self._schedule.is_last_microbatch = before and not active
        try:
            yield
        finally:
            self._schedule.is_last_microbatch = before

    @contextmanager
    def probe(self, take: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Backwards inside belong to no step: `take(fqn, gradient)` gets this rank's gradients, and nothing is reduced.

        Under sharded parameters every rank must do the same inside.
        """
        with self._hooks.probe(lambda unit, index, gradient: take(unit.named[index].fqn, gradient)):
            yield

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a small CPU tensor over ranks, in rank order. Every rank must call it, with the same shape and dtype."""
        own = values.contiguous()
        messages = self._collectives.exchange(own.view(torch.uint8).numpy().tobytes(), "a sum over ranks")
        parts = [torch.frombuffer(bytearray(message), dtype=own.dtype) for message in messages]
        return torch.stack(parts).sum(0).view(own.shape)

    def measure_waits(self, measure: Callable[[str], AbstractContextManager[None]]) -> None:
        """Put every wait for other ranks inside `measure("reduce" | "gather" | "exchange")`."""
        self._collectives.measure = measure

    def finish_backward(self) -> None:
        """Say that this microbatch's backward is over, also where the loss touched no parameter on this rank."""
        self._schedule.end_backward_once()

    @property
    def states(self) -> ModelStates:
        """The model states by a parameter's fqn: get and set the whole, or this rank's part."""
        return ModelStates(self._schedule.units, self.optimizer, self._collectives)

    def memory_report(self) -> dict[str, int]:
        """Bytes of live storage on this rank: `parameters`, `gradients`, `optimizer`, `buffers` (communication scratch).

        With offload also what is off the accelerator: `cpu`, with the buffers through which the disk is used, and `disk`.
        """
        storages = self._context.storages
        report = memory_report(self._schedule.units, self.optimizer.kept_in(storages.accelerator), self._pool)
        away = storages.nbytes()
        away["cpu"] += self.optimizer.frames_nbytes
        if storages.host is not storages.accelerator:
            away["cpu"] += live_nbytes(self.optimizer.kept_in(storages.host), set())
        return report | away if any(away.values()) else report

    def offload_states(
        self,
        states: Iterable[str] = STATES,
        place: Place = Place.CPU,
        offload: Offload | None = None,
    ) -> int:
        """Park model states off the accelerator, between steps, so that something else may use its memory. Every rank may call it.

        Until `reload_states` nothing may use them: a forward, a step, a save says so.

        Args:
            states: of "parameters", "gradients", "optimizer" (its states, and master weights that are tensors of their own).
            place: CPU memory, where that is not the accelerator's own; or the disk.
            offload: disk: its `path` says where.

        Returns:
            The bytes that were given back.

        Raises:
            UsageError: a step has begun, or states are parked already.
            StorageError: there is no room; everything is as it was.
        """
        return self._parking.offload(states, place, offload or Offload())

    def reload_states(self) -> None:
        """Bring back what `offload_states` parked."""
        self._parking.reload()

    def memory_formula(self, states: int = 2) -> dict[str, float]:
        """Bytes per rank at rest that the ZeRO paper's formulas give for this model, with `states` tensors a parameter."""
        numel = sum(entry.shape.numel() for unit in self._schedule.units if unit.trainable for entry in unit.named)
        dtypes = self._precision.resolve(next(self.model.parameters()).dtype)
        return formula(self.policy, dtypes, numel, self._collectives.world_size, states)

    def comm_report(self) -> dict[str, int]:
        """Bytes that this rank sent since the last call, by collective, counted as they are sent."""
        report = dict(self._collectives.sent)
        self._collectives.sent.clear()
        return report

    @property
    def rank(self) -> int:
        """Of this process in the data-parallel group."""
        return self._collectives.rank

    def take_masters(self) -> None:
        """Master weights were written to directly: the parameters follow. Every rank must call it."""
        for unit in self._schedule.units:
            unit.take_masters()

    @property
    def trains(self) -> bool:
        """Whether there is anything to train."""
        return any(unit.trainable for unit in self._schedule.units)

    def update_trainable(self, param_group: dict[str, Any] | None = None) -> None:
        """Take note of parameters whose `requires_grad` was changed. Every rank must call it, between steps, with the same.

        What is frozen gives up its gradient and its optimizer state; what is freed begins with fresh state, in the param group
        where it was listed when the model was sharded. One unit is whole at a time.

        Args:
            param_group: a new group of the optimizer, for freed parameters that it does not know: `{"params": [...], "lr": ...}`.

        Raises:
            UsageError: gradients of a step are waiting, or a freed parameter is in no group of the optimizer.
        """
        with self._collectives.operation("update_trainable"):
            self._update_trainable(param_group)

    def _update_trainable(self, param_group: dict[str, Any] | None) -> None:
        if not self._schedule.is_between_steps:
            raise UsageError("update_trainable between backward and zero_grad: end the step first.")
        if param_group is not None:
            self.optimizer.list_group(param_group)
        listed = {parameter for group in self.optimizer.groups for parameter in group}
        freed = [
            entry
            for unit in self._schedule.units
            for entry in (() if unit.trainable else unit.named)
            if entry.parameter.requires_grad and (id(entry.parameter) in listed or entry.fqn in self._frozen)
        ]
        unknown = [entry.fqn for entry in freed if id(entry.parameter) not in listed]
        if unknown:
            raise UsageError(
                f"{unknown[0]} was freed and is in no param group of the optimizer: give update_trainable a param_group with it."
            )
        for entry in freed:
            entry.parameter.grad = None  # what a parameter outside of the optimizer has gathered belongs to no step
        self._frozen.clear()
        self._frozen.update(_frozen(self._schedule.units))
        for unit in list(self._schedule.units):
            now = [entry.parameter.requires_grad and id(entry.parameter) in listed for entry in unit.named]
            if any(trains != unit.trainable for trains in now):
                self._split(unit, now)
        self._hooks.remove()
        self._hooks.attach()

    def _split(self, unit: Unit, trains: Sequence[bool]) -> None:
        """Give the parameters of a unit to new ones, by who is trained, with master weights and optimizer state."""
        states = self.states
        names = [PARAMETERS, *states.optimizer_names()]
        kept = {entry.fqn: {name: states.get(entry.fqn, name) for name in names} for entry in unit.named}
        unit.release()
        groups = [
            Group(
                unit.label, unit.modules[0], named, trainable, unit.named[0].parameter.dtype, not unit.sharded_at_rest
            )
            for trainable in (True, False)
            if (named := tuple(entry for entry, now in zip(unit.named, trains, strict=True) if now is trainable))
        ]
        first = 1 + max((bucket.number for other in self._schedule.units for bucket in other.buckets), default=-1)
        # Where its optimizer states rest was decided when the model was sharded.
        decided = replace(unit.policy, offload_optimizer=replace(unit.policy.offload_optimizer, ratio=1.0))
        as_before = replace(self._context, policy=decided)
        self._schedule.replace(unit, _make_units(groups, self._precision, as_before, first))
        self.optimizer.lay_out()
        states = self.states
        for fqn, values in kept.items():
            states.restore(fqn, values)

    def save(
        self, folder: str | os.PathLike[str], tag: str, values: Mapping[str, Any] | None = None, *, save_latest: bool = True,
        exclude_frozen: bool = False, asynchronous: bool = False, keep_last: int | None = None,
    ) -> None:  # fmt: skip
        """Save a checkpoint: model states, buffers, every rank's random state, `values`. Every rank must call it, after a step.

        It loads at any world size and under any policy, and exists whole or not at all.

        Args:
            folder: that of all checkpoints.
            tag: this one's name; one of the same name stays until this one is whole.
            values: JSON and tensors, such as `{"scheduler": scheduler.state_dict(), "step": 100}`; rank 0's are saved.
            save_latest: `load` without a tag loads this one.
            exclude_frozen: leave out parameters that are not trained.
            asynchronous: copy to CPU memory and write behind the training. The next save, `checkpoints.wait()` and `remove`
                wait for it, and raise what went wrong.
            keep_last: remove all but so many of the newest.

        Raises:
            CheckpointError: on every rank, where any could not write; names the file and the cause.
        """
        where = Where(Path(folder), tag, save_latest, keep_last)
        self.checkpoints.save(where, values or {}, exclude_frozen=exclude_frozen, asynchronous=asynchronous)

    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False,
    ) -> Loaded:  # fmt: skip
        """Load a checkpoint, saved at whatever world size and policy; each rank reads what it needs. Every rank must call it.

        Args:
            folder: that of all checkpoints.
            tag: default: the newest, by the file `latest`.
            strict: parameters that the checkpoint or the model lacks are errors.
            optimizer_states: load the optimizer's states and hyperparameters too.
            random: restore every rank's random state, where the world size is the same.
            fall_back: where a checkpoint is damaged, load the newest whole one in its place.

        Returns:
            Its path, tag, world size, and `values`.

        Raises:
            CheckpointError: on every rank; names the file and the cause.
        """
        return self.checkpoints.load(
            folder, tag, strict=strict, optimizer_states=optimizer_states, random=random, fall_back=fall_back
        )

    def remove(self) -> None:
        """Take zeroshard off again: the parameters are whole, ordinary and current. Every rank must call it."""
        self.reload_states()
        self._hooks.remove()
        for unit in self._schedule.units:
            unit.release()
            for entry in unit.named:
                _unit_of.pop(entry.parameter, None)
        self.checkpoints.close()
        self._collectives.close()
        self._context.storages.close()


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
        group: the data-parallel process group; default: all ranks, or this process alone where torch.distributed is not
            initialised.

    Raises:
        UsageError: the model or the optimizer cannot be sharded; says which parameter and what to do.
    """
    policy, precision = policy or Policy.stage(2), precision or Precision()
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError(f"the model ({type(model).__name__}) has no parameters: there is nothing to shard.")
    taken = [name for name, p in model.named_parameters() if p in _unit_of]
    if taken:
        raise UsageError(
            f"the model is sharded already (parameter {taken[0]}): call remove() on what shard() returned."
        )
    if optimizer is None:
        optimizer, elementwise = NoOptimizer(), True
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameter for parameter in parameters if parameter.requires_grad)
    if not isinstance(optimizer, NoOptimizer):
        _check_optimizer(model, optimizer)
    whole = needs_whole_parameters(optimizer, elementwise)

    device = parameters[0].device
    collectives = create_collectives(group, device, precision.predivide_factor, what="shard()")
    with collectives.operation("shard()"):
        return _shard(model, optimizer, policy, precision, collectives, units, bucket_numel, overlap, whole)


def _shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy, precision: Precision, collectives: Collectives,
    units: Units | None, bucket_numel: int, overlap: bool, whole: bool,
) -> Sharded:  # fmt: skip
    parameters = list(model.parameters())
    device = parameters[0].device
    _refuse_different_models(model, collectives)
    _take_buffers(model, collectives, precision)
    pool = BufferPool(device)
    optimized = {id(p) for g in optimizer.param_groups for p in g["params"]}
    param_dtype = precision.resolve(parameters[0].dtype).param
    storages = Storages(policy, device, param_dtype.itemsize)
    context = Context(policy, collectives, pool, storages, bucket_numel, whole_parameters=whole)
    groups = group_parameters(model, optimized, units)
    schedule = Schedule(_make_units(groups, precision, context), collectives, policy, overlap=overlap)
    sharded_optimizer = ShardedOptimizer(optimizer, schedule, collectives, storages, policy, whole_parameters=whole)
    hooks = Hooks(model, schedule)
    return Sharded(
        model,
        sharded_optimizer,
        policy,
        schedule,
        hooks,
        collectives,
        pool,
        precision,
        context,
        Checkpoints(model, schedule, sharded_optimizer, collectives, policy),
        Parking(schedule, sharded_optimizer, storages, pool),
        _frozen(schedule.units),
    )


def _take_buffers(model: nn.Module, collectives: Collectives, precision: Precision) -> None:
    """Buffers stay whole on every rank: rank 0's values, in the dtype of the forward."""
    for buffer in model.buffers():
        collectives.broadcast(buffer)
        dtype = precision.buffer_dtype or precision.param_dtype
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def _frozen(units: Sequence[Unit]) -> set[str]:
    return {entry.fqn for unit in units for entry in unit.named if not entry.parameter.requires_grad}


def _make_units(groups: Sequence[Group], precision: Precision, context: Context, first_bucket: int = 0) -> list[Unit]:
    units = list[Unit]()
    trained = [sum(entry.shape.numel() for entry in group.named) if group.trainable else 0 for group in groups]
    left = context.policy.offload_optimizer.ratio * sum(trained)
    for group, numel in zip(groups, trained, strict=True):
        dtypes = precision.resolve(group.dtype)
        left -= numel
        own = replace(context, policy=_policy_of(group, context.policy, leaves=left >= 0))
        unit = Unit(group.label, [group.module], group.named, group.trainable, dtypes, first_bucket, own)
        for entry in group.named:
            _unit_of[entry.parameter] = weakref.ref(unit)
        units.append(unit)
        first_bucket += len(unit.buckets)
    return units


def _policy_of(group: Group, policy: Policy, *, leaves: bool) -> Policy:
    """Small parameters stay unsharded on the accelerator; beyond the ratio that leaves it, so do optimizer states."""
    here = Place.ACCELERATOR
    if group.persistent:
        policy = replace(policy, parameters=Residency(sharded=False, place=here))
    if not leaves:
        optimizer, gradients = replace(policy.optimizer, place=here), replace(policy.gradients, place=here)
        policy = replace(policy, optimizer=optimizer, gradients=gradients)
    return policy


@contextmanager
def unsharded(target: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Inside, the parameters of a module, or those given, are whole and current, under every policy.

    They stay so while the model runs: inside, ranks may run it as often as each likes (to generate, say). Where parameters
    are sharded at rest, and wherever there is a modifier rank, every rank must enter and leave it.

    Args:
        target: a module, a parameter or parameters. What shares a unit with them is whole too.
        modifier_rank: rank of the data-parallel group whose in-place changes count: they become every rank's parameters and
            master weights on leaving. None is for reading.

    Raises:
        UsageError: parameters were changed without a modifier rank. Under sharded parameters the change is gone.
    """
    if isinstance(target, nn.Module):
        wanted: Iterable[Tensor] = target.parameters()
    else:
        wanted = [target] if isinstance(target, Tensor) else target
    references = {id(ref): ref for ref in (_unit_of.get(parameter) for parameter in wanted) if ref is not None}
    units = [unit for unit in (ref() for ref in references.values()) if unit is not None]
    at_rest = [unit for unit in units if unit.state is State.SHARDED]
    offloaded = [unit for unit in units if unit.state is State.OFFLOADED]
    with _operation(units, "unsharded"):
        for unit in at_rest:
            unit.start_unshard()
        for unit in units:
            unit.unshard()
            unit.pin()
    before = [unit.versions() for unit in units]
    written: list[str] = []
    try:
        yield
        with _operation(units, "the end of unsharded"):
            for unit, versions in zip(units, before, strict=True):
                if modifier_rank is not None:
                    unit.take_parameters(modifier_rank)
                else:
                    written += unit.written_since(versions)
    finally:
        for unit in units:
            unit.unpin()
        for unit in at_rest:
            unit.reshard()
        for unit in offloaded:
            unit.offload()
    if written:
        raise UsageError(
            f"parameters were changed inside unsharded() without a modifier rank: {', '.join(written)}. The ranks, and the "
            "master weights, would no longer agree: pass modifier_rank=0 to keep rank 0's change, or copy what you want to change."
        )


def _operation(units: Sequence[Unit], name: str) -> AbstractContextManager[None]:
    """What the waits for other ranks inside belong to."""
    buckets = [bucket for unit in units for bucket in unit.buckets]
    return buckets[0].operation(name) if buckets else nullcontext()


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


def _refuse_different_models(model: nn.Module, collectives: Collectives) -> None:
    """Ranks that build different models would exchange buffers of different sizes: find the first difference."""
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
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
            f"the ranks built different models: ranks {different} differ from rank 0, first at parameter or buffer "
            f"{low + 1}, where rank {collectives.rank} has: {mine}. Build the same model on every rank."
        )
