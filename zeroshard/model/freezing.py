"""Owns changes to the set of trained parameters: frozen parameters lose their states, and unfrozen ones begin with new states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from zeroshard.core.context import Context
from zeroshard.core.hooks import Hooks
from zeroshard.core.model_states import PARAMETERS, ModelStates
from zeroshard.core.named_parameter import NamedParameter
from zeroshard.core.schedule import Schedule
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.step import StepState
from zeroshard.core.unit import Unit, make_units
from zeroshard.errors import UsageError
from zeroshard.model.unsharded import register
from zeroshard.optim.several import optimizers_of, tensors_of


class Freezing:
    """The changes to the set of one model's trained parameters."""

    def __init__(self, schedule: Schedule, hooks: Hooks, context: Context, step: ShardedStep) -> None:
        self._schedule = schedule
        self._hooks = hooks
        self._context = context
        self._step = step
        self._frozen = self._frozen_names()
        """The parameters that required no gradient after the last update."""
        for optimizer in optimizers_of(step.inner):
            optimizer.add_param_group = self.update  # type: ignore[method-assign, assignment]

    def update(self, param_group: dict[str, Any] | None) -> None:
        """Update the states of parameters whose `requires_grad` has changed; see `Sharded.update_trainable`."""
        with self._context.collectives.operation("update_trainable"):
            self._schedule.refuse_parked("update_trainable()")
            self._schedule.refuse_pinned("update_trainable()")
            if self._schedule.state is StepState.STEPPED:
                self._step.zero_grad()  # for loops that drop gradients before a backward, not after the step
            if self._schedule.state is not StepState.CLEAN:
                raise UsageError(
                    "parameters were frozen or unfrozen between a backward and its step: their gradients would be lost. End "
                    "the step first, or call zero_grad()."
                )
            listed = {one for group in self._step.groups.ids for one in group}
            if param_group is not None:
                given = param_group["params"]
                param_group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
                added = {id(parameter) for parameter in tensors_of(param_group["params"])}
                strangers = len(added - self._schedule.fqns.keys())
                if strangers:
                    raise UsageError(
                        f"{strangers} of the new param group's parameters are not in the model that was sharded. Pass "
                        "parameters of that model; for new ones, call remove() and shard again."
                    )
                listed |= added
            freed = self._freed(listed)
            if param_group is not None:
                self._step.list_group(param_group)
            self._schedule.optimized = listed
            for entry in freed:
                entry.parameter.grad = None  # no step uses the gradient of a parameter outside the optimizer
            self._frozen = self._frozen_names()
            for unit in list(self._schedule.units):
                now = {id(entry.parameter) for entry in unit.named if entry.parameter.requires_grad} & listed
                trained = [entry for entry in unit.named if id(entry.parameter) in now]
                untrained = [entry for entry in unit.named if id(entry.parameter) not in now]
                if unit.trainable:
                    for entry in untrained:
                        entry.parameter.grad = None
                if (unit.trainable and untrained) or (not unit.trainable and trained):
                    self._split(unit, trained, untrained)
            self._hooks.remove()
            self._hooks.attach()
            register(self._schedule.units, self._hooks, self._step)

    def _frozen_names(self) -> set[str]:
        entries = (entry for unit in self._schedule.units for entry in unit.named)
        return {entry.fqn for entry in entries if not entry.parameter.requires_grad}

    @property
    def _states(self) -> ModelStates:
        return ModelStates(self._schedule.units, self._step, self._context.collectives)

    def _freed(self, listed: set[int]) -> list[NamedParameter]:
        """Return the frozen parameters that will train from now on. Raise for an unfrozen one whose `id` is not `listed`."""
        freed = []
        for unit in self._schedule.units:
            for entry in unit.named:
                if unit.trainable or not entry.parameter.requires_grad:
                    continue
                if id(entry.parameter) in listed:
                    if unit.group.is_of_own_class or unit.group.is_quantised:
                        raise UsageError(
                            f"{entry.fqn} is of the class {type(entry.parameter).__name__}, and zeroshard trains only ordinary "
                            "parameters. Keep it frozen, or use nn.Parameter."
                        )
                    freed.append(entry)
                elif entry.fqn in self._frozen:
                    raise UsageError(
                        f"{entry.fqn} was unfrozen, but is in no param group of the optimizer. Pass update_trainable a "
                        "param_group with it."
                    )
        return freed

    def _split(self, unit: Unit, trained: list[NamedParameter], untrained: list[NamedParameter]) -> None:
        """Move the parameters of a unit to new units, with master weights and optimizer states."""
        states = self._states
        names = [PARAMETERS, *states.optimizer_names()]
        kept = {entry.fqn: {name: states.whole(entry.fqn, name) for name in names} for entry in unit.named}
        unit.release()
        dtype = unit.named[0].parameter.dtype
        groups = []
        for named, trainable in ((trained, True), (untrained, False)):
            if named:
                groups.append(replace(unit.group, named=tuple(named), trainable=trainable, dtype=dtype))
        first = 1 + max((bucket.number for other in self._schedule.units for bucket in other.buckets), default=-1)
        # `shard` has already decided the place of the unit's optimizer states.
        decided = replace(unit.policy, offload_optimizer=replace(unit.policy.offload_optimizer, ratio=1.0))
        self._schedule.replace(unit, make_units(groups, replace(self._context, policy=decided), first))
        self._step.lay_out()
        states = self._states
        for fqn, values in kept.items():
            states.restore(fqn, values)
