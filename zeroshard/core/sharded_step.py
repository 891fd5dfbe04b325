"""Owns the step: an unmodified torch optimizer that gets views of shards.

Each parameter that has elements in a shard is one tensor there, usually 1-D, in the parameter's own param group, so each keeps
its own state, step count and hyperparameters. A parameter that no rank used in a step is skipped, as in plain PyTorch.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeroshard.core.context import Context
from zeroshard.core.gradient_operations import GradientOperations, Numbered
from zeroshard.core.norm import coefficient_of, norm_of
from zeroshard.core.replicas import Replicas
from zeroshard.core.resident import Casts, MeanGradients, Resident, ShardView, SubGroups, placeholder
from zeroshard.core.schedule import Schedule
from zeroshard.core.step import Agreement
from zeroshard.core.storage.base import Storage
from zeroshard.core.travelling import SubGroupsInFrames, Travelling
from zeroshard.core.unit import Unit, refuse_kept_data
from zeroshard.core.users_optimizer import (
    DIGEST_NBYTES,
    DroppedGradients,
    GroupOptions,
    ParamGroups,
    UsersOptimizer,
    once,
    warn_of_zeros,
)
from zeroshard.errors import UsageError
from zeroshard.optim.several import Several, optimizers_of
from zeroshard.optim.states import states_per_parameter
from zeroshard.torch_private import grad_of, in_backward, labelled, step_without_hooks

USED, WRITTEN, CHANGED, DROPPED = (1 << bit for bit in range(4))
"""The flags of a parameter on one rank in the step's small message: the rank computed a gradient, wrote to the
parameter, changed the mean gradient, or set the gradient to None."""


class ShardedStep:
    """The update of this rank's shards by the user's optimizer, once in each call of its `step()`.

    Args:
        inner: the user's optimizer over the units' parameters, or several that act as one. Its `param_groups` hold the shards'
            views while its own code runs, and the user's parameters otherwise.
        context: the ranks, and the places where states rest. If no parameter is cut, `inner` gets tensors of the true shapes.

    Attributes:
        whole_parameters: whether the optimizer reads whole parameters, so that none is cut.
        driver: the whole step of an engine, which also clips and counts: it runs when the user calls the optimizer's `step`.
        loss_scale: the loss scale of the next backward; 1 except under fp16.
        overflow: whether the last gradient norm was infinite or NaN; after an engine's step, whether that step was skipped.
    """

    def __init__(self, inner: torch.optim.Optimizer, schedule: Schedule, context: Context) -> None:
        self.inner = inner
        self.driver: Callable[[], Any] | None = None
        self.loss_scale = 1.0
        self._is_driven = False
        self.begun = object()
        """The last step that has begun. A save that finds another at its end has values from two steps."""
        self._norm: float | Tensor = 0.0
        self.schedule = schedule
        self._used_of: tuple[bytes, tuple[bool, ...]] = (b"", ())
        """The flags of all ranks together in the last exchange, and which parameters they show as used."""
        self._mean_gradients = MeanGradients(context.storages.accelerator, context.live)
        self._context = context
        self.whole_parameters = context.whole_parameters
        context.live.gradient_operation = self._operate
        context.live.before_later_gradients = self._before_later_gradients
        context.live.drop_gradients = self._drop_if_all_are_none
        self.views: list[ShardView] = []
        self.residents: list[Resident] = []
        """The shards that this rank updates, with their parts by parameter."""
        self._parked: list[tuple[Tensor, Tensor]] = []
        self._together: Sequence[UsersOptimizer] = ()
        """The optimizers that step together, while they do."""
        self._optimizers = [
            UsersOptimizer(one, self._step_of, self._end_own_step, self._zero_grad_of) for one in optimizers_of(inner)
        ]
        self._own_step: Generator[None] | None = None
        """The update that waits for the own step of an unknown optimizer, which the user has called."""
        self.replicas: Replicas | None = None
        """Compares values that are the same on all ranks of another dimension; None if there is no other dimension."""
        if context.others.world_size > 1:
            self.replicas = Replicas(context.everyone, self._mean_gradients)
        self._options = GroupOptions(optimizers_of(inner), context.everyone)
        inner.state.clear()
        if isinstance(inner, Several):
            for one in self._optimizers:
                one.refuse_state_dicts()
            inner.zero_grad = self.zero_grad  # type: ignore[method-assign]
            inner.step_members = self._step_together
        self.dropped = DroppedGradients(self._optimizers, schedule)
        self.groups = ParamGroups(inner)
        self.lay_out()
        _watch_optimizers()
        _TAKEN.add(self)

    @property
    def overflow(self) -> bool:
        """Whether the last norm overflowed (see the class). The read may wait for a norm that an accelerator is still computing."""
        self._norm = float(self._norm)
        return not math.isfinite(self._norm)

    @overflow.setter
    def overflow(self, overflow: bool) -> None:
        self._norm = math.inf if overflow else 0.0

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Inside the block, make `step` run only the update: the caller is the driver, which does the rest."""
        self._is_driven = True
        self.begun = object()
        try:
            yield
        finally:
            self._is_driven = False

    def refuse_inside(self) -> None:
        """Raise if model states belong to two steps: inside a step or its driver, or after a step that was aborted."""
        if self._is_driven or self.schedule.is_stepping:
            raise UsageError(
                "a save inside optimizer.step(), or after one that an exception aborted, would hold parameters of two steps: have "
                "the signal's handler, or the thread, set a flag, and save after the step. After an aborted step, load a "
                "checkpoint with sharded.load, or make and shard a new model."
            )

    def lay_out(self) -> None:
        """Find the shards of the schedule's units that this rank updates. Existing views keep their tensors."""
        before = {id(resident.shard): resident for resident in self.residents}
        if before:
            self.sub_groups.settle()  # no view shows a frame of the sub-groups that are replaced
        trainable = [unit for unit in self.schedule.units if unit.trainable]
        self._flags = [(unit, index) for unit in trainable for index in range(len(unit.named))]
        flag_of = {flag: number for number, flag in enumerate(self._flags)}
        self.residents = []
        self.views = []
        self.parts_of: dict[int, list[tuple[Resident, ShardView]]] = {
            parameter: [] for parameters in self.groups.ids for parameter in parameters
        }
        """This rank's parts of each parameter that the optimizer lists, by the parameter's `id`."""
        for unit in trainable:
            for shard in chain.from_iterable(bucket.shards for bucket in unit.gradients):
                resident = before.get(id(shard))
                views = []
                for number, piece in enumerate(shard.pieces):  # a shard's padding is zero and has no view
                    named = unit.named[piece.index]
                    if resident is not None:
                        value = resident.views[number].value
                    else:
                        shape = named.shape if self._context.whole_parameters else (piece.numel,)
                        value = torch.empty((), dtype=shard.master.dtype, device=shard.step.device).expand(shape)
                    flag = flag_of[unit, piece.index]
                    views.append(ShardView(shard, named, flag, value, piece.start, piece.numel, piece.parameter_start))
                if resident is None:
                    slots = (shard.master, shard.gradient)
                    is_here = shard.home is shard.step and all(slot.memory_in(shard.step) is not None for slot in slots)
                    resident = Travelling(shard, unit, views, self.inner, self._context.precision)
                    if is_here and not resident.keeps_slots:
                        resident = Resident(shard, unit, views, self.inner)
                resident.views = views
                self.residents.append(resident)
                self.views += views
                for view in views:
                    self.parts_of.setdefault(id(view.named.parameter), []).append((resident, view))
        self._numbered = Numbered(self._flags, self.residents)
        self._context.live.step.operations = None
        self.groups.shards = [
            [view.value for parameter in parameters for _, view in self.parts_of[parameter]]
            for parameters in self.groups.ids
        ]
        alive = {view.value for view in self.views}
        for value in [value for value in self.inner.state if value not in alive]:
            del self.inner.state[value]
        policy = self._context.policy
        self.sub_groups: SubGroups = SubGroups(self.residents, policy)
        if any(isinstance(resident, Travelling) for resident in self.residents):
            self.sub_groups = SubGroupsInFrames(self.residents, policy, states_per_parameter(self.inner))
        self.make_first_states()

    def make_first_states(self) -> None:
        """Give each view that has no states the initial states of its optimizer, if there are any."""
        first_of = {
            parameter: one.first_state for one in self._optimizers if one.first_state for parameter in one.parameters
        }
        for resident in self.residents:
            new = [view for view in resident.views if not self.inner.state.get(view.value)]
            new = [view for view in new if id(view.named.parameter) in first_of]
            if not new:
                continue
            with self.sub_groups.opened(resident, write=True):
                for view in new:
                    first = first_of[id(view.named.parameter)]
                    self.inner.state[view.value] = {
                        name: value.clone() if name == "step" else torch.full_like(view.value, value.item())
                        for name, value in first.items()
                    }

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `step(closure)` of the user's optimizer, or of the combination of several. Every rank must call it."""
        if len(self._optimizers) == 1:
            return self._optimizers[0].step(closure)
        return self.inner.step() if closure is None else self.inner.step(closure)

    def _step_together(self) -> Any:
        """Step all of the user's optimizers with one update of the shards, so that values travel once."""
        if self.driver is not None and not self._is_driven:
            return self.driver()
        if not all(one.is_known for one in self._optimizers):  # the own step of each runs outside of ours
            return [one.step(None) for one in self._optimizers][-1]
        self._together = self._optimizers
        try:
            return self._optimizers[0].step(None)
        finally:
            self._together = ()

    def _step_of(self, users: UsersOptimizer, closure: Callable[[], Any] | None) -> Any:
        """Update the parameters of one of the user's optimizers with the mean gradients.

        If all step together, the step of each calls that of the next, so all hooks before a step run before the update.

        Args:
            closure: runs forward and backward; called once, before the update. Its value is returned.
        """
        if self._together and users is not self._together[-1]:
            return self._together[self._together.index(users) + 1].step(None)
        evaluated: list[Any] = []  # one value if there is a closure; the value itself may be None
        if closure is not None:
            with torch.enable_grad():
                evaluated.append(closure())
        if in_backward():
            raise UsageError(
                "optimizer.step() was called inside a backward, as in a gradient hook: other gradients are missing, "
                "and are reduced when the backward ends. Step after the backward."
            )
        self._context.live.trainer = threading.get_ident()
        self.abandon_own_step()
        self.schedule.refuse_aborted_step()
        if self.driver is not None and not self._is_driven:
            if not users.is_known:
                raise UsageError(
                    f"{type(users.optimizer).__name__}.step() is not torch's, and runs only once in a step: call engine.step()."
                )
            report = self.driver()
            return evaluated[0] if evaluated else report
        self.groups.refuse_changes()
        has_looked = self._agree_on_used()
        self.begun = object()
        with labelled("update of the shards"):
            self._update(self._together or (users,), evaluated, has_looked=has_looked)
        return evaluated[0] if evaluated else None

    def _update(self, stepping: Sequence[UsersOptimizer], evaluated: Sequence[Any], *, has_looked: bool) -> None:
        """Update the parameters of these optimizers, one sub-group after the other."""
        self.schedule.begin_step(has_looked=has_looked)
        if not stepping[0].is_known:
            self._own_step = self._updates(self._updated_by(stepping), at_once=True)
            next(self._own_step, None)
            self.groups.enter_shards()
            return
        updates = self._updates(self._updated_by(stepping), at_once=False)
        with closing(updates):  # at once, if the optimizer's code raises
            for _ in updates:
                for one in stepping:
                    self.step_inner(one.optimizer, *evaluated)
        self._end_step()

    def _updates(self, steps: Sequence[bool], *, at_once: bool) -> Generator[None]:
        """Yield for each sub-group, or once for all shards, while the optimizer's tensors have their values and gradients."""
        left = Counter(resident.unit for resident in self.residents)
        updated: dict[Unit, list[int]] | None = None  # all parameters of all units
        if not all(steps):
            updated = {}
            for (unit, index), does in zip(self._flags, steps, strict=True):
                updated.setdefault(unit, []).extend([index] if does else [])
        # In the order of registration, since the order of the forward may differ between ranks.
        waiting = deque(unit for unit in self.schedule.units if unit.trainable)

        def sync(residents: Sequence[Resident]) -> None:
            # Each unit has its turn, however this rank cuts its sub-groups.
            left.subtract(resident.unit for resident in residents)
            while waiting and not left[waiting[0]]:
                unit = waiting.popleft()
                unit.writes.outdate_graphs(None if updated is None else updated[unit])
                self.schedule.sync_parameters(unit)

        casts = Casts()
        for residents in self.sub_groups.run(sync, at_once=at_once):
            try:
                for resident in residents:
                    self._lend_gradients(resident, steps, casts)
                yield
            finally:
                for resident in residents:
                    for view in resident.views:
                        view.value.grad = None
                casts.take_back()

    def _end_step(self) -> None:
        self.schedule.end_step()
        if not any(self._used):  # a step before the first backward has no gradients to drop
            self.zero_grad()

    def _end_own_step(self) -> None:
        """End the step whose update has waited for an unknown optimizer's own step."""
        updates, self._own_step = self._own_step, None
        if updates is not None:
            self.groups.leave_shards()
            next(updates, None)
            self._end_step()

    def abandon_own_step(self) -> None:
        """Take the shards out of the param groups if an unknown optimizer's own step has raised: the step stays aborted."""
        updates, self._own_step = self._own_step, None
        if updates is not None:
            self.groups.leave_shards()
            updates.close()

    def _updated_by(self, stepping: Sequence[UsersOptimizer]) -> Sequence[bool]:
        """Return, for each flag, whether one of these updates the parameter: a rank used it, and no `zero_grad` dropped it."""
        if len(self._optimizers) == 1:
            return self._used
        listed = set[int]().union(*(one.parameters for one in stepping))
        parameters = [id(unit.named[index].parameter) for unit, index in self._flags]
        return [
            used and parameter in listed and parameter not in self.dropped
            for parameter, used in zip(parameters, self._used, strict=True)
        ]

    def step_inner(self, optimizer: torch.optim.Optimizer, *evaluated: Any) -> None:
        """Call the step of an optimizer's class once, with the gradients that its tensors have.

        Args:
            evaluated: the value of the closure, if there was one: its evaluation is over.
        """
        self.groups.enter_shards()
        try:
            if evaluated:
                step_without_hooks(optimizer, once(evaluated[0], optimizer))
            else:
                step_without_hooks(optimizer)
        finally:
            self.groups.leave_shards()

    def before_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Move our hooks to their places, if the optimizer that is about to step is one of this model's.

        Raises:
            UsageError: it is another optimizer, and would update parameters of this model.
        """
        for one in self._optimizers:
            if one.optimizer is optimizer:
                one.keep_places()
                return
        ours = {id(one.optimizer) for one in self._optimizers}
        ours |= {id(group) for one in self._optimizers for group in one.optimizer.param_groups}
        if any(id(one) in ours for one in (*vars(optimizer).values(), *optimizer.param_groups)):
            return  # it wraps one of them, whose step it calls
        names = self.schedule.fqns
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if id(parameter) in names and parameter.grad is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() updates {names[id(parameter)]}, but zeroshard was not given "
                    "this optimizer. Pass all of them: shard(model, [one, other], policy). To replace one, call "
                    "sharded.remove() and shard again."
                )

    def release_inner(self) -> None:
        """Detach from the user's optimizers, when zeroshard is removed from the model."""
        _TAKEN.discard(self)
        for one in self._optimizers:
            one.remove()
        if self.replicas is not None:
            self.replicas.release()
        self.abandon_own_step()

    def _lend_gradients(self, resident: Resident, steps: Sequence[bool], casts: Casts) -> None:
        parts = resident.gradient_parts
        if parts is None:
            assert resident.gradient is not None
            flat = self.gradients.lent(resident.shard, resident.gradient, casts)
            parts = [view.part_of(flat) for view in resident.views]
        for view, part in zip(resident.views, parts, strict=True):
            if steps[view.flag]:
                view.value.grad = part.detach()  # a new tensor: `FlatBuffer.free` detects other code that keeps it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients and free the memory of those at rest where that is possible."""
        warn_of_zeros(set_to_none)
        self.schedule.forget_gradients()
        if not self.schedule.live.parked:
            self.sub_groups.prefetch()

    def _zero_grad_of(self, optimizer: UsersOptimizer) -> None:
        if self.dropped.add(optimizer):
            # Gradients that the user set after the `zero_grad` of their optimizer stay.
            others = chain.from_iterable(other.listed() for other in self._optimizers if other is not optimizer)
            given = [(parameter, grad_of(parameter)) for parameter in others]
            self.zero_grad()
            for parameter, gradient in given:
                if gradient is not None:
                    parameter.grad = gradient

    def _drop_if_all_are_none(self) -> None:
        """Drop the gradients if every `grad` that was taken is now None, as after the user's `model.zero_grad()`."""
        for unit in reversed(self.schedule.units):  # the last unit's are dropped last, so one look is usually enough
            if unit.dropped_gradients() != unit.used:
                return
        self.zero_grad()

    # ------------------------------------------------------------------ the norm

    @property
    def gradients(self) -> MeanGradients:
        """The mean gradients in this rank's shards, with the user's operations on `parameter.grad` applied."""
        if self._taken is not None:
            self._taken.apply_factors()
        return self._mean_gradients

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> float | Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm` and return the unclipped norm.

        See `Sharded.clip_grad_norm_`.
        """
        norm = self._norm = self._exchange(norm=True) / loss_scale
        if max_norm is not None or loss_scale != 1.0:
            coefficient = coefficient_of(norm, max_norm, loss_scale)
            self.gradients.scale([resident.shard for resident in self.residents], coefficient)
            self.forget_norms()
        return norm

    def forget_norms(self) -> None:
        """Forget the norms that torch's clipping has asked for, since gradients were changed. Every rank must call it."""
        if self._taken is not None:
            self._taken.forget_norms()

    def _operate(self, flag: tuple[Unit, int], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on a parameter's `grad` (see `GradientOperations.operate`)."""
        self.dropped.refuse(f"{name} of a gradient")
        unit, index = flag
        if self.loss_scale != 1.0:
            raise UsageError(
                f"{name} got the gradient of {unit.named[index].fqn}, which carries the loss scale {self.loss_scale:g} "
                "until the step. To clip under fp16, set gradient_clipping in the config."
            )
        if unit.is_summed_here(index):
            raise UsageError(
                f"{name} got the gradient of {unit.named[index].fqn}, this rank's sum over microbatches, in another "
                "dtype or in several parts, and not reduced yet: change gradients after the last backward of a step."
            )
        return self._operations().operate(flag, name, args, kwargs)

    @property
    def _used(self) -> tuple[bool, ...]:
        """Whether any rank used each parameter, as ranks have agreed in this step."""
        agreement = self._context.live.step.agreement
        return agreement.used if agreement is not None else (False,) * len(self._flags)

    @property
    def _taken(self) -> GradientOperations | None:
        """The operations on gradients in this step, if there was one."""
        taken: GradientOperations | None = self._context.live.step.operations
        return taken

    def _operations(self) -> GradientOperations:
        if self._taken is None:
            self._context.live.step.operations = GradientOperations(
                self.schedule, self._context, self._mean_gradients, self.dropped, self._numbered
            )
        assert self._taken is not None
        return self._taken

    def _before_later_gradients(self) -> None:
        """Apply factors to the mean before another microbatch is added, so that they do not multiply its gradients."""
        if self._mean_gradients.factors or (self._taken is not None and self._taken.factors):
            self.schedule.reductions.land()
            self.gradients.apply_factors(resident.shard for resident in self.residents)

    def not_finite(self) -> tuple[str, ...]:
        """Return the fqns of parameters whose gradient has an infinite or NaN element. Every rank must call it."""
        self.schedule.finish_gradients()
        own = bytearray(len(self._flags))
        looks: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for resident in self.residents:
            with self.gradients.opened(resident.shard) as gradient:
                for view in resident.views:
                    part = gradient[view.start : view.start + view.numel]
                    looks.setdefault(part.device, []).append((view.flag, torch.isfinite(part).all()))
        for found in looks.values():  # one wait for each device
            answers = torch.stack([answer for _, answer in found]).tolist()
            for (flag, _), is_finite in zip(found, answers, strict=True):
                own[flag] |= not is_finite
        anywhere = self._context.everyone.agree(bytes(own), "the flags of gradients that are not finite").some
        return tuple(unit.named[i].fqn for (unit, i), found in zip(self._flags, anywhere, strict=True) if found)

    def used(self) -> dict[str, bool]:
        """Return, by fqn, whether any rank used the parameter in this step, and no `zero_grad` has dropped its gradient.

        Every rank must call it, after the last backward.
        """
        self._agree_on_used()
        return {
            unit.named[index].fqn: used and id(unit.named[index].parameter) not in self.dropped
            for (unit, index), used in zip(self._flags, self._used, strict=True)
        }

    def _agree_on_used(self) -> bool:
        """Exchange which ranks used which parameters, if their answers may have changed since the last exchange.

        Return whether it did so, and thus has looked for writes of the user.
        """
        is_changed = self._taken is not None and self._taken.changed
        agreement = self._context.live.step.agreement
        is_known = agreement is not None and not is_changed
        if agreement is not None and not is_changed:
            late = self._drops - self._context.live.step.dropped
            # A rank that did not use the parameter shows no `grad` that could be set: it would not take part in another exchange.
            for number in sorted(late):
                if not agreement.by_all[number] & USED:
                    unit, index = self._flags[number]
                    raise UsageError(
                        f"{unit.named[index].fqn}.grad was set to None, but a rank did not use the parameter, and cannot follow. "
                        "Set it only for parameters that every rank used."
                    )
            is_known = not late
        exchanges = bool(self.schedule.gradients_of_users()) or not is_known
        if exchanges:
            self._exchange(norm=False)
        if self._taken is not None and self._taken.factors:
            self._taken.apply_factors({number for number, used in enumerate(self._used) if used})
        self.dropped.refuse_later_backward()  # after `grad`s that the user set were taken: they count as a backward
        return exchanges

    @property
    def _drops(self) -> set[int]:
        """The numbers of the parameters whose gradients the user has set to None on this rank after a backward."""
        drops = {unit: unit.dropped_gradients() for unit in self.schedule.units if unit.replaced_gradients}
        if not drops:
            return set()
        return {number for number, (unit, index) in enumerate(self._flags) if index in drops.get(unit, ())}

    def is_dropped(self, view: ShardView) -> bool:
        """Return whether `zero_grad` has dropped the gradient, or the user has set it to None."""
        return id(view.named.parameter) in self.dropped or view.flag in self._context.live.step.dropped

    def _drop(self, numbers: set[int]) -> None:
        """Set these parameters' mean gradients to zero, so that no norm counts them."""
        step = self._context.live.step
        new = numbers - step.dropped
        step.dropped = numbers
        if new:
            for resident in self.residents:
                self._mean_gradients.drop(resident.shard, [view for view in resident.views if view.flag in new])

    def _refuse_different_drops(self, messages: Sequence[bytes]) -> None:
        """Raise if some ranks have dropped a gradient that others have not, perhaps since they did not use the parameter.

        Args:
            messages: one per rank, in rank order, with the flags of each parameter; one for all if they are equal.
        """
        for (unit, index), flags in zip(self._flags, zip(*messages, strict=True), strict=True):
            ranks = [rank for rank, flag in enumerate(flags) if flag & DROPPED]
            if ranks and len(ranks) < len(flags):
                raise UsageError(
                    f"{unit.named[index].fqn}.grad was set to None on ranks {ranks} only: the other ranks did not do so, or "
                    "did not use the parameter. Set it on every rank, or on none."
                )

    def park(self, *, states: bool) -> None:
        """Detach the tensors that the optimizer updates and, with `states`, those that it keeps, whose memory will be parked."""
        for resident in self.residents:
            resident.look_at(None)
        kept = [value for state in self.inner.state.values() for value in state.values()] if states else []
        self._parked = [(value, value.data) for value in kept if isinstance(value, Tensor) and value.ndim]
        for value, _ in self._parked:
            value.data = placeholder(value)

    def unpark(self) -> None:
        """Attach the parked states again."""
        for resident in self.residents:
            resident.unpark()
        for value, memory in self._parked:
            value.data = memory
        self._parked = []

    def kept_in(self, storage: Storage) -> list[Tensor]:
        """List the tensors that the optimizer keeps in the memory of `storage`, except slots, which CPU memory counts itself."""
        kept: list[Tensor | None] = []
        for one in self.residents:
            if one.shard.step is storage and one.shard.home is storage:
                slots = one.slots if isinstance(one, Travelling) else {}
                states = [self.inner.state.get(view.value, {}) for view in one.views]
                kept += [value for state in states for name, value in state.items() if name not in slots]
                if storage is self._context.storages.accelerator:
                    kept += [slot.memory_in(storage) for slot in slots.values()]
        return [value for value in kept if isinstance(value, Tensor)]

    def _exchange(self, norm: bool) -> float | Tensor:
        """Exchange, in one small message, which parameters ranks used or wrote, and with `norm` the norm. Return the norm."""
        if norm:
            self.dropped.refuse("a gradient norm")
        self.schedule.finish_gradients()
        self._context.live.step.agreement = None  # until ranks agree: a call after one that raised asks again
        drops = self._drops
        self._drop(drops)
        own: Tensor | None = None
        if norm:
            counted = [one.shard for one in self.residents if one.shard.number == one.unit.counted_shard]
            own = self.gradients.sum_of_squares(counted)
        own_flags = self._own_flags(drops)
        digest = self._options.digest()
        what = "the gradient norm and the flags of used parameters"
        everyone = self._context.everyone
        with labelled(f"exchange of {what}"):
            if self.replicas is not None:
                digest += bytes([self.replicas.differ(self.residents, self._context.others)])
            total, agreed = everyone.sum_values(own, digest + own_flags, what)
        cut = len(digest)
        if agreed.some[:DIGEST_NBYTES] != agreed.every[:DIGEST_NBYTES]:
            self._options.refuse_different()
        if self.replicas is not None and agreed.some[DIGEST_NBYTES]:
            self.replicas.refuse_different()
        flags = agreed.some[cut:]
        by_all = flags if agreed.are_equal else agreed.every[cut:]
        most = max(flags, default=0)
        if most >= CHANGED:  # or DROPPED
            messages = [flags]
            if any(flags.translate(_ONLY[flag]) != by_all.translate(_ONLY[flag]) for flag in (CHANGED, DROPPED)):
                messages = everyone.exchange(own_flags, what)  # for the names of ranks
            if _has(flags, CHANGED):
                self._operations().agree([message.translate(_ONLY[CHANGED]) for message in messages])
            if _has(flags, DROPPED):
                self._refuse_different_drops(messages)
        if flags != self._used_of[0]:
            self._used_of = flags, tuple(map(bool, flags.translate(_ONLY[USED])))
        if most >= WRITTEN:
            written = (unit for (unit, _), flag in zip(self._flags, flags, strict=True) if flag & WRITTEN)
            for unit in dict.fromkeys(written):
                unit.come_for_changes()
                unit.writes.spread()
        self._context.live.step.agreement = Agreement(self._used_of[1], by_all)
        return norm_of(total) if norm else 0.0

    def _own_flags(self, drops: set[int]) -> bytes:
        """Return this rank's flags of each parameter. This is the step's look for writes of the user."""
        units = [unit for unit in self.schedule.units if unit.trainable]
        refuse = partial(refuse_kept_data, self.schedule.units, "optimizer.step()")
        written = {unit: indices for unit in units if (indices := unit.written(refuse))}
        changed = set[int]() if self._taken is None else self._taken.changed
        if not (written or drops):
            used = b"".join([unit.used_flags for unit in units])
            if not changed:
                return used
            if len(changed) == used.count(USED) and all(
                used[number] for number in changed
            ):  # torch's clipping changes all
                return used.replace(bytes([USED]), bytes([USED | CHANGED]))
        return bytes(
            USED * (index in unit.used and number not in drops)
            | WRITTEN * (index in written.get(unit, ()))
            | CHANGED * (number in changed)
            | DROPPED * (number in drops)
            for number, (unit, index) in enumerate(self._flags)
        )

    def list_group(self, param_group: dict[str, Any]) -> None:
        """Register another param group of the user's parameters. Those that are frozen get views when they are trained."""
        self.groups.add(param_group)
        self._optimizers[0].parameters |= set(self.groups.ids[-1])
        self.lay_out()


_ONLY = {flag: bytes(byte & flag for byte in range(256)) for flag in (USED, WRITTEN, CHANGED, DROPPED)}
"""Tables for `bytes.translate` that clear all other flags."""


def _has(flags: bytes, flag: int) -> bool:
    """Return whether the flag of any parameter is set."""
    return any(flags.translate(_ONLY[flag]))


_TAKEN = weakref.WeakSet[ShardedStep]()
"""The steps of all sharded models, which `_before_any_step` notifies. torch's hook on all optimizers stays: if the garbage
collector removed it in the middle of a step, that step would raise an error."""


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_any_step))


def _before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Notify every sharded model before an optimizer steps. torch calls this before the optimizer's own hooks."""
    for step in [*_TAKEN]:
        step.before_step_of(optimizer)
