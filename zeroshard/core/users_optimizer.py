"""Owns the optimizers that the user created: their steps, which run the sharded step, and their param groups."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from zeroshard.core.schedule import Schedule
from zeroshard.core.step import StepState
from zeroshard.core.transport.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.errors.hints import add_hint
from zeroshard.optim.several import Several, optimizers_of, tensors_of
from zeroshard.torch_private import forget_grads, grads_of, make_innermost, version_of

DIGEST_NBYTES = 8
"""Bytes of a digest in the step's small message."""


class UsersOptimizer:
    """An optimizer that the user created, whose `step()` runs the sharded step.

    The step of a known class (torch's or zeroshard's) runs for each sub-group, before the call that the user made, which then
    finds empty param groups. The step of any other class may count its calls: it runs once, in the call that the user made, and
    finds all shards in the param groups. The user's hooks and schedulers work unchanged. After zeroshard was removed, `step()`
    is refused.

    Args:
        step: runs the sharded step of this optimizer's parameters; it is called with this object, and a closure or None. For an
            unknown class it returns when the own step is to run.
        end_own_step: ends the sharded step after the own step of an unknown class.
        zero_grad: drops the gradients of this optimizer's parameters; it is called with this object.

    Attributes:
        is_known: whether its class is known.
        first_state: the optimizer's state of a parameter before its first step: nothing, or, for Adagrad, `step` and one element of
            each other state, since these are constants.
        parameters: the `id`s of the parameters that it updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[UsersOptimizer, Callable[[], Any] | None], Any],
        end_own_step: Callable[[], None],
        zero_grad: Callable[[UsersOptimizer], None],
    ) -> None:
        self.optimizer = optimizer
        self.is_known = is_known(optimizer)
        known = (states for parameter, states in optimizer.state.items() if parameter.numel())
        self.first_state: dict[str, Any] = dict(next(known, {}))
        for name in self.first_state.keys() - {"step"}:  # the same for each element
            self.first_state[name] = self.first_state[name].flatten()[:1].clone()
        self.parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._step = step
        self._end_own_step = end_own_step
        self._zero_grad = zero_grad
        self._groups: list[dict[str, Any]] = []
        """The content of a known optimizer's param groups before its own step."""
        self._is_inside = False
        self.is_removed = False
        # A compiled training step must not trace into these hooks.
        self._before = optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        self._after = optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        if not type(optimizer).zero_grad.__module__.startswith(("torch.optim.", "zeroshard.optim.")):
            warnings.warn(
                f"{type(optimizer).__name__}.zero_grad() is not called: zeroshard drops the gradients itself. Do what else it does "
                "in the optimizer's step, or in the loop.",
                stacklevel=2,
            )
        # Replace the method, as torch's schedulers replace `step`: after an aborted backward, no `grad` would show the call.
        optimizer.zero_grad = torch.compiler.disable(self._drop_gradients)  # type: ignore[method-assign]

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Call the user's `step()`. If a call is already under way, run only the sharded step."""
        if self._is_inside:
            return self._step(self, closure)
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def listed(self) -> Iterator[Tensor]:
        """Yield the tensors in the optimizer's param groups."""
        return chain.from_iterable(group["params"] for group in self.optimizer.param_groups)

    def remove(self) -> None:
        """Remove zeroshard's methods from the optimizer and refuse its later steps."""
        self.is_removed = True
        for name in ("zero_grad", "add_param_group"):
            vars(self.optimizer).pop(name, None)

    def refuse_state_dicts(self) -> None:
        """Refuse state dicts of only this optimizer: its states share shards with the states of the model's other optimizers."""

        def refuse(*_: Any) -> None:
            raise UsageError(
                f"the states of {type(self.optimizer).__name__} lie beside those of the model's other optimizers: call "
                "sharded.optimizer.state_dict() and load_state_dict(), or sharded.save and load."
            )

        self.optimizer.register_state_dict_pre_hook(refuse)
        self.optimizer.register_load_state_dict_pre_hook(refuse)

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        warn_of_zeros(set_to_none)
        self._zero_grad(self)

    def keep_places(self) -> None:
        """Move our step hooks inside the user's, even if these were registered later. Call it before a step runs its hooks."""
        if not self._is_inside and not self._is_nested():
            make_innermost(self.optimizer, self._before, self._after)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.is_removed:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called after remove(): its states are of shards that are "
                "gone. Make a new optimizer from model.parameters()."
            )
        if isinstance(optimizer, NoOptimizer):
            optimizer.refuse()
        if self._is_nested():
            return None
        self._give_back()  # if the optimizer's own code raised in the last step
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._is_inside = True
        try:
            loss = self._step(self, closure)
        except Exception as error:
            add_hint(error)
            raise
        finally:
            self._is_inside = False
        if self.is_known:
            self._groups = [dict(group) for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = []
        if closure is None:
            return None
        evaluated = once(loss, optimizer)
        return (
            ((optimizer, evaluated, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluated})
        )

    def _is_nested(self) -> bool:
        """Return whether the optimizer's own step is running: a class may call the step of the class that it extends."""
        code = inspect.unwrap(type(self.optimizer).step).__code__  # type: ignore[attr-defined]
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is code and frame.f_locals.get(code.co_varnames[0]) is self.optimizer:
                return True
            frame = frame.f_back
        return False

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_nested():
            return
        self._give_back()
        self._end_own_step()
        refuse_other_states(optimizer)

    def _give_back(self) -> None:
        """Give a known optimizer the param groups from before its own code ran, over no parameters.

        If that code was compiled, torch has also set an option, `capturable`.
        """
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=False):
            group.update(before)
        self._groups = []


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's step is torch's or zeroshard's, and so counts nothing beside its states."""
    module: str = type(optimizer).step.__module__  # type: ignore[attr-defined]
    return module.startswith(("torch.optim.", "zeroshard.optim."))


def refuse_other_states(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer has states that do not belong to a parameter: shards and checkpoints would lack them."""
    others = [key for key in optimizer.state if not isinstance(key, Tensor)]
    if others:
        raise UsageError(
            f"{type(optimizer).__name__} keeps states of no parameter in optimizer.state ({', '.join(map(repr, others))}), which "
            "zeroshard neither shards nor saves. Keep such values in the param groups, or use another optimizer."
        )


def warn_of_zeros(set_to_none: bool) -> None:
    """Warn if `zero_grad` was asked to leave zeros. The user's frame is above the caller's frame and a torch wrapper's."""
    if not set_to_none:
        warnings.warn(
            "zero_grad(set_to_none=False) drops gradients under zeroshard, as zero_grad() does: a step leaves parameters that no "
            "backward used as they are, and momentum and weight decay do not change them.",
            stacklevel=4,
        )


class ParamGroups:
    """The param groups of the user's optimizers: they hold this rank's shards while the optimizers' own code runs.

    Otherwise they hold the user's parameters.

    Args:
        inner: the user's optimizer, or several as one.

    Attributes:
        ids: `id`s of the user's parameters, group by group.
        shards: this rank's shards of them, group by group.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._optimizers = optimizers_of(inner)
        self._users = [list(group["params"]) for group in inner.param_groups]
        self.ids = [[id(parameter) for parameter in group] for group in self._users]
        self.shards: list[list[Tensor]] = []
        self.are_on_shards = False

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
        """Raise if the user has put other parameters into the groups or has changed the groups."""
        groups = chain.from_iterable(one.param_groups for one in self._optimizers)
        now = [[id(parameter) for parameter in group["params"]] for group in groups]
        if len(now) != len(self.ids) or any(own and own != taken for own, taken in zip(now, self.ids, strict=True)):
            raise UsageError(
                "the optimizer's param groups are not those that `shard` received: to train more, call "
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
            UsageError: the optimizer does not take more groups, or another group has one of the parameters.
        """
        if isinstance(self._inner, Several):
            raise UsageError(
                "one of several optimizers takes its groups when it is made: list the parameters there, even if frozen."
            )
        known = {parameter for group in self.ids for parameter in group}
        again = sum(id(parameter) in known for parameter in tensors_of(param_group["params"]))
        if again:
            raise UsageError(
                f"{again} of the new param group's parameters were in another group when zeroshard took the optimizer. Leave them "
                "out; to regroup them, call sharded.remove(), and shard with an optimizer of the new groups."
            )
        type(self._inner).add_param_group(self._inner, param_group)
        self._users.append(self._inner.param_groups[-1]["params"])
        self.ids.append([id(parameter) for parameter in self._users[-1]])


class GroupOptions:
    """A comparison, over ranks, of the numeric options in optimizers' param groups, such as learning rates.

    If ranks update shards with different options, the result differs from that of a single rank, and unsharded models drift
    apart. The step's small message has a digest of the options.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], collectives: Collectives) -> None:
        self._optimizers = [(optimizer, tuple(dict.fromkeys(["lr", *optimizer.defaults]))) for optimizer in optimizers]
        self._collectives = collectives
        self._values: list[Any] = []
        self._has_tensors = False
        self._digest = bytes(DIGEST_NBYTES)

    def digest(self) -> bytes:
        """Return a digest of this rank's options as they are now."""
        values = [
            group.get(key) for optimizer, keys in self._optimizers for group in optimizer.param_groups for key in keys
        ]
        # Options rarely change, but a tensor may change in place.
        if self._has_tensors or values != self._values:
            numbers = array("d", chain.from_iterable(map(_numbers, values)))
            self._digest = hashlib.blake2b(numbers.tobytes(), digest_size=DIGEST_NBYTES).digest()
            self._values = values
            self._has_tensors = any(isinstance(value, Tensor) for value in values)
        return self._digest

    def refuse_different(self) -> NoReturn:
        """Raise, since ranks have different options. Every rank must call it.

        Raises:
            UsageError: always; the message names the first option that differs, and its values.
        """
        own = [
            (
                f"{key} of param group {number} of {type(optimizer).__name__}",
                ", ".join(map(repr, _numbers(group.get(key)))),
            )
            for optimizer, keys in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for key in keys
        ]
        everyone = self._collectives.exchange_json(own, "the options of param groups")
        for rank, other in enumerate(everyone):
            for (name, first), (_, value) in zip(everyone[0], other, strict=False):
                if first != value:
                    raise UsageError(
                        f"{name} is {first} on rank 0 and {value} on rank {rank}: every rank must step with the same. A scheduler "
                        "needs the same number of batches on every rank. One that looks at losses (ReduceLROnPlateau) needs "
                        "their mean: pass sharded.sum_over_ranks(loss) / sharded.world_size."
                    )
        raise UsageError("the ranks' optimizers have different param groups: make the same groups on every rank.")


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of an option, except those on an accelerator: a read would wait for it."""
    if isinstance(value, float | int):
        yield float(value)
    elif isinstance(value, tuple):
        yield from (float(one) for one in value if isinstance(one, float | int))
    elif isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu":
        yield float(value)


class DroppedGradients:
    """A record of which of a model's optimizers have dropped their gradients since these arrived.

    All optimizers' gradients share buffers, which are freed once every optimizer has dropped its own. Until then nothing uses
    dropped gradients.
    """

    def __init__(self, optimizers: list[UsersOptimizer], schedule: Schedule) -> None:
        self._optimizers = optimizers
        self._schedule = schedule
        self._backward = object()
        """The step's `backward` at the last recorded `zero_grad()`."""
        self._arrival = object()
        """The step's `arrival` at that time."""

    @property
    def _dropped(self) -> list[UsersOptimizer]:
        return self._schedule.live.step.dropped_by

    def add(self, optimizer: UsersOptimizer) -> bool:
        """Record a `zero_grad()`. Return whether the gradients are no longer needed."""
        self.refuse_later_backward()
        step = self._schedule.live.step
        # A backward that was aborted counts as running until the next one begins.
        is_late = step.state in (StepState.BACKWARD, StepState.BROKEN, StepState.UNWANTED)
        if is_late and step.arrival is not self._arrival:
            self._dropped.clear()  # that backward has since added gradients, which must be dropped, too
        self._arrival = step.arrival
        forget_grads(optimizer.listed())
        if step.state is StepState.CLEAN:
            # The user may have put gradients into `grad` of the others.
            gradients = grads_of([parameter for other in self._optimizers for parameter in other.listed()])
            return gradients.count(None) == len(gradients)
        if optimizer not in self._dropped:
            self._dropped.append(optimizer)
        self._backward = step.backward
        return len(self._dropped) == len(self._optimizers)

    def __contains__(self, parameter: int) -> bool:
        """Return whether a parameter's gradient was dropped, by the parameter's `id`."""
        return any(parameter in optimizer.parameters for optimizer in self._dropped)

    def refuse_later_backward(self) -> None:
        """Raise if a backward ran between the `zero_grad()` of one optimizer and that of another."""
        if self._dropped and self._schedule.live.step.backward is not self._backward:
            raise UsageError(
                "a backward ran after zero_grad() of one of the model's optimizers, and before that of another, but their "
                "gradients share buffers. Call zero_grad() of all of them before a backward, or shard the parts as models of "
                "their own."
            )

    def refuse(self, what: str) -> None:
        """Raise if `what`, which uses the gradients of all parameters, would use dropped ones."""
        self.refuse_later_backward()
        if self._dropped:
            raise UsageError(f"{what} must come before zero_grad() of any of the model's optimizers. Call it earlier.")


def once(loss: Any, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return a closure that returns the loss of an evaluation that is over. It does not compute gradients: a second call raises."""
    left = [loss]
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    versions = [version_of(parameter) for parameter in listed]

    def closure() -> Any:
        if versions != [version_of(parameter) for parameter in listed]:
            raise UsageError(
                f"{type(optimizer).__name__}.step moves the parameters and then evaluates its closure, and zeroshard evaluates it "
                "before the step: the gradients would be those of another point. Pass no closure, and use an optimizer that needs "
                "none."
            )
        if not left:
            raise UsageError(
                f"{type(optimizer).__name__}.step evaluates its closure more than once, and zeroshard evaluates it once, before "
                "the update: then parameters are in shards. Evaluate in the loop instead, each time with a step."
            )
        return left.pop()

    return closure


class NoOptimizer(torch.optim.Optimizer):
    """A stand-in for the optimizer of a model that is only evaluated."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Raise, since there is nothing to update."""
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise, since there is nothing to update."""
        raise UsageError(
            "this model was sharded without an optimizer, for evaluation only. Pass shard() an optimizer to train."
        )
