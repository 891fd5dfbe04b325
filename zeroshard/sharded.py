"""Owns `Sharded`: a model whose model states are sharded, and what its user may ask of it. Made by shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.checkpoints import Checkpoints, Loaded
from zeroshard.checkpoint.saving import Where
from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.formats.hugging_face import export_live
from zeroshard.layout.bucketing import Group
from zeroshard.observe.display import Display
from zeroshard.observe.memory import formula, live_nbytes, memory_report
from zeroshard.parameters.context import Context
from zeroshard.policy import DTypes, Offload, Place, Policy
from zeroshard.schedule.hooks import Hooks
from zeroshard.schedule.kept_in_memory import state_dict_in_memory
from zeroshard.schedule.make_units import frozen_names, make_units
from zeroshard.schedule.schedule import Schedule
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import PARAMETERS, ModelStates
from zeroshard.step.parking import STATES, Parking
from zeroshard.step.sharded_optimizer import ShardedOptimizer
from zeroshard.unsharded import register, unregister


@dataclass(frozen=True)
class Sharded:
    """A model whose model states are sharded. Made by `shard`.

    Attributes:
        model: the user's own model.
        optimizer: what to call `step`, `zero_grad` and schedulers with.
        policy: the residencies in force.
        checkpoints: where `save` and `load` go, see there.
        display: the lines on rank 0's terminal.
    """

    model: nn.Module
    optimizer: ShardedOptimizer
    policy: Policy
    checkpoints: Checkpoints
    display: Display
    _schedule: Schedule
    _hooks: Hooks
    _context: Context
    _parking: Parking

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> float | Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        Every rank must call it, after the last backward of the step. (torch.nn.utils.clip_grad_norm_ raises: after that,
        `parameter.grad` has a shape and no values.)

        Args:
            max_norm: None leaves the norm as it is.
            loss_scale: what the loss was multiplied by before the backward, see `DynamicLossScaler`; the gradients are
                divided by it first. A norm that is not finite leaves them as they are: do not step then.

        Returns:
            A number; where an accelerator computes it, a tensor of shape [] there, as torch's own clipping returns: `float(norm)`
            waits for it, and who does not ask does not wait.
        """
        return self.optimizer.clip_grad_norm_(max_norm, loss_scale)

    @contextmanager
    def accumulate(self, active: bool = True) -> Iterator[None]:
        """Backwards inside are not the last microbatch of their step: policies that may, sum them on this rank.

        With `active` False it does nothing: `with sharded.accumulate(i < n - 1): loss.backward()`.
        """
        before = self._schedule.reductions.is_last_microbatch
        self._schedule.reductions.is_last_microbatch = before and not active
        try:
            yield
        finally:
            self._schedule.reductions.is_last_microbatch = before

    @property
    def backwards_ended(self) -> int:
        """How many backwards of steps have ended on this rank, since the model was sharded."""
        return self._schedule.backwards_ended

    def expect_last_microbatch(self, is_last: bool) -> None:
        """Say of the backwards to come whether they are the last microbatch of their step, until this is called again."""
        self._schedule.reductions.is_last_microbatch = is_last

    def end_backward(self) -> None:
        """As `finish_backward`, for who knows that torch said nothing: see `backwards_ended`."""
        self._schedule.end_backward()

    def end_accumulation(self) -> None:
        """Reduce what was summed on this rank alone, where no backward was known to be the last. Every rank must call it."""
        if not self.policy.gradients.sharded:
            self.expect_last_microbatch(True)
            self._schedule.end_backward()

    @contextmanager
    def probe(self, take: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Backwards inside belong to no step: `take(fqn, gradient)` gets this rank's gradients, and nothing is reduced.

        Under sharded parameters every rank must do the same inside.
        """
        with self._hooks.probe(lambda unit, index, gradient: take(unit.named[index].fqn, gradient)):
            yield

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a small CPU tensor over ranks, in rank order. Every rank must call it, with the same shape and dtype."""
        own = values.contiguous().reshape(-1)
        messages = self._context.collectives.exchange(own.view(torch.uint8).numpy().tobytes(), "a sum over ranks")
        parts = [torch.frombuffer(bytearray(message), dtype=own.dtype) for message in messages]
        return torch.stack(parts).sum(0).view(values.shape)

    def exchange_json(self, value: Any, what: str) -> list[Any]:
        """A small value of each rank, by rank. Every rank must call it; `what` names it where a rank does not come."""
        return self._context.collectives.exchange_json(value, what)

    def consolidated_state_dict(self, to: int = 0) -> dict[str, Tensor] | None:
        """`model.state_dict()` in CPU memory of rank `to`, one unit at a time; None on the others. Every rank must call it."""
        state = state_dict_in_memory(self.model, keeps=self.rank == to)
        return state if self.rank == to else None

    def measure_waits(self, measure: Callable[[str], AbstractContextManager[None]]) -> None:
        """Put every wait for other ranks inside `measure("reduce" | "gather" | "exchange")`."""
        self._context.collectives.measure = measure

    def finish_backward(self) -> None:
        """Say that this microbatch's backward is over, also where the loss touched no parameter on this rank."""
        self._schedule.end_backward_once()

    @property
    def states(self) -> ModelStates:
        """The model states by a parameter's fqn: get and set the whole, or this rank's part."""
        return ModelStates(self._schedule.units, self.optimizer, self._context.collectives)

    def memory_report(self) -> dict[str, int]:
        """Bytes of live storage on this rank: `parameters`, `gradients`, `optimizer`, `buffers` (communication scratch, and memory
        that waits for the next unit).

        With offload also what is off the accelerator: `cpu`, with the buffers through which the disk is used, and `disk`.
        """
        storages = self._context.storages
        here = storages.accelerator
        parked = here.parked_nbytes + self._context.collectives.buffers_nbytes
        units, kept, pool = self._schedule.units, self.optimizer.kept_in(here), self._context.pool
        report = memory_report(units, kept, pool, parked, storages.emptied)
        away = storages.nbytes()
        away["cpu"] += self.optimizer.frames_nbytes
        if storages.host is not storages.accelerator:
            away["cpu"] += live_nbytes(self.optimizer.kept_in(storages.host), set())
        return report | away if any(away.values()) else report

    def offload_states(
        self, states: Iterable[str] = STATES, place: Place = Place.CPU, offload: Offload | None = None
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
        collectives = self._context.collectives
        return formula(self.policy, self.dtypes, numel, collectives.world_size, states, collectives.inside.world_size)

    @property
    def dtypes(self) -> DTypes:
        """Of the model states, where the model's parameters have one dtype."""
        return self._context.dtypes(next(self.model.parameters()).dtype)

    def comm_report(self, *, clear: bool = True) -> dict[str, int]:
        """Bytes that this rank sent since the last call that cleared them, by collective, counted as they are sent."""
        report = dict(self._context.collectives.sent)
        if clear:
            self._context.collectives.sent.clear()
        return report

    @property
    def rank(self) -> int:
        """Of this process in the data-parallel group."""
        return self._context.collectives.rank

    @property
    def world_size(self) -> int:
        """Of that group."""
        return self._context.collectives.world_size

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
        with self._context.collectives.operation("update_trainable"):
            self._update_trainable(param_group)

    def _update_trainable(self, param_group: dict[str, Any] | None) -> None:
        if not self._schedule.is_between_steps:
            raise UsageError("update_trainable between backward and zero_grad: end the step first.")
        self._schedule.refuse_parked("update_trainable()")
        self._refuse_pinned("update_trainable()")
        new = set[int]()
        if param_group is not None:
            given = param_group["params"]
            param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
            new = {id(parameter) for parameter in param_group["params"]}
        listed = {one for group in self.optimizer.groups for one in group} | new
        freed = [
            entry
            for unit in self._schedule.units
            for entry in (() if unit.trainable else unit.named)
            if entry.parameter.requires_grad and (id(entry.parameter) in listed or entry.fqn in self._schedule.frozen)
        ]
        unknown = [entry.fqn for entry in freed if id(entry.parameter) not in listed]
        if unknown:
            raise UsageError(
                f"{unknown[0]} was freed and is in no param group of the optimizer: give update_trainable a param_group with it."
            )
        if param_group is not None:
            self.optimizer.list_group(param_group)
        self._schedule.optimized = listed
        for entry in freed:
            entry.parameter.grad = None  # what a parameter outside of the optimizer has gathered belongs to no step
        self._schedule.frozen = frozen_names(self._schedule.units)
        for unit in list(self._schedule.units):
            now = [entry.parameter.requires_grad and id(entry.parameter) in listed for entry in unit.named]
            for entry, trains in zip(unit.named if unit.trainable else (), now, strict=unit.trainable):
                if not trains:
                    entry.parameter.grad = None
            if any(trains != unit.trainable for trains in now):
                self._split(unit, now)
        for unit in self._schedule.units:
            unit.appearance.expect_present_grads()
        self._hooks.remove()
        self._hooks.attach()
        register(self._schedule.units, self._hooks, self.optimizer)

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
        self._schedule.replace(unit, make_units(groups, as_before, first))
        self.optimizer.lay_out()
        states = self.states
        for fqn, values in kept.items():
            states.restore(fqn, values)

    def save(
        self, folder: str | os.PathLike[str], tag: str, values: Mapping[str, Any] | None = None, *, save_latest: bool = True,
        exclude_frozen: bool = False, asynchronous: bool = False, keep_last: int | None = None, within_step: bool = False,
        node_local: bool = False,
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
            within_step: also between a backward and its step: the gradients are not saved, and a load begins the step anew.
            node_local: the folder is each host's own (a local disk; memory, /dev/shm). Each rank's file is copied to the next
                host, so that the loss of one host loses nothing.

        Raises:
            CheckpointError: on every rank, where any could not write; names the file and the cause.
        """
        if self._schedule.awaits_step and not within_step:
            raise UsageError("a checkpoint between backward and step would lose the gradients: save after the step.")
        with self._context.collectives.operation(f'save "{tag}"'):
            where = Where(Path(folder), tag, save_latest, keep_last)
            self.checkpoints.save(
                where, values or {}, exclude_frozen=exclude_frozen, asynchronous=asynchronous, node_local=node_local
            )

    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False, node_local: bool = False,
    ) -> Loaded:  # fmt: skip
        """Load a checkpoint, saved at whatever world size and policy; each rank reads what it needs. Every rank must call it.

        Args:
            folder: that of all checkpoints.
            tag: default: the newest, by the file `latest`.
            strict: parameters that the checkpoint or the model lacks are errors.
            optimizer_states: load the optimizer's states and hyperparameters too.
            random: restore every rank's random state, where the world size is the same.
            fall_back: where a checkpoint is damaged, load the newest whole one in its place.
            node_local: the folder is each host's own, see `save`; what a host lacks, or lost, comes from the others first.

        Returns:
            Its path, tag, world size, and `values`.

        Raises:
            CheckpointError: on every rank; names the file and the cause.
        """
        with self._context.collectives.operation(f'load "{tag}"' if tag is not None else f'load of "{folder}"'):
            return self.checkpoints.load(
                folder, tag, strict=strict, optimizer_states=optimizer_states, random=random, fall_back=fall_back,
                node_local=node_local,
            )  # fmt: skip

    def export(self, out: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the model for `from_pretrained`, each rank its own part, see `Engine.export`. Every rank must call it."""
        with self._context.collectives.operation(f'export to "{out}"'):
            export_live(self.checkpoints, out, dtype)

    def remove(self) -> None:
        """Take zeroshard off again: the parameters are whole, ordinary and current. Every rank must call it."""
        self._refuse_pinned("remove()")
        self.reload_states()
        self._schedule.forget_gradients()  # nothing is in flight any longer
        self._hooks.remove()
        for unit in self._schedule.units:
            unit.release()
        unregister(self._schedule.units)
        self.optimizer.release_inner()
        try:
            self.checkpoints.close()  # which raises what went wrong with an asynchronous save
        finally:
            self._context.collectives.close()
            self._context.storages.close()

    def abandon(self) -> None:
        """Take zeroshard off without the other ranks, after an error on this one: their waits for it end in an error.

        Parameters that are sharded at rest stay placeholders: nobody is there to bring them together. Others are whole.
        """
        self._hooks.remove()
        unregister(self._schedule.units)
        self.optimizer.release_inner()
        with suppress(ZeroshardError):  # what went wrong was told; here it is in the way
            self.checkpoints.close()
        self._context.collectives.close()
        self._context.storages.close()

    def _refuse_pinned(self, what: str) -> None:
        for unit in self._schedule.units:
            if unit.is_pinned:
                raise UsageError(f"{what} inside zeroshard.unsharded(), which holds {unit.label}. Call it outside.")
