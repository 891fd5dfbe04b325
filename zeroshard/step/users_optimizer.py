"""Owns the optimizers that the user made, whose steps are the sharded ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from zeroshard.errors import UsageError
from zeroshard.parameters.appearance import forget_grad
from zeroshard.schedule.schedule import Schedule, StepState
from zeroshard.torch_private import make_innermost


class UsersOptimizer:
    """An optimizer that the user made, whose `step()` runs the sharded step.

    That runs before the optimizer's own, which then finds its param groups empty, and afterwards they are what they were. The
    user's hooks and schedulers work unchanged. After zeroshard was removed, `step()` is refused.

    Args:
        step: runs the sharded step of this optimizer's parameters; it is called with this object, and a closure or None.
        zero_grad: drops the gradients of this optimizer's parameters; it is called with this object.
        gradients: counts the gradients that came until now.

    Attributes:
        first_state: what the optimizer keeps of a parameter before its first step: nothing, or, as Adagrad, some constants.
        parameters: `id`s of those that it steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[UsersOptimizer, Callable[[], Any] | None], Any],
        zero_grad: Callable[[UsersOptimizer], None],
        gradients: Callable[[], int],
    ) -> None:
        self.optimizer = optimizer
        self.first_state = dict(next(iter(optimizer.state.values()), {}))
        self.parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._step = step
        self._zero_grad = zero_grad
        self._gradients = gradients
        self._groups: list[dict[str, Any]] = []
        """The groups' parameters before the optimizer's own step."""
        self._depth = 0
        """The depth of nested calls of the optimizer's own step: a class may call the step of the class that it extends."""
        self._stepped_at = -1
        self._is_inside = False
        self.is_removed = False
        self._before = optimizer.register_step_pre_hook(self._before_step)
        self._after = optimizer.register_step_post_hook(self._after_step)
        # As torch's schedulers put a `step` on the object. A backward that broke off leaves no `grad` that would tell of it.
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
        if self._depth and self._stepped_at == self._gradients():
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
        self._stepped_at = self._gradients()
        self._groups = [dict(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for group, before in zip(optimizer.param_groups, self._groups, strict=False):
            group.update(before)  # what it keeps of a group counts one step
        self._groups = []


class StatesOfAnotherRank(MutableMapping[str, Any]):
    """The states, always empty, of a parameter of which this rank has no part."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        raise UsageError(
            f"{name!r} was set in the states of a parameter that another rank updates: it would be lost. Write where the states "
            "are, or call sharded.states.set on every rank."
        )


class ShardStates(defaultdict[Any, dict[str, Any]]):
    """The states of this rank's shards, instead of an optimizer's `state`.

    Args:
        find: gives the states of a parameter of the model, by its `id`; None where the model has no such parameter.
    """

    def __init__(self, states: Mapping[Any, dict[str, Any]], find: Callable[[int], Mapping[str, Any] | None]) -> None:
        super().__init__(dict, states)
        self._find = find

    def __missing__(self, key: Any) -> Any:
        found = self._find(id(key))
        return super().__missing__(key) if found is None else found

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        try:
            return bool(self._find(id(key)))
        except UsageError:  # they are not to be had in this way, if there are any
            return len(self) > 0

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the states of a parameter as `state[parameter]` does, or the default if it has none."""
        if key not in self:
            return default
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._find(id(key)) is not None:
            raise UsageError(
                "optimizer.state[parameter] = ... would replace the states of this rank's shards: write into the tensors of "
                "optimizer.state[parameter], or call sharded.states.set on every rank."
            )
        super().__setitem__(key, value)

    def copy(self) -> Any:
        """Return an ordinary dict of the same states."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


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
        self._is_late = False
        """When the last of them was recorded, a backward had broken off, or had come after a step."""

    def add(self, optimizer: UsersOptimizer) -> bool:
        """Record a `zero_grad()`. Return whether the gradients are no longer needed."""
        self.refuse_later_backward()
        # What broke off shows as a backward until the next one begins.
        is_late = self._schedule.state in (StepState.BACKWARD, StepState.BROKEN, StepState.UNWANTED)
        if is_late and not self._is_late:
            self._dropped = []  # that backward has given them gradients since, to be dropped, too
        self._is_late = is_late
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
