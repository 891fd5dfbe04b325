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
from models import Stack, Untied, sgd, tokens
from oracles import average_gradients
from quiet import no_warnings
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from twin import FEW_STAGES, build, close, plain_torch, same, same_on_all_ranks, step, steps, update, whole

import zeroshard
from zeroshard import Offload, Place, Policy, Precision, UsageError

ADAMW = partial(torch.optim.AdamW, lr=0.01)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "foreach Adam": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "fused AdamW": partial(ADAMW, fused=True),
    "SGD": sgd,
    "AdamW": ADAMW,
}
"""`test_states_of_a_plain_run.py` trains by all the others."""


def sharded_of(
    policy: Policy | int, make: Callable[..., torch.optim.Optimizer] = ADAMW, **options: Any
) -> tuple[Any, Any, zeroshard.Sharded]:
    """Return a model, the user's optimizer, and what `shard` returns."""
    model, sharded = build(policy, make_optimizer=make, bucket_numel=100, **options)
    return model, sharded.optimizer, sharded


def assert_equal_masters(sharded: zeroshard.Sharded, plain: nn.Module) -> None:
    for name, parameter in plain.named_parameters():
        assert torch.equal(sharded.states.get(name), parameter), name


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_its_step_is_the_sharded_step(rank: int, optimizer: str, stage: int) -> None:
    """The one line: clipping, `step` and `zero_grad` are those of plain PyTorch, with the same bits at every stage."""
    make = OPTIMIZERS[optimizer]

    def trained(model: nn.Module, own: torch.optim.Optimizer, backward: Callable[[int], None]) -> dict[str, Tensor]:
        for number in range(3):
            backward(number)
            nn.utils.clip_grad_norm_(own.param_groups[0]["params"], 0.5)
            own.step()
            own.zero_grad()
            assert all(parameter.grad is None for parameter in own.param_groups[0]["params"])
        return whole(model)

    def at_stage(stage: int) -> dict[str, Tensor]:
        model, own, _ = sharded_of(stage, make)
        found = trained(model, own, lambda number: model(*tokens(rank, number)).backward())
        assert [*map(id, own.param_groups[0]["params"])] == [*map(id, model.parameters())]
        return found

    found = at_stage(stage)
    if stage:
        assert same(found, at_stage(0))
        return
    model, own = plain_torch(lambda found: make([one for one in found if one.numel()]))  # for Adafactor
    parameters = [*model.parameters()]

    def backward(number: int) -> None:
        average_gradients(parameters, 2, lambda rank: model(*tokens(rank, number)).backward())

    close(found, trained(model, own, backward), atol=1e-5)  # the norm is summed in another order


@pytest.mark.ranks(2)
@FEW_STAGES
def test_schedulers_hooks_and_closures_act_as_ever(rank: int, stage: int) -> None:
    """Made before `shard` or after, hooks run once a step, and those after it read updated parameters."""
    model, optimizer = plain_torch(ADAMW)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(other: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert [*map(id, other.param_groups[0]["params"])] == [*map(id, model.parameters())]
            calls.append((name, whole(model)["embedding.weight"].sum()))

        return hook

    optimizer.register_step_pre_hook(note("early before"))
    optimizer.register_step_post_hook(note("early after"))
    assert zeroshard.shard(model, optimizer, stage).optimizer is optimizer
    assert type(optimizer) is torch.optim.AdamW
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(note("late after"))
    for number in range(2):
        if number == 1:
            optimizer.register_step_pre_hook(note("late before"))
        calls.clear()

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = model(*tokens(rank, number))
            loss.backward()
            return loss

        old = whole(model)["embedding.weight"].sum()
        assert isinstance(optimizer.step(closure), Tensor)
        new = whole(model)["embedding.weight"].sum()
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
    model, optimizer, _ = sharded_of(stage, sgd)
    before = whole(model)
    sizes = []
    optimizer.register_step_pre_hook(lambda own, *_: own.param_groups[0].update(lr=0.0))
    handle = register_optimizer_step_pre_hook(lambda own, *_: sizes.append(len(own.param_groups[0]["params"])))
    step(model, optimizer, rank, 0)
    handle.remove()
    assert sizes == [len(before)] and same(before, whole(model))


class CountingItself(torch.optim.Optimizer):
    """Keeps counts in attributes, as numbers, in a list, in a tensor and in its groups, and looks at a group's first parameter."""

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
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.of_each[id(parameter)] = self.of_each.get(id(parameter), 0) + 1
                    state = self.state[parameter]
                    mean = state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                    parameter.sub_(
                        mean / (1 - 0.9**self.count), alpha=group["lr"] / (self.counts[0] + float(self.total))
                    )


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


@FEW_STAGES
@pytest.mark.parametrize("place", [Place.ACCELERATOR, Place.CPU])
@pytest.mark.parametrize("cls", [CountingItself, Twice])
@pytest.mark.quick(2)
def test_a_step_of_its_own_runs_once(cls: type[Any], place: Place, stage: int) -> None:
    """However many sub-groups there are, and although torch runs an object's hooks at each call of a step that it extends."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # torch wraps the step of a class when it is made first
    policy = Policy.stage(stage)
    if place is Place.CPU and stage:
        policy = policy.offloaded(optimizer=place, offload=Offload(sub_group_numel=400))
    make = partial(cls, lr=0.1)
    model, optimizer, sharded = sharded_of(policy, make, elementwise=True)
    plain, expected = plain_torch(make)
    for one, counted in ((model, optimizer), (plain, expected)):
        steps(one, counted, 0, range(3))
        (group,) = counted.param_groups
        assert len(group["params"]) == len(list(plain.parameters()))
        if cls is CountingItself:
            assert (counted.count, counted.log, float(counted.total), counted.last) == (3, [3], 3.0, 3)
            assert (float(group["seen"]), group["count"]) == (3.0, 3) and set(counted.of_each.values()) == {3}
    assert_equal_masters(sharded, plain)


class Evaluates(torch.optim.SGD):
    """It evaluates its closure itself, so often, and takes an argument of its own."""

    times, scales = 1, ()

    def step(self, closure: Callable[[], Any], scale: float = 1.0) -> Any:  # type: ignore[override]
        self.scales = (*self.scales, scale)
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
    plain, expected = plain_torch(make)
    for number in range(2):
        losses = []
        for one, its in ((model, optimizer), (plain, expected)):

            def closure(one: nn.Module = one, its: torch.optim.Optimizer = its, number: int = number) -> Tensor:
                its.zero_grad()
                loss = one(*tokens(0, number))
                loss.backward()
                return loss.detach()

            losses.append(its.step(closure, 0.25) if number else its.step(closure, scale=0.5))
        assert torch.equal(*losses)
    assert_equal_masters(sharded, plain)
    assert optimizer.scales == (0.5, 0.25)
    optimizer.zero_grad()
    optimizer.times = 2
    with pytest.raises(UsageError, match=r"Evaluates\.step evaluates its closure more than once"):
        optimizer.step(lambda: model(*tokens(0, 2)).backward())


CLIPS: dict[str, Callable[[nn.Module, Any], object]] = {
    "not at all": lambda model, sharded: None,
    "torch's": lambda model, sharded: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "ours": lambda model, sharded: sharded.clip_grad_norm_(0.1),
}


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("clips_first", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_parameter_whose_gradient_is_set_to_none_is_left_out_of_the_step(
    rank: int, clip: str, clips_first: bool, stage: int
) -> None:
    """As in DINO, which cancels the last layer's gradients in its first epoch. Its weights and states must not move."""

    def trained(loss: Callable[[int], Tensor], model: Stack, optimizer: Any, clip: Callable[[], object]) -> Any:
        for number in range(4):
            loss(number).backward()
            if clips_first:
                clip()
            if number % 2:
                model.head.weight.grad = model.blocks[0].up.bias.grad = None
            if not clips_first:
                clip()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    plain, optimizer = plain_torch(ADAMW)
    mean = lambda number: (plain(*tokens(0, number)) + plain(*tokens(1, number))) / 2  # noqa: E731
    by_torch = CLIPS["torch's" if clip == "ours" else clip]
    expected = trained(mean, plain, optimizer, lambda: by_torch(plain, None))
    model, own, sharded = sharded_of(stage)
    found = trained(lambda number: model(*tokens(rank, number)), model, own, lambda: CLIPS[clip](model, sharded))
    close(found, expected, rtol=1e-5)
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
@pytest.mark.parametrize("made_by", ["both", "one", "one, after the norm"])
def test_a_gradient_that_some_ranks_set_to_none_is_refused_by_name(rank: int, made_by: str, stage: int) -> None:
    """A rank that has not made it has a part of its mean, and no `grad` that could be set to None."""
    model, sharded = build(stage, make_model=Parts, units=UNITS[stage])
    model(torch.ones(2, 5), *((0, 1) if rank == 0 or made_by == "both" else (0,))).backward()
    is_late = made_by == "one, after the norm"
    if is_late:
        sharded.clip_grad_norm_(1.0)
    if rank == 0:
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

    def trained(model: Parts, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        model.units[0].weight.grad.mul_(0.25)  # type: ignore[operator,union-attr]
        if drops:
            model.units[0].bias.grad = None
        optimizer.step()
        return whole(model)

    plain = Parts()
    mean = (plain(inputs[0], 0) + plain(inputs[1], 0, 1)) / 2
    expected = trained(plain, torch.optim.SGD(plain.parameters(), lr=0.5), mean)
    model, sharded = build(stage, make_model=Parts, make_optimizer=partial(sgd, lr=0.5), units=UNITS[stage])
    close(trained(model, sharded.optimizer, model(inputs[rank], *range(rank + 1))), expected, rtol=1e-5)


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
def test_gradients_after_a_step_are_not_reduced(rank: int, stage: int) -> None:
    """No step will use them: `zero_grad` comes first."""
    model, own, sharded = sharded_of(stage)
    model(*tokens(rank, 0)).backward()
    own.step()
    sharded.comm_report()
    model(*tokens(rank, 1)).backward()
    assert "reduce_scatter" not in sharded.comm_report()


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_group_of_frozen_parameters_may_be_added(rank: int, stage: int) -> None:
    """They are trained from the moment they are unfrozen, as in plain PyTorch."""

    def trained(stage: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Stack()
        model.blocks[1].requires_grad_(False)
        optimizer = ADAMW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        sharded = None if stage is None else zeroshard.shard(model, optimizer, stage)
        for number in range(4):
            if number == 1:
                optimizer.add_param_group({"params": list(model.blocks[1].parameters()), "lr": 0.01})
            if number == 2:
                optimizer.load_state_dict(optimizer.state_dict())
                model.blocks[1].requires_grad_(True)
                if sharded:
                    sharded.update_trainable()
            step(model, optimizer, 0, number)
        return whole(model)

    close(trained(stage), trained(None), atol=1e-5)


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("trains", ["the rest", "the same"])
def test_an_optimizer_that_was_not_named_is_refused_at_its_first_step(rank: int, trains: str, stage: int) -> None:
    """It would update parameters with gradients that are each rank's own."""
    torch.manual_seed(0)
    model = Stack()
    other = ADAMW(model.blocks[1].parameters())
    mine = ADAMW([p for fqn, p in model.named_parameters() if trains == "the same" or "blocks.1" not in fqn])
    sharded = zeroshard.shard(model, mine, stage)
    elsewhere = nn.Linear(2, 2)
    theirs = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
    other.step()  # there are no gradients
    model(*tokens(rank, 0)).backward()
    elsewhere(torch.ones(2)).sum().backward()
    theirs.step()
    remedy = r"shard\(model, \[one, other\], policy\)" if trains == "the rest" else r"call sharded\.remove"
    with pytest.raises(UsageError, match=rf"AdamW.step\(\) updates blocks.1.*not given this optimizer.*{remedy}"):
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


@pytest.mark.parametrize("is_last", [True, False])
def test_a_model_that_is_collected_in_the_middle_of_a_step_breaks_nothing_off(is_last: bool) -> None:
    """torch goes through the hooks of all optimizers, and the garbage collector may run in any of them."""

    def sharded() -> zeroshard.Sharded:
        return build(1, make_model=partial(nn.Linear, 2, 2), make_optimizer=partial(torch.optim.SGD, lr=0.1))[1]

    def collect(*_: object) -> None:
        gc.collect()

    handles = [] if is_last else [register_optimizer_step_pre_hook(collect)]
    dropped, other = sharded(), sharded()
    handles += [register_optimizer_step_pre_hook(collect)] if is_last else []
    is_alive = weakref.ref(dropped.model)
    del dropped
    try:
        other.model(torch.ones(2)).sum().backward()
        before = other.model.bias.detach().clone()
        other.optimizer.step()
    finally:
        handles[0].remove()
    assert is_alive() is None
    torch.testing.assert_close(other.model.bias.detach(), before - 0.1)
    other.remove()


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


# ---------------------------------------------------------------------- several of them


def two_of(stage: int) -> Any:
    """Matrices to Muon, which sees whole parameters, the rest to Adagrad, which keeps a state from the start."""
    torch.manual_seed(0)
    model = Stack()
    first = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)
    second = torch.optim.Adagrad([p for p in model.parameters() if p.ndim != 2], lr=0.1)
    return model, first, second, zeroshard.shard(model, [first, second], stage, bucket_numel=100)


@pytest.mark.ranks(2)
def test_the_state_dict_of_several_optimizers_is_that_of_all(rank: int) -> None:
    """`promises/test_fuzz.py` saves and loads it."""
    _, first, second, sharded = two_of(2)
    sharded.optimizer.load_state_dict(copy.deepcopy(sharded.optimizer.state_dict()))
    empty: dict[str, Any] = {"state": {}, "param_groups": []}
    for one in (first, second):
        for call in (one.state_dict, partial(one.load_state_dict, empty)):
            with pytest.raises(UsageError, match=r"sharded\.optimizer\.state_dict"):
                call()


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
    (apart, sent_apart), (joined, sent) = found
    assert same(apart, joined) and same_on_all_ranks(joined)
    assert sent < sent_apart or stage in (0, 3)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_gradients_that_one_optimizer_dropped_take_part_in_nothing(rank: int, stage: int) -> None:
    """Neither in a norm nor in a step, and no backward may come between the two calls of `zero_grad`."""
    model, first, second, sharded = two_of(stage)
    before = whole(model)
    model(*tokens(rank, 0)).backward()
    second.zero_grad()
    for clip in (partial(sharded.clip_grad_norm_, None), partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)):
        with pytest.raises(UsageError, match=r"must come before zero_grad\(\) of any"):
            float(clip())
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


@pytest.mark.ranks(1)
def test_several_optimizers_share_no_parameter(rank: int) -> None:
    model = Stack()
    first, second = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.blocks[0].parameters())
    wraps = torch.optim.SGD([model.head.weight])
    wraps.inner = torch.optim.Adagrad([model.head.weight])
    of_all = torch.optim.LBFGS([model.blocks[0].scale])
    for optimizers, message in (
        ([first, second], "in more than one of the optimizers"),
        ([first, nn.Linear(1, 1)], "the optimizer is a Linear"),
        ([wraps, second], "SGD contains other optimizers"),
        ([torch.optim.Muon([model.head.weight]), of_all], "LBFGS"),
    ):
        with pytest.raises(UsageError, match=message):
            zeroshard.shard(model, optimizers, 2)  # type: ignore[arg-type]


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


class Named(torch.optim.SGD):
    """It changes nothing."""


def test_a_subclass_with_a_step_of_its_own_is_unknown() -> None:
    with pytest.raises(UsageError, match=r"Twice may need whole parameters.*pass elementwise=True"):
        build(2, make_optimizer=partial(Twice, lr=0.1))
    build(2, make_optimizer=partial(Named, lr=0.1))


def test_an_optimizer_of_unknown_states_has_none_on_disk(tmp_path: Path) -> None:
    policy = Policy.stage(1).offloaded(optimizer=Place.DISK, path=str(tmp_path))
    with pytest.raises(UsageError, match=r"Numbering\.step\(\) is not torch's.*Use a torch\.optim class"):
        build(policy, make_optimizer=Numbering, elementwise=True)


class Wrapper(torch.optim.Optimizer):
    """It calls the step of another optimizer, as Lookahead and SAM do."""

    def __init__(self, inner: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.ranks(2)
@FEW_STAGES
def test_an_optimizer_that_calls_ours_steps(rank: int, stage: int) -> None:
    model, own, _ = sharded_of(stage)
    model(*tokens(rank, 0)).backward()
    for wrapper in (Wrapper(own, own.param_groups), Wrapper(own, [dict(group) for group in own.param_groups])):
        before = whole(model)
        wrapper.step()
        assert not same(whole(model), before)


def test_gradients_that_should_become_zeros_are_dropped_with_a_warning() -> None:
    model, own, _ = sharded_of(1)
    model(*tokens(0, 0)).backward()
    with pytest.warns(UserWarning, match=r"zero_grad\(set_to_none=False\) drops gradients"):
        own.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in model.parameters())


class Numbering(torch.optim.Optimizer):
    """Keeps states that are no tensors."""

    kinds: set[type] = set()  # noqa: RUF012

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state |= {"largest": None, "mode": "plain"}
                    self.kinds.add(type(state.get("count", 0)))
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(0.1 / state["count"] * parameter.grad)


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


def test_states_of_other_parameters_are_refused() -> None:
    def make(*widths: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(2, width, bias=False) for width in widths))

    def states_of(*widths: int) -> dict[str, Any]:
        model = make(*widths)
        optimizer = torch.optim.AdamW(model.parameters())
        update(torch.stack([parameter.sum() for parameter in model.parameters()]).sum(), optimizer)
        return optimizer.state_dict()

    _, sharded = build(2, make_model=lambda: make(3, 2))
    with pytest.raises(UsageError, match=r"groups of \[3\] parameters instead of \[2\]"):
        sharded.optimizer.load_state_dict(states_of(3, 3, 3))
    with pytest.raises(UsageError, match=r"exp_avg of 1\.weight has shape \(4, 2\), and the parameter \(2, 2\)"):
        sharded.optimizer.load_state_dict(states_of(3, 4))
