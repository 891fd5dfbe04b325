"""The user's optimizer remains in use: its `step` is the sharded step, and its groups hold the model's parameters."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import transport_of
from models import Stack, Untied, tokens
from oracles import average_gradients
from quiet import no_warnings
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from twin import FEW_STAGES, abort, build, close, same, same_on_all_ranks, step, steps, update, whole

import zeroshard
from zeroshard import Offload, Place, Policy, Precision, UsageError

Loop = Callable[[nn.Module, torch.optim.Optimizer, Any, int], None]
"""Takes the model, an optimizer, the same or `sharded` where one of ours has to be called, and the rank."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def sharded_of(
    policy: Policy | int, make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS["AdamW"], **options: Any
) -> Any:
    """Return a model, the user's optimizer, and what `shard` returns."""
    model, sharded = build(policy, make_optimizer=make, bucket_numel=100, **options)
    return model, sharded.optimizer, sharded


def plain_of(make: Callable[..., torch.optim.Optimizer]) -> tuple[Stack, Any]:
    """Return the same model, and an optimizer, in plain PyTorch."""
    torch.manual_seed(0)
    plain = Stack()
    return plain, make(plain.parameters())


def assert_equal_masters(sharded: zeroshard.Sharded, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        assert torch.equal(sharded.states.get(name), parameter), name


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_its_step_is_the_sharded_step(rank: int, optimizer: str, stage: int) -> None:
    """The one line: clipping, `step` and `zero_grad` are those of plain PyTorch, with the same bits at every stage."""

    def trained(rank: int, stage: int) -> dict[str, Tensor]:
        model, own, _ = sharded_of(stage, OPTIMIZERS[optimizer])
        parameters = [*model.parameters()]
        for number in range(3):
            model(*tokens(rank, number)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
            own.zero_grad()
            assert all(parameter.grad is None for parameter in parameters)
            assert [*map(id, own.param_groups[0]["params"])] == [*map(id, parameters)]
        return whole(model)

    def in_one_process() -> dict[str, Tensor]:
        model, own = plain_of(
            lambda found: OPTIMIZERS[optimizer]([one for one in found if one.numel()])
        )  # for Adafactor
        parameters = [*model.parameters()]
        for number in range(3):
            average_gradients(parameters, 2, lambda rank: model(*tokens(rank, number)).backward())  # noqa: B023
            nn.utils.clip_grad_norm_(parameters, 0.5)
            own.step()
            model.zero_grad()
        return whole(model)

    found = trained(rank, stage)
    if stage:
        assert same(found, trained(rank, 0))
    else:
        close(found, in_one_process(), atol=1e-5)  # the norm is summed in another order


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", [Place.CPU, Place.DISK])
def test_states_that_rest_elsewhere(rank: int, place: Place, stage: int, tmp_path: Path) -> None:
    results = []
    here = Policy.stage(stage)
    for policy in (here, here.offloaded(optimizer=place, path=str(tmp_path))):
        model, own, sharded = sharded_of(policy)
        steps(model, own, rank, range(3))
        results.append(whole(model))
        sharded.remove()
    assert same(*results)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_schedulers_hooks_and_closures_act_as_ever(rank: int, stage: int) -> None:
    """Made before `shard` or after, hooks run once a step, and those after it read updated parameters."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[tuple[str, float]] = []
    weight = model.head.weight

    def note(name: str) -> Callable[..., None]:
        def hook(other: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert [*map(id, other.param_groups[0]["params"])] == [*map(id, model.parameters())]
            with zeroshard.unsharded(model):
                calls.append((name, float(weight.sum())))

        return hook

    optimizer.register_step_pre_hook(note("early before"))
    optimizer.register_step_post_hook(note("early after"))
    zeroshard.shard(model, optimizer, stage)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(note("late after"))
    for number in range(2):
        if number == 1:
            optimizer.register_step_pre_hook(note("late before"))
        with zeroshard.unsharded(model):
            old = float(weight.sum())
        calls.clear()

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = model(*tokens(rank, number))
            loss.backward()
            return loss

        assert isinstance(optimizer.step(closure), Tensor)
        with zeroshard.unsharded(model):
            new = float(weight.sum())
        assert new != old
        late = [("late before", old)] if number == 1 else []
        assert calls == [("early before", old), *late, ("early after", new), ("late after", new)]
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**4)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_hook_of_the_first_step_sets_its_learning_rate(rank: int, stage: int) -> None:
    """Nothing but the step itself has come since `shard`, and a hook on all optimizers runs once, too."""
    model, optimizer, _ = sharded_of(stage, OPTIMIZERS["SGD"])
    before = whole(model)
    sizes = []

    def halt(own: torch.optim.Optimizer, *_: Any) -> None:
        own.param_groups[0]["lr"] = 0.0

    optimizer.register_step_pre_hook(halt)
    handle = register_optimizer_step_pre_hook(lambda own, *_: sizes.append(len(own.param_groups[0]["params"])))
    model(*tokens(rank, 0)).backward()
    optimizer.step()
    handle.remove()
    assert sizes == [len([*model.parameters()])]
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert same(before, whole(model))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_groups_that_were_changed_are_refused(rank: int, stage: int) -> None:
    model, optimizer, _ = sharded_of(stage)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]
    model(*tokens(rank, 0)).backward()
    with pytest.raises(UsageError, match="param groups are not those"):
        optimizer.step()


class Scaled(torch.optim.SGD):
    """Takes an argument of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.scales = list[float]()

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        self.scales.append(scale)
        return super().step(closure)


@pytest.mark.ranks(2)
def test_arguments_of_the_optimizers_own_reach_it(rank: int) -> None:
    model, optimizer, _ = sharded_of(2, partial(Scaled, lr=0.1), elementwise=True)
    model(*tokens(rank, 0)).backward()
    optimizer.step(scale=0.5)
    optimizer.step(lambda: model(*tokens(rank, 0)), 0.25)
    assert optimizer.scales == [0.5, 0.25]


class Counting(torch.optim.SGD):
    """Keeps a count of a group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_what_it_keeps_of_a_group_counts_one_step(rank: int, stage: int) -> None:
    model, optimizer, _ = sharded_of(stage, partial(Counting, lr=0.1), elementwise=True)
    steps(model, optimizer, rank, range(3))
    assert optimizer.param_groups[0]["count"] == 3


class CountingItself(torch.optim.Optimizer):
    """Keeps counts in attributes, as numbers, in a list and in a tensor, and looks at the first parameter of a group."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count, self.counts, self.total = 0, [0], torch.zeros(1)
        self.log, self.of_each = self.counts, dict[int, int]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.counts[0] += 1
        self.total += 1
        self.last = self.count
        for group in self.param_groups:
            assert group["params"][0].ndim > 0
            group.setdefault("seen", torch.zeros(1)).add_(1)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.of_each[id(parameter)] = self.of_each.get(id(parameter), 0) + 1
                    state = self.state[parameter]
                    mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                    parameter.sub_(
                        mean / (1 - 0.9**self.count), alpha=group["lr"] / (self.counts[0] + float(self.total))
                    )


@pytest.mark.parametrize("place", [Place.ACCELERATOR, Place.CPU])
@FEW_STAGES
def test_what_it_counts_by_itself_counts_one_step(stage: int, place: Place) -> None:
    """Its code runs once, however many sub-groups there are."""
    policy = Policy.stage(stage)
    if place is Place.CPU:
        if stage == 0:
            return
        policy = policy.offloaded(optimizer=place, offload=Offload(sub_group_numel=400))
    make = partial(CountingItself, lr=0.1)
    model, optimizer, sharded = sharded_of(policy, make, elementwise=True)
    plain, expected = plain_of(make)
    for one, stepping in ((model, optimizer), (plain, expected)):
        steps(one, stepping, 0, range(3))
    for counted in (optimizer, expected):
        assert (counted.count, counted.log, float(counted.total), counted.last) == (3, [3], 3.0, 3)
        assert float(counted.param_groups[0]["seen"]) == 3.0 and set(counted.of_each.values()) == {3}
    assert all(len(group["params"]) == len(list(plain.parameters())) for group in optimizer.param_groups)
    assert_equal_masters(sharded, plain)


class Twice(torch.optim.SGD):
    """Updates before and after the step of the class that it extends, as wrappers do."""

    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.9)
            loss = super().step(closure)
        return loss


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_class_that_calls_the_step_of_the_class_that_it_extends(rank: int, stage: int) -> None:
    """torch runs the object's hooks for each of the calls."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch wraps the step of a class when it is made first
    make = partial(Twice, lr=0.1)
    model, optimizer, sharded = sharded_of(stage, make, elementwise=True)
    plain, expected = plain_of(make)
    for one, its in ((model, optimizer), (plain, expected)):
        steps(one, its, 0, range(3))
    assert_equal_masters(sharded, plain)


class Evaluates(torch.optim.SGD):
    """It evaluates its closure itself, so often."""

    times = 1

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        for _ in range(self.times):
            loss = closure()
        super().step()
        return loss


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_class_that_evaluates_its_closure(rank: int, stage: int) -> None:
    """Once is what zeroshard does before; an optimizer that compares two evaluations, as SAM does, is refused by name."""
    make = partial(Evaluates, lr=0.1)
    model, optimizer, sharded = sharded_of(stage, make, elementwise=True)
    plain, expected = plain_of(make)
    for number in range(2):
        losses = []
        for one, its in ((model, optimizer), (plain, expected)):

            def closure(one: nn.Module = one, its: torch.optim.Optimizer = its, number: int = number) -> Tensor:
                its.zero_grad()
                loss = one(*tokens(0, number))
                loss.backward()
                return loss.detach()

            losses.append(its.step(closure))
        assert torch.equal(*losses)
    assert_equal_masters(sharded, plain)
    optimizer.zero_grad()
    optimizer.times = 2
    with pytest.raises(UsageError, match=r"Evaluates\.step evaluates its closure more than once"):
        optimizer.step(lambda: model(*tokens(0, 2)).backward())


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_step_inside_a_backward_is_refused(rank: int, stage: int) -> None:
    """As in torch's tutorial on optimizers that step in hooks: the gradients of the other parameters would be lost."""
    model, optimizer, _ = sharded_of(stage)
    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) was called inside a backward.*Step after the backward"):
        model(*tokens(rank, 0)).backward()


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_zero_grad_drops_what_no_step_used(rank: int, by: str, stage: int) -> None:
    results = []
    for drops in (False, True):
        model, own, _ = sharded_of(stage)
        if drops:
            model(*tokens(rank, 7)).backward()
            (own if by == "optimizer" else model).zero_grad()
        for number in range(2):
            model(*tokens(rank, number)).backward()
            own.step()
            (own if by == "optimizer" else model).zero_grad()
        results.append(whole(model))
    assert same(*results)
    assert same_on_all_ranks(results[0])


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("clips_first", [True, False])
@pytest.mark.parametrize("clip", ["not at all", "torch's", "ours"])
def test_a_parameter_whose_gradient_is_set_to_none_is_left_out_of_the_step(
    rank: int, clip: str, clips_first: bool, stage: int
) -> None:
    """As in DINO, which cancels the last layer's gradients in its first epoch. Its weights and states must not move."""

    def clip_gradients(model: Stack, sharded: Any) -> None:
        if clip == "ours" and sharded is not None:
            sharded.clip_grad_norm_(0.1)
        elif clip != "not at all":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def trained(losses: Callable[[int], Tensor], model: Stack, optimizer: Any, sharded: Any) -> dict[str, Tensor]:
        for number in range(4):
            losses(number).backward()
            if clips_first:
                clip_gradients(model, sharded)
            if number % 2:
                model.head.weight.grad = model.blocks[0].up.bias.grad = None
            if not clips_first:
                clip_gradients(model, sharded)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    model, optimizer = plain_of(OPTIMIZERS["AdamW"])
    mean = lambda number: (model(*tokens(0, number)) + model(*tokens(1, number))) / 2  # noqa: E731
    expected = trained(mean, model, optimizer, None)
    model, own, sharded = sharded_of(stage)
    found = trained(lambda number: model(*tokens(rank, number)), model, own, sharded)
    for fqn, value in expected.items():
        torch.testing.assert_close(found[fqn], value, rtol=1e-5, atol=1e-6)
    assert same_on_all_ranks(found)


class Parts(nn.Module):
    """Two units, of which a call runs those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor, *numbers: int) -> Tensor:
        for number in numbers:
            x = self.units[number](x)
        return x.square().mean()


UNITS = [None, None, None, zeroshard.Units(min_numel=100)]
"""By stage. Layers of which ranks run different ones have to be in one unit at stage 3."""


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("is_late", [False, True])
def test_a_dropped_gradient_that_another_rank_has_not_made_is_refused(rank: int, is_late: bool, stage: int) -> None:
    """The other rank has a part of its mean, and no `grad` that could be set to None."""
    model, sharded = build(stage, make_model=Parts, units=UNITS[stage])
    model(torch.ones(2, 5), *((0,) if rank else (0, 1))).backward()
    if is_late:
        sharded.clip_grad_norm_(1.0)
    model.units[1].weight.grad = None
    what = r"was set to None, but a rank did not use" if is_late else r"was set to None on ranks \[0\] only"
    if not is_late or rank == 0:
        with pytest.raises(UsageError, match=rf"units\.1\.weight\.grad {what}"):
            sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    model(torch.ones(2, 5), 0, 1).backward()
    model.units[1].weight.grad = None
    sharded.optimizer.step()


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("drops", [False, True])
def test_a_factor_multiplies_no_gradient_that_only_other_ranks_made(rank: int, drops: bool, stage: int) -> None:
    """A rank's shard has parts of gradients that it has not made itself."""
    inputs = torch.arange(20.0).view(2, 2, 5) / 20
    results = []
    for is_plain in (True, False):
        model = Parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if is_plain:
            ((model(inputs[0], 0) + model(inputs[1], 0, 1)) / 2).backward()
        else:
            zeroshard.shard(model, optimizer, stage, units=UNITS[stage])
            model(inputs[rank], *((0, 1) if rank else (0,))).backward()
        model.units[0].weight.grad.mul_(0.25)
        if drops:
            model.units[0].bias.grad = None
        optimizer.step()
        results.append(whole(model))
    for fqn, value in results[0].items():
        torch.testing.assert_close(results[1][fqn], value, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_dropped_gradient_does_not_round_the_others(rank: int, stage: int) -> None:
    """A factor multiplies 16-bit gradients in fp32, when the optimizer gets them."""

    def scaled(rank: int, *, drops: bool) -> Tensor:
        precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
        model, sharded = build(stage, make_model=Parts, units=UNITS[stage], precision=precision)
        model(torch.ones(2, 5, dtype=torch.bfloat16) * (rank + 1), 0, 1).backward()
        if drops:
            model.units[1].weight.grad = None
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / 3)
        gradient = sharded.states.get("units.0.weight", "gradients")
        assert gradient is not None
        assert (sharded.states.get("units.1.weight", "gradients") is None) == drops
        if drops:
            assert not sharded.states.local("units.1.weight", "gradients")
        return gradient

    assert torch.equal(scaled(rank, drops=False), scaled(rank, drops=True))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_gradient_that_some_ranks_set_to_none_is_refused_by_name(rank: int, stage: int) -> None:
    model, own, _ = sharded_of(stage)
    model(*tokens(rank, 0)).backward()
    if rank:
        model.head.weight.grad = None
    with pytest.raises(UsageError, match=r"weight\.grad was set to None on ranks \[1\] only"):
        own.step()
    own.zero_grad()
    model(*tokens(rank, 0)).backward()
    model.head.weight.grad = None
    with pytest.raises(UsageError, match="set None after the last one"):
        model(*tokens(rank, 1)).backward()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_gradient_of_the_users_is_not_dropped_with_the_others(rank: int, stage: int) -> None:
    model, own, _ = sharded_of(stage)
    model(*tokens(rank, 0)).backward()
    first, *others = (parameter for parameter in model.parameters() if parameter.grad is not None)
    first.grad = None
    first.grad = torch.ones(first.shape)
    for parameter in others:
        parameter.grad = None
    with pytest.raises(UsageError, match="was set after a backward"):
        own.step()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_zero_grad_after_a_backward_that_aborted(rank: int, stage: int) -> None:
    results = []
    for breaks in (False, True):
        model, own, _ = sharded_of(stage)
        for number in range(2):
            if breaks:
                abort(model(*tokens(rank, 9)), model.blocks[1].norm.weight)
                with pytest.raises(UsageError, match="was aborted"):
                    own.step()
                own.zero_grad()
            step(model, own, rank, number)
        results.append(whole(model))
    assert same(*results)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_step_on_the_gradients_of_two_steps_is_refused(rank: int, stage: int) -> None:
    """In plain PyTorch they would be added up, which is nearly always a mistake. To drop them is not."""
    results = []
    for drops in (False, True):
        model, own, sharded = sharded_of(stage)
        model(*tokens(rank, 0)).backward()
        own.step()
        if drops:
            model(*tokens(rank, 1)).backward()
            with pytest.raises(UsageError, match="zero_grad"):
                own.step()
            with pytest.raises(UsageError, match="zero_grad"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            sharded.comm_report()
            model(*tokens(rank, 1)).backward()
            assert "reduce_scatter" not in sharded.comm_report()
        own.zero_grad()
        step(model, own, rank, 2)
        results.append(whole(model))
    assert same(*results)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_its_state_dict_is_the_sharded_one(rank: int, stage: int) -> None:
    model, own, sharded = sharded_of(stage)

    steps(model, own, rank, range(2))
    kept, values = copy.deepcopy(own.state_dict()), whole(model)
    assert kept.keys() == sharded.optimizer.state_dict().keys()
    assert kept["state"]
    steps(model, own, rank, range(2, 4))
    expected = whole(model)
    with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(values[fqn])
    own.load_state_dict(kept)
    assert [*map(id, own.param_groups[0]["params"])] == [*map(id, model.parameters())]
    steps(model, own, rank, range(2, 4))
    assert same(expected, whole(model))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_add_param_group_frees_parameters(rank: int, stage: int) -> None:
    """As `update_trainable(param_group)`, also where a loop drops gradients before a backward and not after the step."""

    def trained(rank: int, add: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Stack()
        model.blocks[1].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        sharded = zeroshard.shard(model, optimizer, stage)
        for number in range(4):
            if number == 2:
                model.blocks[1].requires_grad_(True)
                group = {"params": model.blocks[1].parameters(), "lr": 0.01}
                if add == "add_param_group":
                    optimizer.add_param_group(group)
                else:
                    optimizer.zero_grad()
                    sharded.update_trainable(group)
            optimizer.zero_grad()
            model(*tokens(rank, number)).backward()
            optimizer.step()
        assert len(optimizer.param_groups) == 2
        assert optimizer.param_groups[1]["lr"] == 0.01
        return whole(model)

    assert same(*(trained(rank, add) for add in ("add_param_group", "update_trainable")))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_group_of_frozen_parameters_may_be_added(rank: int, stage: int) -> None:
    """They are trained from the moment they are unfrozen, as in plain PyTorch."""
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    optimizers = []
    for one in (model, plain):
        one.blocks[1].requires_grad_(False)
        optimizers.append(torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.1))
    own, torchs = optimizers
    sharded = zeroshard.shard(model, own, stage)
    for number in range(4):
        if number == 1:
            for one, optimizer in ((model, own), (plain, torchs)):
                optimizer.add_param_group({"params": list(one.blocks[1].parameters()), "lr": 0.01})
        if number == 2:
            own.load_state_dict(own.state_dict())
            for one in (model, plain):
                one.blocks[1].requires_grad_(True)
            sharded.update_trainable()
        for one, optimizer in ((model, own), (plain, torchs)):
            step(one, optimizer, 0, number)
    expected = dict(plain.named_parameters())
    for name, value in whole(model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_group_that_cannot_be_added_is_refused(rank: int, stage: int) -> None:
    model, own, _ = sharded_of(stage)
    with pytest.raises(UsageError, match="1 of the new param group's parameters are not in the model"):
        own.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(UsageError, match="were in another group when zeroshard took"):
        own.add_param_group({"params": [model.embedding.weight]})
    model(*tokens(rank, 0)).backward()
    with pytest.raises(UsageError, match="End the step first"):
        own.add_param_group({"params": []})
    own.step()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_an_optimizer_that_was_not_named_is_refused_at_its_first_step(rank: int, stage: int) -> None:
    """It would update parameters with gradients that are each rank's own."""
    torch.manual_seed(0)
    model = Stack()
    mine, other = (
        torch.optim.AdamW([p for fqn, p in model.named_parameters() if ("blocks.1" in fqn) == second])
        for second in (False, True)
    )
    sharded = zeroshard.shard(model, mine, stage)
    elsewhere = nn.Linear(2, 2)
    theirs = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    model(*tokens(rank, 0)).backward()
    elsewhere(torch.ones(2)).sum().backward()
    theirs.step()
    with pytest.raises(UsageError, match=r"AdamW.step\(\) updates blocks.1.*shard\(model, \[one, other\], policy\)"):
        other.step()
    model.zero_grad()
    sharded.remove()
    model(*tokens(rank, 1)).backward()
    other.step()


def test_a_parameter_that_no_optimizer_lists_is_named() -> None:
    """A second optimizer would update it with this rank's gradient."""
    model = Stack()
    listed = [parameter for fqn, parameter in model.named_parameters() if "blocks.1" not in fqn]
    optimizer = torch.optim.SGD(listed, lr=0.1)
    zeroshard.shard(model, optimizer, 2)
    model(*tokens(0, 0)).backward()
    with pytest.warns(UserWarning, match=r"blocks\.1\..* has a gradient that is not averaged"):
        optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    model.blocks[1].requires_grad_(False)
    model(*tokens(0, 1)).backward()
    with no_warnings():
        optimizer.step()


def test_a_model_that_is_collected_in_the_middle_of_anothers_step() -> None:
    """torch goes through its hooks then."""

    def sharded() -> zeroshard.Sharded:
        model = nn.Linear(2, 2)
        return zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)

    def collect(*_: object) -> None:
        gc.collect()

    dropped = sharded()
    collects = register_optimizer_step_pre_hook(collect)
    other = sharded()
    is_alive = weakref.ref(dropped.model)
    del dropped
    try:
        other.model(torch.ones(2)).sum().backward()
        other.optimizer.step()
    finally:
        collects.remove()
    assert is_alive() is None
    other.remove()


def test_after_remove_its_step_is_refused() -> None:
    model, own, sharded = sharded_of(2)
    sharded.remove()
    model(*tokens(0, 0)).backward()
    with pytest.raises(UsageError, match="remove"):
        own.step()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_its_states_are_refused_by_a_parameter(rank: int, stage: int) -> None:
    """They are of shards, and `sharded.states` has those of a parameter. A copy of the optimizer is refused, too."""
    model, own, _ = sharded_of(stage)
    weight = model.blocks[0].up.weight
    calls: list[Callable[[], Any]] = [
        lambda: own.state[weight],
        lambda: own.state.get(weight),
        lambda: own.state.pop(weight, None),
        lambda: own.state.setdefault(weight, {}),
        lambda: weight in own.state,
        lambda: operator.setitem(own.state, weight, {}),
    ]
    for number in range(3):
        for call in calls:
            with pytest.raises(UsageError, match=r'sharded\.states\.get\("blocks\.0\.up\.weight", "exp_avg"\)'):
                call()
        step(model, own, rank, number)
        if number == 1:
            own.load_state_dict(own.state_dict())
    assert own.state[nn.Parameter(torch.zeros(1))] == {}
    assert len(own.state.copy()) == len(copy.copy(own.state)) == len(own.state)
    for lose in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="would lose its states"):
            lose(own)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_it_stays_the_same_object(rank: int, stage: int) -> None:
    model = Stack()
    own = torch.optim.AdamW(model.parameters())
    assert zeroshard.shard(model, own, stage).optimizer is own
    assert type(own) is torch.optim.AdamW
    assert [*map(id, own.param_groups[0]["params"])] == [*map(id, model.parameters())]


# ---------------------------------------------------------------------- several of them


def two_of(stage: int, **policy: Any) -> Any:
    """Matrices to Muon, which sees whole parameters, the rest to Adagrad, which keeps a state from the start."""
    torch.manual_seed(0)
    model = Stack()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    first, second = torch.optim.Muon(matrices, lr=0.01), torch.optim.Adagrad(rest, lr=0.1)
    how = Policy.stage(stage).offloaded(**policy) if policy and stage else Policy.stage(stage)
    return model, first, second, zeroshard.shard(model, [first, second], how, bucket_numel=100)


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("place", [None, Place.CPU])
def test_several_optimizers_are_saved_and_loaded_as_one(
    rank: int, place: Place | None, stage: int, tmp_path: Any
) -> None:
    policy = {} if place is None else {"optimizer": place}
    model, first, second, sharded = two_of(stage, **policy)

    def train(start: int) -> None:
        for number in range(start, start + 2):
            model(*tokens(rank, number)).backward()
            for one in (second, first):
                one.step()
                one.zero_grad()

    train(0)
    sharded.save(tmp_path, "one")
    kept = copy.deepcopy(sharded.optimizer.state_dict())
    halfway = whole(model)
    train(2)
    expected = whole(model)
    sharded.load(tmp_path)
    assert same(halfway, whole(model))
    train(2)
    assert same(expected, whole(model))
    assert same_on_all_ranks(expected)
    for one in (first, second):
        with pytest.raises(UsageError, match=r"sharded\.optimizer\.state_dict"):
            one.state_dict()
        with pytest.raises(UsageError, match=r"sharded\.optimizer\.state_dict"):
            one.load_state_dict({"state": {}, "param_groups": []})
    sharded.optimizer.load_state_dict(kept)
    assert [group["lr"] for group in second.param_groups] == [0.1]
    train(4)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_gradients_that_one_optimizer_dropped_take_part_in_nothing(rank: int, stage: int) -> None:
    model, first, second, sharded = two_of(stage)
    before = whole(model)
    model(*tokens(rank, 0)).backward()
    second.zero_grad()
    with pytest.raises(UsageError, match="gradient norm must come before zero_grad"):
        float(sharded.clip_grad_norm_(None))
    with pytest.raises(UsageError, match=r"before zero_grad\(\) of any"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    second.step()
    assert same(before, whole(model))
    first.step()
    changed = {fqn for fqn, value in whole(model).items() if not torch.equal(value, before[fqn])}
    assert changed == {fqn for fqn, p in model.named_parameters() if p.ndim == 2 and p.numel()}
    first.zero_grad()
    model(*tokens(rank, 1)).backward()
    second.zero_grad()
    model(*tokens(rank, 2)).backward()
    for call in (first.step, first.zero_grad):
        with pytest.raises(UsageError, match=r"a backward ran after zero_grad\(\)"):
            call()
    sharded.optimizer.zero_grad()
    model(*tokens(rank, 3)).backward()
    first.step()
    sharded.remove()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_several_optimizers_that_step_together_send_once(rank: int, stage: int) -> None:
    """With the bits of their own steps. All hooks before a step run before the update."""
    found = []
    for together in (False, True):
        model, first, second, sharded = two_of(stage)
        called = list[str]()
        first.register_step_pre_hook(lambda *_, called=called: called.append("before the first"))
        second.register_step_pre_hook(lambda *_, called=called: called.append("before the second"))
        second.register_step_post_hook(lambda *_, called=called: called.append("after the second"))
        model(*tokens(rank, 0)).backward()
        if together:
            assert sharded.optimizer.step(lambda: 7.0) == 7.0
        else:
            first.step()
            second.step()
        assert called == ["before the first", "before the second", "after the second"]
        sharded.optimizer.zero_grad()
        found.append((whole(model), transport_of(sharded).sent["all_gather"]))
        sharded.remove()
    (apart, sent_apart), (joined, sent) = found
    assert same(apart, joined)
    assert sent < sent_apart or stage in (0, 3)


def test_a_model_that_is_collected_in_the_middle_of_a_step_breaks_nothing_off() -> None:
    """torch calls hooks of all optimizers one after the other, and the garbage collector may run in any of them."""

    def take_a_model() -> None:
        model = Stack()
        zeroshard.shard(model, torch.optim.SGD(model.parameters()), 2)

    def collect(*_: Any) -> None:
        gc.collect()

    hook = register_optimizer_step_pre_hook(collect)
    try:
        take_a_model()
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        torch.optim.SGD([parameter], lr=0.5).step()
    finally:
        hook.remove()
    assert parameter.item() == 0.5


@pytest.mark.ranks(1)
def test_several_optimizers_share_no_parameter(rank: int) -> None:
    model = Stack()
    first, second = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.blocks[0].parameters())
    with pytest.raises(UsageError, match="in more than one of the optimizers"):
        zeroshard.shard(model, [first, second], 2)
    with pytest.raises(UsageError, match="the optimizer is a Linear"):
        zeroshard.shard(model, [first, nn.Linear(1, 1)], 2)  # type: ignore[list-item]
    wraps = torch.optim.SGD([model.head.weight])
    wraps.inner = torch.optim.Adagrad([model.head.weight])
    with pytest.raises(UsageError, match="SGD contains other optimizers"):
        zeroshard.shard(model, [wraps, second], 2)
    with pytest.raises(UsageError, match="LBFGS"):
        zeroshard.shard(model, [torch.optim.Muon([model.head.weight]), torch.optim.LBFGS([model.blocks[0].scale])])


@pytest.mark.ranks(2)
def test_the_states_that_adagrad_begins_with_are_not_kept(rank: int) -> None:
    """One element of each says all. The first parameter may have none."""
    model = nn.Linear(10, 10)
    model.empty = nn.Parameter(torch.ones(0))
    optimizer = torch.optim.Adagrad([model.empty, model.weight, model.bias], lr=0.1, initial_accumulator_value=0.5)
    sums = [weakref.ref(states["sum"]) for states in optimizer.state.values()]
    zeroshard.shard(model, optimizer, 2)
    before = model.bias.detach().clone()
    gc.collect()
    assert [one() for one in sums] == [None] * 3
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()  # each gradient is 1
    torch.testing.assert_close(model.bias.detach(), before - 0.1 / 1.5**0.5)


class Centred(torch.optim.SGD):
    """It subtracts the mean of each row of a gradient: what it does to an element depends on others."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None and parameter.grad.ndim > 1:
                    parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))
        return super().step(closure)


class Named(torch.optim.SGD):
    """It changes nothing."""


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_subclass_with_a_step_of_its_own_is_unknown(rank: int, stage: int) -> None:
    def trained(make: type[torch.optim.SGD], on: int | None, **options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Stack()
        optimizer = make(model.parameters(), lr=0.1)
        sharded = None if on is None else zeroshard.shard(model, optimizer, on, bucket_numel=100, **options)
        for number in range(2):
            step(model, optimizer, 0, number)
        values = whole(model) if sharded else {fqn: p.detach() for fqn, p in model.named_parameters()}
        return {fqn: value.clone() for fqn, value in values.items()}

    with pytest.raises(UsageError, match=r"Centred may need whole parameters.*pass elementwise=True"):
        trained(Centred, stage)
    plain = trained(Centred, None)
    for fqn, value in trained(Centred, stage, elementwise=False).items():
        torch.testing.assert_close(value, plain[fqn])
    assert same(trained(Named, stage), trained(torch.optim.SGD, stage))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_step_before_the_first_backward_changes_nothing(rank: int, stage: int) -> None:
    """Loops call it so that a scheduler does not warn."""
    results = []
    for is_first in (False, True):
        model, own, sharded = sharded_of(stage)
        if is_first:
            own.step()
        model(*tokens(rank, 0)).backward()
        own.step()
        results.append(whole(model))
        sharded.remove()
    assert same(results[0], results[1])


class Wrapper(torch.optim.Optimizer):
    """It calls the step of another optimizer, as Lookahead and SAM do."""

    def __init__(self, inner: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_another_optimizer_of_the_same_parameters_is_refused(rank: int, stage: int) -> None:
    model, own, _ = sharded_of(stage)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.step()  # there are no gradients
    model(*tokens(rank, 0)).backward()
    with pytest.raises(
        UsageError,
        match=r"SGD.step\(\) updates .*, but zeroshard was not given this optimizer.*call sharded.remove",
    ):
        other.step()
    for wrapper in (Wrapper(own, own.param_groups), Wrapper(own, [dict(group) for group in own.param_groups])):
        before = whole(model)
        wrapper.step()
        assert not same(whole(model), before)


def test_gradients_that_should_become_zeros_are_dropped_with_a_warning() -> None:
    model, own, sharded = sharded_of(1)
    model(*tokens(0, 0)).backward()
    with pytest.warns(UserWarning, match=r"zero_grad\(set_to_none=False\) drops gradients"):
        own.zero_grad(set_to_none=False)
    sharded.remove()


class Numbering(torch.optim.Optimizer):
    """Keeps states that are no tensors, and may raise in its own code."""

    raises = False
    kinds: set[type] = set()  # noqa: RUF012

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        state = self.state[parameter]
                        state.setdefault("largest", None)
                        state.setdefault("mode", "plain")
                        self.kinds.add(type(state.get("count", 0)))
                        state["count"] = state.get("count", 0) + 1
                        parameter.sub_(group["lr"] / state["count"] * parameter.grad)
                if self.raises:
                    raise ValueError("my own error")


def test_states_that_are_no_tensors_survive_a_change_of_what_is_trained() -> None:
    model, sharded = build(1, make_model=Untied, make_optimizer=Numbering, elementwise=True)
    for number in range(3):
        step(model, sharded, 0, number)
        if number == 0:
            model.blocks[0].up.requires_grad_(False)
            sharded.update_trainable()
    assert Numbering.kinds == {int}
    assert sharded.states.get("blocks.0.down.weight", "count") == 3
    with pytest.raises(UsageError, match="is 'plain', not numbers"):
        sharded.states.get("blocks.0.down.weight", "mode")


def test_an_error_in_its_own_code_aborts_the_step(tmp_path: Path) -> None:
    model, optimizer, sharded = sharded_of(1, Numbering, make_model=Untied, elementwise=True)
    step(model, sharded, 0, 0)
    sharded.save(tmp_path, "one")
    before = [p.detach().clone() for p in model.parameters()]
    model(*tokens(0, 1)).backward()
    optimizer.raises = True
    with pytest.raises(ValueError, match="my own error"):
        optimizer.step()
    optimizer.raises = False
    with pytest.raises(UsageError, match=r"an exception aborted optimizer\.step"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(before)]
    optimizer.zero_grad()
    sharded.load(tmp_path, "one")
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    step(model, sharded, 0, 1)
    assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_unknown_optimizer_with_states_on_disk_is_refused(stage: int, tmp_path: Path) -> None:
    policy = Policy.stage(stage).offloaded(optimizer=Place.DISK, offload=Offload(path=str(tmp_path)))
    with pytest.raises(UsageError, match=r"Numbering\.step\(\) is not torch's.*Use a torch\.optim class"):
        build(policy, make_optimizer=Numbering, elementwise=True)


def fused_with_two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    vectors = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([vectors, {"params": [p for p in parameters if p.ndim > 1]}], lr=0.01, fused=True)


KINDS = {name: OPTIMIZERS[name] for name in ("AdamW", "SGD", "Adafactor", "NAdam", "ASGD", "Rprop")}
KINDS["fused, two groups"] = fused_with_two_groups


class WithScale(nn.Sequential):
    """A model with a parameter without dimensions, as CLIP's logit_scale, and an empty one (which Adafactor does not take)."""

    def __init__(self, empty: int) -> None:
        super().__init__(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(empty, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.scale.exp()
        return y + self.nothing.sum()


PLACES = [(stage, Place.ACCELERATOR) for stage in range(4)] + [(stage, Place.DISK) for stage in range(1, 4)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stage", "place"), PLACES)
@pytest.mark.quick(4)
def test_it_loads_the_states_of_an_unsharded_optimizer(
    rank: int, place: Place, kind: str, stage: int, tmp_path: Path
) -> None:
    """A run with DDP goes on sharded, with the same bits."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for number in steps:
            update(model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number))).square().mean(), optimizer)

    torch.manual_seed(0)
    plain = WithScale(empty=int(kind == "Adafactor"))
    one = KINDS[kind]([*plain.parameters()])
    train(plain, one, range(2))
    model, states = copy.deepcopy(plain), copy.deepcopy(one.state_dict())
    train(plain, one, range(2, 4))
    other = KINDS[kind]([*model.parameters()])
    policy = Policy.stage(stage)
    if place is Place.DISK:
        policy = policy.offloaded(optimizer=place, path=str(tmp_path))
    zeroshard.shard(model, other, policy)
    groups = [[*map(id, group["params"])] for group in other.param_groups]
    other.load_state_dict(states)
    assert [[*map(id, group["params"])] for group in other.param_groups] == groups
    train(model, other, range(2, 4))
    with zeroshard.unsharded(model):
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_states_of_other_parameters_are_refused() -> None:
    def states_of(*sizes: int) -> dict[str, Any]:
        parameters = [nn.Parameter(torch.ones(size, 2)) for size in sizes]
        optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer.state_dict()

    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    zeroshard.shard(model, optimizer, 2)
    with pytest.raises(UsageError, match=r"groups of \[3\] parameters instead of \[2\]"):
        optimizer.load_state_dict(states_of(3, 3, 3))
    with pytest.raises(UsageError, match=r"exp_avg of 1\.weight has shape \(4, 2\), and the parameter \(2, 3\)"):
        optimizer.load_state_dict(states_of(3, 4))
