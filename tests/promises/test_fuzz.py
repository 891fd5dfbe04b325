"""Random sequences of user actions give plain PyTorch's results, bit for bit, or an expected error."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from fuzzing import ACTIONS, Setting
from fuzzing_comparison import Action, compare
from fuzzing_sides import Sharded
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st


def run(setting: Setting, actions: Iterable[Action]) -> list[str]:
    """Compare both sides on one rank. Return the actions that were refused."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(setting, actions, Path(folder))


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
def test_whatever_users_do_at_length(part: int, times: int) -> None:
    """Run 1,000 sequences, in parts that processes share, or with `--times 5` 5,000."""

    @seed(part)
    @given(SETTINGS, sequences(25))
    @settings(profile(200 * times), derandomize=False)
    def at_length(setting: Setting, actions: list[Action]) -> None:
        run(setting, actions)

    at_length()


FOUND: dict[str, list[Action]] = {
    "a refused write in a unit that a graph holds": [("forward", 10), ("write_inside_unasked", 6), ("train_otherwise", 2)],
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
    "a part of a unit that stays after a forward": [("forward", 0), ("forward_part", 3), ("backward", 1), ("backward", 0)],
    "a part of a unit that a broken forward left": [
        ("broken_forward", 0), ("forward_part", 0), ("train", 0), ("backward", 0),
    ],
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
    "a gradient set after its optimizer dropped its own, and the other dropped": [
        ("train", 0), ("zero_one", 1), ("set_grad", 1), ("zero_one", 0), ("step", 0),
    ],
    "a gradient set after the norm, and the other dropped": [("clip", 0), ("set_grad", 0), ("zero_one", 1), ("step", 0)],
}  # fmt: skip
"""The same, of two optimizers."""


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


@pytest.mark.parametrize("stage", range(4))
def test_a_training_loop_is_not_refused(stage: int) -> None:
    loop = [("accumulate", 1), ("train", 2), ("clip", 0), ("step", 0), ("zero_grad", 0), ("read", 0), ("save", 0)]
    assert run(Setting(stage), loop * 3) == []


@pytest.mark.parametrize("stage", range(4))
def test_the_twin_tells_a_difference(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sharded, "step", lambda self, number: None)
    with pytest.raises(AssertionError, match=r"(?s)read 0: .* is not "):
        run(Setting(stage), [("train", 1), ("step", 0)])
