"""Owns the optimizers that the user made: their steps, which are the sharded ones, and their param groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.optim.several import Several
from zeroshard.schedule.schedule import Schedule, StepState
from zeroshard.torch_private import forget_grad, make_innermost


def _constants(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the first states that the optimizer has for a parameter with elements: `step`, and one element of each other."""
    found = dict(next((states for parameter, states in optimizer.state.items() if parameter.numel()), {}))
    for name in found.keys() - {"step"}:
        found[name] = found[name].flatten()[:1].clone()
    return found


class UsersOptimizer:
    """An optimizer that the user made, whose `step()` runs the sharded step.

    That runs before the optimizer's own step, which then finds its param groups empty. Afterwards they are restored.
    The user's hooks and schedulers work unchanged. After zeroshard was removed, `step()` is refused.

    Args:
        step: runs the sharded step of this optimizer's parameters; it is called with this object, and a closure or None.
        zero_grad: drops the gradients of this optimizer's parameters; it is called with this object.
        schedule: counts the gradients that came until now.

    Attributes:
        first_state: the optimizer's state of a parameter before its first step: nothing, or, for Adagrad, some
            constants.
        parameters: `id`s of those that it steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[UsersOptimizer, Callable[[], Any] | None], Any],
        zero_grad: Callable[[UsersOptimizer], None],
        schedule: Schedule,
    ) -> None:
        self.optimizer = optimizer
        self.first_state = _constants(optimizer)
        self.parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._step = step
        self._zero_grad = zero_grad
        self._schedule = schedule
        self._groups: list[dict[str, Any]] = []
        """The groups' parameters before the optimizer's own step."""
        self._depth = 0
        """The depth of nested calls of the optimizer's own step: a class may call the step of the class that it extends."""
        self._stepped_at = -1
        self._is_inside = False
        self.is_removed = False
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)
        # As torch's schedulers put a `step` on the object. A backward that broke off leaves no `grad` that would show
        # it.
        optimizer.zero_grad = self._drop_gradients  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Call the user's `step()`. If the user's hooks already run around this call, run only the sharded step."""
        if self._is_inside:
            return self._step(self, closure)
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def remove(self) -> None:
        """Remove zeroshard's methods from the optimizer, and refuse its later steps."""
        self.is_removed = True
        for name in ("zero_grad", "add_param_group"):
            vars(self.optimizer).pop(name, None)

    def refuse_state_dicts(self) -> None:
        """Refuse state dicts of only this optimizer, whose states share shards with those of the model's other optimizers."""

        def refuse(*_: Any) -> None:
            raise UsageError(
                f"the states of {type(self.optimizer).__name__} lie beside those of the model's other optimizers: call "
                "sharded.optimizer.state_dict() and load_state_dict(), or sharded.save and load."
            )

        self.optimizer.register_state_dict_pre_hook(refuse)
        self.optimizer.register_load_state_dict_pre_hook(refuse)

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        self._zero_grad(self)

    def keep_places(self) -> None:
        """Move our hooks inside of the user's, including those registered later, before a step runs them."""
        if not self._is_inside and not self._depth:
            make_innermost(self.optimizer, self._before, self._after)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.is_removed:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called after remove(): its states are of shards that are no "
                "more. Make a new optimizer from model.parameters()."
            )
        if self._depth and self._stepped_at == self._schedule.gradients_taken:
            self._depth += 1
            return None
        unknown = [*map(repr, args[2:]), *sorted(kwargs.keys() - {"closure"})]
        if unknown:
            raise UsageError(
                f"{type(optimizer).__name__}.step() got {', '.join(unknown)}: zeroshard runs the optimizer's step over shards, "
                "and passes a closure only. Give such a value as an option of the param groups."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._is_inside = True
        try:
            loss = self._step(self, closure)
        finally:
            self._is_inside = False
        self._depth = 1
        self._stepped_at = self._schedule.gradients_taken
        self._groups = [dict(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for group, before in zip(optimizer.param_groups, self._groups, strict=False):
            group.update(before)  # its values of a whole group count one step
        self._groups = []


class ParamGroups:
    """The param groups of the user's optimizers: they hold this rank's shards while the optimizers' own code runs.

    Otherwise they hold the user's parameters.

    Args:
        inner: the user's optimizer, or several as one.
        optimizers: those that the user made.

    Attributes:
        ids: `id`s of the user's parameters, group by group.
        shards: this rank's shards of them, group by group.
    """

    def __init__(self, inner: torch.optim.Optimizer, optimizers: list[torch.optim.Optimizer]) -> None:
        self._inner = inner
        self._optimizers = optimizers
        self._users = [list(group["params"]) for group in inner.param_groups]
        self.ids = [[id(parameter) for parameter in group["params"]] for group in inner.param_groups]
        self.shards: list[list[Tensor]] = []
        self.are_on_shards = False

    @contextmanager
    def on_shards(self) -> Iterator[None]:
        """Put this rank's shards into the param groups, inside."""
        if self.are_on_shards:
            yield
            return
        self.enter_shards()
        try:
            yield
        finally:
            self.leave_shards()

    def enter_shards(self) -> None:
        """Put this rank's shards into the param groups."""
        self.are_on_shards = True
        for group, shards in zip(self._inner.param_groups, self.shards, strict=True):
            group["params"] = shards

    def leave_shards(self) -> None:
        """Put the user's parameters into the param groups, if shards are there."""
        if not self.are_on_shards:
            return
        for group, users in zip(self._inner.param_groups, self._users, strict=False):  # the user may have added others
            group["params"] = users
        self.are_on_shards = False

    def refuse_changes(self) -> None:
        """Raise if the user has put other parameters into the groups, or made others of them."""
        now = [
            [id(parameter) for parameter in group["params"]] for one in self._optimizers for group in one.param_groups
        ]
        are_same = len(now) == len(self.ids)
        if not are_same or any(own and own != taken for own, taken in zip(now, self.ids, strict=True)):
            raise UsageError(
                "the optimizer's param groups are not those that zeroshard took: to free parameters, call "
                "optimizer.add_param_group(group) on every rank."
            )

    def counting_on_device(self) -> set[int]:
        """Return the `id`s of shards whose step count torch keeps on their device: those of fused and capturable groups."""
        groups = zip(self._inner.param_groups, self.shards, strict=True)
        return {
            id(value) for group, shards in groups if group.get("fused") or group.get("capturable") for value in shards
        }

    def add(self, param_group: dict[str, Any]) -> None:
        """Add a group of the user's parameters.

        Raises:
            UsageError: the optimizer takes no more groups, or another group has one of the parameters.
        """
        if isinstance(self._inner, MuonWithAdamW | Several):
            raise UsageError(
                "an optimizer that is MuonWithAdamW, or one of several, takes its groups when it is made: list the "
                "parameters there, frozen as they are."
            )
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        known = {parameter for group in self.ids for parameter in group}
        again = sum(id(parameter) in known for parameter in parameters)
        if again:
            raise UsageError(
                f"{again} of the new param group's parameters are in a group of the optimizer already. Leave them out."
            )
        type(self._inner).add_param_group(self._inner, {**param_group, "params": parameters})
        self.ids.append([id(parameter) for parameter in parameters])
        self._users.append(self._inner.param_groups[-1]["params"])


class DroppedGradients:
    """The record of which of several optimizers had `zero_grad()` called since the gradients arrived.

    The gradients of one optimizer's parameters lie beside the others, and are given up with them. Until then they take part in
    nothing.
    """

    def __init__(self, optimizers: list[UsersOptimizer], schedule: Schedule) -> None:
        self._optimizers = optimizers
        self._schedule = schedule
        self._dropped: list[UsersOptimizer] = []
        self._dropped_at = 0
        self._arrivals = 0
        """The schedule's, when the last of them was recorded."""

    def add(self, optimizer: UsersOptimizer) -> bool:
        """Record a `zero_grad()`. Return whether the gradients are no longer needed."""
        self.refuse_later_backward()
        # A backward that broke off counts as running until the next one begins.
        is_late = self._schedule.state in (StepState.BACKWARD, StepState.BROKEN, StepState.UNWANTED)
        if is_late and self._schedule.arrivals != self._arrivals:
            self._dropped = []  # that backward has given them gradients since, to be dropped, too
        self._arrivals = self._schedule.arrivals
        if self._schedule.is_between_steps:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    forget_grad(parameter)
            # The user may have put gradients into `grad` of the others.
            return not any(unit.gradients_of_users() for unit in self._schedule.units)
        if optimizer not in self._dropped:
            self._dropped.append(optimizer)
        self._dropped_at = self._schedule.backwards_ended
        return len(self._dropped) == len(self._optimizers)

    def reset(self) -> None:
        """Forget which optimizers have dropped their gradients."""
        self._dropped = []

    def __contains__(self, parameter: int) -> bool:
        """Return whether a parameter's gradient was dropped, by the parameter's `id`."""
        return any(parameter in optimizer.parameters for optimizer in self._dropped)

    def refuse_later_backward(self) -> None:
        """Raise if a backward ran between the `zero_grad()` of one optimizer and that of another."""
        if self._dropped and self._schedule.backwards_ended != self._dropped_at:
            raise UsageError(
                "gradients came after zero_grad() of one of the model's optimizers, and before that of another: they lie "
                "together. Call zero_grad() of all of them before a backward, or shard the parts as models of their own."
            )

    def refuse(self, what: str) -> None:
        """Raise if `what`, which uses the gradients of all parameters, would use dropped ones."""
        self.refuse_later_backward()
        if self._dropped:
            raise UsageError(f"{what} after zero_grad() of one of the model's optimizers. Call it before.")


class NoOptimizer(torch.optim.Optimizer):
    """A stand-in for the optimizer of a model that is only evaluated."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Raise, since there is nothing to update."""
        raise UsageError(
            "this model was sharded without an optimizer, for evaluation only. Pass shard() an optimizer to train."
        )
