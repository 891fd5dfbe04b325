"""Owns the comparison of the fuzz's two sides: equal results to the last bit, or an error that the actions call for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fuzzing import Setting
from fuzzing_sides import Plain, Sharded
from insides import schedule
from torch import Tensor
from torch.utils._pytree import tree_flatten
from twin import Boom

from zeroshard.core.step import StepState
from zeroshard.errors import ZeroshardError

Action = tuple[str, int]


@dataclass
class Facts:
    """What has happened so far that makes errors legitimate."""

    setting: Setting
    action: str = ""
    parked: bool = False
    broken: bool = False
    begun: bool = False
    stepped: bool = False
    accumulated: bool = False
    grad_set: bool = False
    toggled: bool = False
    new_data: bool = False
    zeroed: bool = False
    """One of two optimizers dropped its gradients."""

    def note(self, action: str, number: int) -> None:
        """Before the action: what it may lead to."""
        self.action = action
        self.parked |= action in ("offload", "inside")
        self.new_data |= action == "write_new_data"
        # Under sharded parameters these outdate graphs from before, whose backward torch refuses.
        self.new_data |= self.setting.stage == 3 and action in ("write_inside_unasked", "update_trainable", "add_group")
        self.toggled |= action in ("toggle", "add_group")
        self.zeroed |= action == "zero_one" and self.setting.two_optimizers
        self.grad_set |= action in ("set_grad", "drop_grads", "drop_one")
        self.accumulated |= action == "accumulate"
        self.begun |= action in _BEGINS
        self.stepped |= action in ("step", "step_one") or (action, number % 10) == ("inside", 4)
        self.stepped |= (action, number % 6) == ("in_thread", 2)

    def done(self, action: str, error: BaseException | None) -> None:
        """After it."""
        self.broken |= error is not None and action in _BEGINS
        if error is not None:
            return
        if action == "zero_grad" or (action == "zero_one" and not self.setting.two_optimizers):
            self.broken = self.begun = self.stepped = self.accumulated = self.grad_set = self.zeroed = False
        if action == "reload":
            self.parked = False


_BEGINS = (
    "train", "accumulate", "backward", "broken_backward", "inside", "step", "clip", "set_grad", "read_gradients",
    "set_mean_gradient", "hooked", "hooked_late", "in_thread", "step_one", "surgery", "train_otherwise", "train_with_penalty",
    "train_on_two", "halve_grads", "clamp_grads", "clip_by_torch",
)  # fmt: skip

_OF_GRADIENTS = ("halve_grads", "clamp_grads", "clip_by_torch")
"""Operations on `grad`. They need gradients that are complete."""

EXPECTED: list[tuple[str, Callable[[Facts], bool]]] = [
    (r"parked|reload_states", lambda facts: facts.parked),
    (r"was aborted", lambda facts: facts.broken),
    (r"without optimizer\.zero_grad\(\)", lambda facts: facts.stepped),
    (r"between (a )?backward and (its )?(step|zero_grad)|gradients await a step", lambda facts: facts.begun),
    (r"is sharded at rest", lambda facts: facts.setting.stage == 3 and facts.action in ("write", "write_new_data", "read_one")),
    (r"not declared the last microbatch", lambda facts: facts.accumulated and facts.setting.stage < 2),
    # In 16 bits these are summed in fp32, and such a sum is no tensor of the parameter's dtype.
    (r"this rank's sum over microbatches", lambda facts: facts.accumulated and facts.setting.bf16),
    (r"\.grad was set after a backward", lambda facts: facts.grad_set),
    (r"its `grad`: it was reduced", lambda facts: facts.action == "drop_grads"),
    (r"has a gradient, and was frozen", lambda facts: facts.grad_set or facts.toggled),
    (r"was unfrozen", lambda facts: facts.toggled),
    (r"without a modifier rank", lambda facts: facts.action == "write_inside_unasked"),
    (r"has no (gradient|state '\w+') to set", lambda facts: facts.action in ("set_state", "set_mean_gradient")),
    (r"is not a checkpoint", lambda facts: facts.action == "load"),
    # Taken up between a forward and its backward, other data are another write to torch.
    (r"modified by an inplace operation", lambda facts: facts.new_data),
    (r"holds other shards", lambda facts: facts.action == "restore_optimizer" and facts.toggled),
    (r"inside zeroshard\.unsharded\(\)", lambda facts: facts.action == "inside"),
    (r"zero_grad\(\) of (one|any) of the model's optimizers", lambda facts: facts.zeroed),
]  # fmt: skip
"""Our errors, and when they may be raised. Any other is a failure."""


def difference(ours: Any, theirs: Any) -> str | None:
    """Where two trees of values differ in a bit; norms, which are summed in another order, in the seventh digit."""
    (own, shape), (other, their_shape) = tree_flatten(ours), tree_flatten(theirs)
    if shape != their_shape:
        return f"{shape} is not {their_shape}"
    for a, b in zip(own, other, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = torch.equal(a.double().nan_to_num(), b.double().nan_to_num())
        else:
            same = a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-6 * abs(b))
        if not same:
            return f"{a} is not {b}"
    return None


def attempt(side: Any, action: str, number: int) -> tuple[Any, BaseException | None]:
    try:
        return getattr(side, action)(number), None
    except (Boom, ZeroshardError, RuntimeError, KeyError) as error:
        return None, error


def compare(setting: Setting, actions: Iterable[Action], folder: Path) -> list[str]:
    """Run both sides, action by action, and return the actions that were refused. Every rank must call it."""
    ours, theirs, facts = Sharded(setting, folder), Plain(setting, folder), Facts(setting)
    refused: list[str] = []
    for wanted, number in [*actions, ("reload", 0), ("read", 0)]:
        action = wanted
        if facts.stepped and wanted == "drop_grads":
            action = "zero_grad"
        elif facts.stepped and wanted in ("drop_one", "read_gradients", *_OF_GRADIENTS):
            action = "nothing"  # after a step its gradients stay until zero_grad, and may not be read
        elif wanted in _OF_GRADIENTS and (facts.broken or (facts.grad_set and setting.bf16)):
            # After a backward that was aborted, no gradient need be visible. With a 16-bit `grad` that the user set, torch
            # computes in 16 bits.
            action = "nothing"
        if action == "hooked_late":
            one(ours, theirs, facts, "zero_grad", 0, refused)
        if setting.bf16 and action == "set_mean_gradient":
            continue  # the twin sums what was set by hand, and then in the mean, in another order of roundings
        one(ours, theirs, facts, action, number, refused)
    return refused


def one(ours: Sharded, theirs: Plain, facts: Facts, action: str, number: int, refused: list[str]) -> None:
    facts.note(action, number)
    graphs = [*ours.losses]
    has_used = schedule(ours.sharded).state in (StepState.STEPPED, StepState.UNWANTED)
    seen, error = attempt(ours, action, number)
    takes_up = action == "update_trainable" or (action == "add_group" and ours.has_group and not theirs.has_group)
    if takes_up and has_used and error is None:  # ours drops gradients that a step has used
        theirs.zero_grad(number)
        was_set = facts.grad_set
        facts.done("zero_grad", None)
        facts.grad_set = was_set  # a gradient of a frozen parameter stays
    if not isinstance(error, ZeroshardError) and not (facts.new_data and "inplace operation" in str(error)):
        facts.done(action, error)
    else:
        reasons = [may for pattern, may in EXPECTED if re.search(pattern, str(error))]
        assert any(may(facts) for may in reasons), f"{action} {number} was refused, and nothing calls for it: {error}"
        refused.append(action)
        facts.done(action, error)
        if action == "write_inside_unasked" and "without a modifier rank" in str(error) and ours.setting.stage < 3:
            theirs.write(number)  # the parameters are the user's own: the change stays, as the error says
        same_graphs(ours, theirs, graphs)
        return
    theirs.told = seen if isinstance(seen, float) else None
    expected, their_error = attempt(theirs, action, number)
    assert type(error) is type(their_error), f"{action} {number}: {error!r} is not {their_error!r}"
    found = None if error is not None else difference(seen, expected)
    assert found is None, f"{action} {number}: {found}"


def same_graphs(ours: Sharded, theirs: Plain, before: list[Tensor]) -> None:
    """What was refused ran on one side only, and may have taken a graph from its list, or put one there: both forget all."""
    if len(ours.losses) != len(before) or any(one is not other for one, other in zip(ours.losses, before, strict=True)):
        ours.losses.clear()
        theirs.losses.clear()
    with torch.no_grad():
        for one_buffer, other in zip(ours.model.buffers(), theirs.model.buffers(), strict=True):
            other.copy_(one_buffer)
