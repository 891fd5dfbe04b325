"""Weights that are exchanged with their averages for an evaluation, an export or a save, and back, leave no trace.

What cannot be followed is refused where it begins, and leaves the weights as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tokens
from torch import Tensor, nn
from twin import Setting, as_set, build, everything, same, step, steps, whole

import zeroshard
from zeroshard import Place, Policy, Sharded, UsageError

Values = dict[str, Tensor]


def by_copy(model: nn.Module, values: Values) -> None:
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(values[fqn])


def by_copy_to_data(model: nn.Module, values: Values) -> None:
    for fqn, parameter in model.named_parameters():
        parameter.data.copy_(values[fqn])


def by_data(model: nn.Module, values: Values) -> None:
    """Exchange both ways, without a copy."""
    for fqn, parameter in model.named_parameters():
        own = parameter.data
        parameter.data = values[fqn]
        values[fqn] = own


def by_state_dict(model: nn.Module, values: Values) -> None:
    model.load_state_dict({**values, "head.weight": values["embedding.weight"]})


def by_assignment(model: nn.Module, values: Values) -> None:
    model.load_state_dict({**values, "head.weight": values["embedding.weight"]}, assign=True)


def by_swap_tensors(model: nn.Module, values: Values) -> None:
    for fqn, parameter in model.named_parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(values[fqn]))


WAYS: dict[str, Callable[[nn.Module, Values], None]] = {
    "copy": by_copy, "copy to data": by_copy_to_data, "data": by_data, "state dict": by_state_dict, "assign": by_assignment,
    "swap_tensors": by_swap_tensors,
}  # fmt: skip
USES: dict[str, Callable[[Any, Sharded, int, Path], object]] = {
    "evaluate": lambda model, sharded, rank, folder: evaluate(model, rank),
    "save": lambda model, sharded, rank, folder: sharded.save(folder, "average"),
    "export": lambda model, sharded, rank, folder: sharded.export(folder / "export"),
    "states": lambda model, sharded, rank, folder: sharded.states.get("blocks.0.up.weight"),
}


def evaluate(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(*tokens(rank, 9))


def trained(
    rank: int, policy: Policy | int, swap: Callable[[Any, Sharded, Values, Values], None] | None = None, precision: Any = None
) -> Values:  # fmt: skip
    """Train, swap weights in the middle if there is a way to do so, and return everything."""
    model, sharded = build(policy, precision=precision)
    steps(model, sharded, rank, range(2))
    own = whole(model)
    if swap:
        swap(model, sharded, own, {fqn: value * 0.5 for fqn, value in own.items()})
    steps(model, sharded, rank, range(2, 4))
    return everything(sharded)


@pytest.mark.ranks(2)
@pytest.mark.quick(6)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", range(4))
def test_training_goes_on_after_a_swap_as_without_it_or_the_swap_is_refused(
    rank: int, stage: int, way: str, use: str, tmp_path: Path
) -> None:
    exchange = WAYS[way]
    # A write to sharded parameters is refused outside of such a block, but for state dicts.
    is_open = stage == 3 and way not in ("state dict", "assign", "swap_tensors")
    # Below stage 3 an evaluation reads what `data` is; nothing is overwritten.
    expects_refusal = way in ("assign", "swap_tensors") or (way == "data" and (stage == 3 or use != "evaluate"))

    def swap(model: nn.Module, sharded: Sharded, own: Values, average: Values) -> None:
        def block() -> Any:
            return zeroshard.unsharded(model, modifier_rank=0) if is_open else nullcontext()

        is_refused = False
        try:
            with block():
                exchange(model, average)
            USES[use](model, sharded, rank, tmp_path)
            if way == "assign":  # the parameters are no longer those of the optimizer, as a step says at the latest
                sharded.optimizer.step()
        except (UsageError, RuntimeError) as error:
            is_refused = True
            assert isinstance(error, UsageError) or way == "swap_tensors", error
            assert way != "assign" or "no longer the tensor that zeroshard took" in str(error)
        assert is_refused == expects_refusal
        if not is_refused or (way == "data" and stage < 3):  # else nothing was exchanged
            with block():
                exchange(model, average if way == "data" else own)

    if way == "assign":
        with pytest.raises(UsageError, match="no longer the tensor that zeroshard took"):
            trained(rank, stage, swap)
    else:
        assert same(trained(rank, stage, swap), trained(rank, stage))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["copy", "copy to data", "data"])
@pytest.mark.parametrize("stage", range(4))
def test_a_swap_inside_one_block_costs_no_digit_of_16_bit_masters(rank: int, stage: int, way: str) -> None:
    """Over two blocks, master weights are rounded to what was given back (docs/sharded_parameters.md)."""

    def swap(model: nn.Module, sharded: Sharded, own: Values, average: Values) -> None:
        with zeroshard.unsharded(model, modifier_rank=0):
            WAYS[way](model, average)
            evaluate(model, rank)
            WAYS[way](model, average if way == "data" else own)

    assert same(trained(rank, stage, swap, torch.bfloat16), trained(rank, stage, precision=torch.bfloat16))


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize(("stage", "place"), [(0, "accelerator"), *product((1, 2), ("accelerator", "cpu"))])
def test_weights_that_were_exchanged_are_not_trained(rank: int, stage: int, place: str) -> None:
    """Their updates would go to the memory of those that are kept."""
    policy = Policy.stage(stage).offloaded(parameters=Place(place)) if stage else Policy.stage(0)

    def swap(model: nn.Module, sharded: Sharded, own: Values, average: Values) -> None:
        by_data(model, average)
        with pytest.raises(UsageError, match=r"optimizer.step\(\) would copy it to the memory"):
            step(model, sharded, rank, 9)
        sharded.optimizer.zero_grad()
        by_data(model, average)
        with (
            pytest.raises(UsageError, match=r"the end of unsharded\(\) would copy it to the memory"),
            zeroshard.unsharded(model, modifier_rank=0),
        ):
            by_data(model, average)
        by_data(model, average)

    with as_set(Setting(policy, apart=True)):
        assert same(trained(rank, policy, swap), trained(rank, policy))


@pytest.mark.ranks(2)
def test_one_weight_that_a_block_exchanges_and_keeps_is_refused(rank: int) -> None:
    """Without a block, new data of one parameter is no swap: autograd, too, may keep what it showed."""
    model, _ = build(3)
    weight = model.blocks[0].up.weight
    with (
        pytest.raises(UsageError, match=r"the end of unsharded\(\) would copy it to the memory"),
        zeroshard.unsharded(model, modifier_rank=0),
    ):
        kept = weight.data
        weight.data = kept * 0.5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", [Place.ACCELERATOR, Place.CPU])
def test_new_data_of_each_parameter_is_no_swap(rank: int, place: Place) -> None:
    """A loop's variable keeps the last of them."""
    policy = Policy.stage(2).offloaded(parameters=place)
    with as_set(Setting(policy, apart=True)):
        model, sharded = build(policy)
        steps(model, sharded, rank, range(2))
        for parameter in model.parameters():
            data = parameter.data
            parameter.data = data * 0.5
        expected = whole(model)
        step(model, sharded, rank, 2)
        assert not same(whole(model), expected)


def test_what_only_a_graph_keeps_is_no_swap() -> None:
    """A graph keeps transposed weights. Nobody can see them change, and torch refuses their backward."""
    model, _ = build(0, make_model=lambda: nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
    loss = model(torch.ones(2, 4, requires_grad=True)).square().sum()  # so that each matrix is needed
    for parameter in model.parameters():
        parameter.data = torch.full((4, 4), 0.5)
    assert all(value.eq(0.5).all() for value in whole(model).values())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
