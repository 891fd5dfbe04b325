"""Random sequences of user actions give plain PyTorch's results, bit for bit, or an expected error."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import ACTIONS, Boom, Setting
from fuzzing_sides import Plain, Sharded
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from insides import schedule
from torch import Tensor
from torch.utils._pytree import tree_flatten

from zeroshard.errors import ZeroshardError
from zeroshard.schedule.schedule import StepState

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
    "set_mean_gradient", "hooked", "hooked_late", "in_thread", "step_one", "surgery",
)  # fmt: skip

EXPECTED: list[tuple[str, Callable[[Facts], bool]]] = [
    (r"parked|reload_states", lambda facts: facts.parked),
    (
        r"class (of|is) your own",
        lambda facts: facts.setting.own_class and (facts.grad_set or facts.action in ("offload", "inside", "drop_grads")),
    ),
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


def run(setting: Setting, actions: Iterable[Action]) -> list[str]:
    """Both sides, action by action; returns what was refused."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs, facts = Sharded(setting, Path(folder)), Plain(setting, Path(folder)), Facts(setting)
        refused: list[str] = []
        for wanted, number in [*actions, ("reload", 0), ("read", 0)]:
            # After a step its gradients stay until zero_grad, and may not be read.
            action = (
                {"drop_grads": "zero_grad", "drop_one": "nothing", "read_gradients": "nothing"}.get(wanted, wanted)
                if facts.stepped
                else wanted
            )
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


SETTINGS = st.builds(
    Setting,
    stage=st.integers(0, 3),
    bf16=st.booleans(),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    reshard_after_forward=st.booleans(),
    prefetch_numel=st.sampled_from([None, 0, 100]),
    overlap=st.booleans(),
    one_unit=st.booleans(),
    two_optimizers=st.booleans(),
    own_class=st.booleans(),
)
NUMBERS = st.integers(0, 11)


def sequences(length: int) -> st.SearchStrategy[list[Action]]:
    """Of one length: what is not needed for a failure shrinks to doing nothing."""
    return st.lists(st.tuples(st.sampled_from(["nothing", *ACTIONS]), NUMBERS), min_size=length, max_size=length)


def profile(examples: int) -> settings:
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip


@given(SETTINGS, sequences(15))
@profile(100)
def test_whatever_users_do_is_as_plain_pytorch_does_it_or_refused_by_name(
    setting: Setting, actions: list[Action]
) -> None:
    run(setting, actions)


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_whatever_users_do_at_length(part: int) -> None:
    """Run 2,500 sequences, in parts that processes share."""

    @seed(part)
    @given(SETTINGS, sequences(25))
    @settings(profile(500), derandomize=False)
    def at_length(setting: Setting, actions: list[Action]) -> None:
        run(setting, actions)

    at_length()


FOUND: dict[str, list[Action]] = {
    "a gradient set after the norm": [("clip", 0), ("set_grad", 7), ("step", 4)],
    "a gradient set on a frozen parameter": [("step", 6), ("zero_grad", 0), ("clip", 0), ("set_grad", 5), ("step", 8)],
    "a gradient set after a step": [("step", 10), ("set_grad", 10), ("step", 8), ("step", 5)],
    "a gradient set between microbatches": [("accumulate", 2), ("set_grad", 1), ("train", 10), ("step", 2)],
    "gradients dropped between microbatches": [("train", 1), ("drop_grads", 1), ("train", 2), ("step", 0)],
    "gradients dropped after the norm": [("train", 1), ("clip", 2), ("drop_grads", 1), ("step", 6)],
    "a backward refused, and aborted": [
        ("train", 10), ("clip", 5), ("drop_grads", 9), ("backward", 8), ("broken_forward", 2), ("step", 0),
    ],
    "a gradient of a frozen parameter, forgotten": [("set_grad", 5), ("zero_grad", 0), ("clip", 9)],
    "gradients dropped after a look": [("accumulate", 9), ("look", 4), ("drop_grads", 9), ("step", 2)],
    "a graph from before a step": [("forward", 0), ("train", 1), ("step", 0), ("zero_grad", 0), ("backward", 1)],
    "a graph from before a load": [("save", 0), ("forward_part", 2), ("load", 0), ("backward", 0)],
    "a graph from before a state was set": [("forward_part", 8), ("set_state", 2), ("backward", 9)],
    "frozen since the forward": [("forward_part", 11), ("toggle", 11), ("backward", 8)],
    "other data, parked": [("write_new_data", 0), ("offload", 8)],
    "other data, inside": [("write_inside", 3), ("train", 1), ("step", 0)],
    "an unasked change": [("write_inside_unasked", 10), ("train", 1), ("step", 0)],
    "a change before it is whole": [("forward", 7), ("write", 0), ("read", 0), ("read_states", 0), ("step", 0)],
    "a read while master weights are parked": [("offload", 2), ("read", 1), ("reload", 0), ("train", 0), ("step", 0)],
    "a write while master weights are parked": [("offload", 2), ("write_state_dict", 8), ("reload", 0), ("read_states", 0)],
    "a change refused while parked": [("offload", 1), ("write_inside", 11)],
    "optimizer states of other parameters": [
        ("train", 0), ("step", 0), ("zero_grad", 0), ("keep_optimizer", 1), ("toggle", 7), ("toggle", 5),
        ("update_trainable", 0), ("restore_optimizer", 5), ("read_states", 0),
    ],
    "a copy of tied parameters": [("toggle", 11), ("train", 10), ("deepcopy", 7)],
    "a copy with a gradient of one": [("set_grad", 9), ("read_gradients", 9), ("deepcopy", 10)],
    "a broken backward, and another graph": [
        ("forward", 1), ("broken_backward", 2), ("zero_grad", 0), ("backward", 0), ("step", 0),
    ],
    "a backward that was aborted at once, and another graph": [
        ("forward", 1), ("train", 1), ("broken_loss", 2), ("backward", 0), ("step", 0),
    ],
    "gradients dropped after a backward that was aborted at once": [
        ("accumulate", 9), ("broken_loss", 6), ("drop_grads", 11), ("read_gradients", 7),
    ],
    "an alias of parameters that are parked": [("keep_alias", 8), ("offload", 3), ("read_alias", 3)],
    "parameters taken up while states are parked": [
        ("train", 0), ("step", 0), ("offload", 0), ("update_trainable", 0), ("reload", 0), ("step", 0),
    ],
    "a gradient set after a step that had none": [("step", 0), ("set_grad", 0), ("update_trainable", 0), ("step_one", 0)],
    "gradients set to zero between microbatches": [("accumulate", 0), ("drop_grads", 0), ("train", 0), ("step", 0)],
}  # fmt: skip
"""What this found, shrunk."""
FOUND_OF_TWO: dict[str, list[Action]] = {
    "gradients of both dropped after a backward that was aborted": [("broken_backward", 1), ("zero_grad", 4), ("step", 4)],
    "a read after one dropped its gradients": [("accumulate", 9), ("zero_one", 5), ("read_gradients", 1)],
    "a gradient set after one dropped its own": [("train", 2), ("zero_one", 10), ("set_mean_gradient", 3), ("step", 9)],
    "a user's gradient of the other": [("set_grad", 2), ("zero_one", 4), ("read_gradients", 4)],
    "a user's gradient of a frozen parameter of the other": [("set_grad", 5), ("zero_one", 10), ("read_gradients", 0)],
    "a backward after one dropped its gradients": [
        ("step_one", 6), ("zero_one", 2), ("accumulate", 8), ("drop_grads", 7), ("step", 2),
    ],
    "dropped before and after a backward that was aborted": [
        ("train", 0), ("zero_one", 0), ("broken_backward", 0), ("zero_one", 1), ("step", 2),
    ],
    "dropped before and after a backward that was aborted after a step": [
        ("step", 0), ("zero_one", 0), ("broken_backward", 0), ("zero_one", 1), ("step", 0),
    ],
    "dropped between two backwards after a step, of which the second was aborted": [
        ("step_one", 0), ("backward", 0), ("zero_one", 0), ("broken_backward", 0), ("zero_one", 1), ("step_one", 0),
    ],
    "a gradient set after the norm, and the other dropped": [("clip", 0), ("set_grad", 0), ("zero_one", 1), ("step", 0)],
}  # fmt: skip
"""The same, of two optimizers."""
FOUND_OF_A_CLASS: dict[str, list[Action]] = {
    "parameters parked that cannot name their readers": [("offload", 0), ("write", 8)],
    "a copy after a backward": [("train", 0), ("deepcopy", 0)],
    "a gradient set after a step that had none": [("step", 0), ("set_grad", 0), ("update_trainable", 0), ("step_one", 0)],
    "gradients set to zero between microbatches": [
        ("accumulate", 0), ("drop_grads", 0), ("train", 0), ("read_gradients", 0),
    ],
    "a step after a drop that was refused": [
        ("train", 10), ("set_mean_gradient", 8), ("drop_grads", 7), ("set_mean_gradient", 8), ("step_one", 1),
    ],
}  # fmt: skip
"""The same, of parameters of a class of the user's own."""


@pytest.mark.every
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("found", FOUND)
def test_what_was_found_once(found: str, stage: int, bf16: bool) -> None:
    run(Setting(stage, bf16), FOUND[found])


@pytest.mark.every
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("found", FOUND_OF_TWO)
def test_what_was_found_once_of_two_optimizers(found: str, stage: int, bf16: bool) -> None:
    run(Setting(stage, bf16, two_optimizers=True), FOUND_OF_TWO[found])


@pytest.mark.every
@pytest.mark.parametrize("one_unit", [False, True])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("found", FOUND_OF_A_CLASS)
def test_what_was_found_once_of_own_classes(found: str, stage: int, bf16: bool, one_unit: bool) -> None:
    run(Setting(stage, bf16, one_unit=one_unit, own_class=True), FOUND_OF_A_CLASS[found])


@pytest.mark.parametrize("stage", range(4))
def test_a_training_loop_is_not_refused(stage: int) -> None:
    loop = [("accumulate", 1), ("train", 2), ("clip", 0), ("step", 0), ("zero_grad", 0), ("read", 0), ("save", 0)]
    assert run(Setting(stage), loop * 3) == []


@pytest.mark.parametrize("stage", range(4))
def test_the_twin_tells_a_difference(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharded, "step", lambda self, number: None)
    with pytest.raises(AssertionError, match=r"(?s)read 0: .* is not "):
        run(Setting(stage), [("train", 1), ("step", 0)])
