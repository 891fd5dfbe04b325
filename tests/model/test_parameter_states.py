"""Access from a parameter to its states in zeroshard, and parameters that are unsharded temporarily, even if born sharded."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack, sgd, tokens
from torch import nn
from twin import build, same, steps, update, whole

import zeroshard
from zeroshard import Policy, UsageError
from zeroshard.core.model_states import Range
from zeroshard.model.born import BornSharded


def filled(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Without parameters of no elements."""
    return [(fqn, parameter) for fqn, parameter in model.named_parameters() if parameter.numel()]


def born_stack() -> Stack:
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        return Stack()


# ---------------------------------------------------------------------- parameter_states


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_states_of_a_parameter_are_those_by_its_name(
    rank: int, stage: int, dtype: torch.dtype | None, ranks: int
) -> None:
    model, sharded = build(stage, precision=dtype)
    model(*tokens(rank, 0)).backward()
    for fqn, parameter in filled(model):
        states = zeroshard.parameter_states(parameter)
        assert (states.fqn, states.is_trained, states.is_sharded) == (fqn, True, stage == 3)
        for name in ("parameters", "gradients"):
            assert torch.equal(states.get(name), sharded.states.get(fqn, name))
        assert states.get("exp_avg") is None
        with pytest.raises(UsageError, match="has no state 'exp_avg' to set"):
            states.set(torch.zeros(parameter.shape), "exp_avg")
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    for fqn, parameter in filled(model):
        states = zeroshard.parameter_states(parameter)
        for name in ("parameters", "exp_avg"):
            assert name in states.names() or not states.local()
            new = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            states.set(new, name)
            assert torch.equal(sharded.states.get(fqn, name), new)
            states.set_flat(states.flat(name) * 2, name)
            assert torch.equal(states.get(name), new * 2)
        with pytest.raises(UsageError, match="holds"):
            states.set_flat(torch.zeros(parameter.numel() + 1))
    with zeroshard.unsharded(model):
        for fqn, parameter in model.named_parameters():
            assert zeroshard.parameter_states(parameter).is_here
            assert torch.equal(parameter, sharded.states.get(fqn).to(parameter.dtype))
    numbers = [zeroshard.parameter_states(parameter).number for parameter in model.parameters()]
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, numbers)
    assert len({*numbers}) == len(numbers) and all(one == numbers for one in everyones)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_this_ranks_part_of_a_gradient_is_set_before_any_rank_has_read_one(
    rank: int, stage: int, dtype: torch.dtype | None
) -> None:
    """The reductions may still run: they must not overwrite it, and their memory may be missing on this rank."""
    for fqn in ("head.weight", "blocks.0.up.weight"):
        model, sharded = build(stage, precision=dtype)
        parameter = model.get_parameter(fqn)
        states = zeroshard.parameter_states(parameter)
        new = torch.full_like(states.flat(), 7.0)
        with pytest.raises(UsageError, match=r"has no gradient to set: .*last backward"):
            states.set_flat(new, "gradients")
        model(*tokens(rank, 0)).backward()
        states.set_flat(new, "gradients")
        assert torch.equal(states.get("gradients").float(), torch.full(parameter.shape, 7.0))
        sharded.optimizer.step()
        assert torch.equal(states.get("exp_avg"), torch.full(parameter.shape, 7.0) * (1 - 0.9))


def test_of_a_parameter_that_no_model_holds() -> None:
    model, sharded = build(3)
    other = Stack()
    for parameter in (nn.Parameter(torch.ones(3)), other.blocks[0].up.weight, copy.deepcopy(model).blocks[0].up.weight):
        with pytest.raises(UsageError, match="is not in any sharded model"):
            zeroshard.parameter_states(parameter)
    sharded.remove()
    with pytest.raises(UsageError, match="is not in any sharded model"):
        zeroshard.parameter_states(model.blocks[0].up.weight)


@pytest.mark.ranks(2)
def test_of_a_frozen_one_and_of_one_born_sharded(rank: int) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = born_stack()
    for (_, mine), (_, expected) in zip(filled(model), filled(plain), strict=True):
        states = zeroshard.parameter_states(mine)
        assert (states.fqn, states.is_trained, states.is_sharded, states.is_here) == ("", False, True, False)
        assert torch.equal(states.get(), expected.detach())
        assert states.get("exp_avg") is None
        states.set(expected.detach() + 1)
        states.set_local([Range(part.start, part.tensor + 1) for part in states.local()])
        assert torch.equal(states.get(), expected.detach() + 1 + 1)
        assert isinstance(mine, BornSharded)
    model.blocks[0].requires_grad_(False)
    sharded = zeroshard.shard(model, sgd([p for p in model.parameters() if p.requires_grad]), 3)
    states = zeroshard.parameter_states(model.blocks[0].up.weight)
    assert not states.is_trained and states.get("gradients") is None
    value = plain.blocks[0].up.weight.detach() + 1 + 1
    assert torch.equal(states.get(), value)
    del sharded
    gc.collect()
    assert torch.equal(states.get(), value)  # the model keeps what it needs


# ---------------------------------------------------------------------- unsharded


def models_of(kind: str) -> Stack:
    return born_stack() if kind == "born" else build(3 if kind == "stage 3" else 2)[0]


KINDS = ["born", "stage 3", "stage 2"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_modifier_ranks_changes_count(rank: int, kind: str) -> None:
    model = models_of(kind)
    before = whole(model)
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    # A generator, duplicates, None, and a stranger; in another order on each rank.
    given = [first, None, second, first, nn.Parameter(torch.ones(2))]
    with zeroshard.unsharded((p for p in given[:: 1 - 2 * rank]), modifier_rank=1):
        assert isinstance(first, nn.Parameter) and not isinstance(first, BornSharded)
        assert torch.equal(first, before["blocks.0.up.weight"])
        with torch.no_grad():
            first.fill_(rank + 1.0)
    after = whole(model)
    assert bool((after["blocks.0.up.weight"] == 2).all())
    assert torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])


@pytest.mark.ranks(2)
def test_blocks_of_parameters_that_are_born_sharded_nest(rank: int) -> None:
    """By the rules that core/test_nested_blocks.py tests of models in training."""
    model = born_stack()
    weight = model.blocks[0].up.weight
    with zeroshard.unsharded(model):
        with zeroshard.unsharded(weight, modifier_rank=1):
            weight.data = torch.full_like(weight, rank)
        with zeroshard.unsharded(weight, modifier_rank=0), torch.no_grad():
            weight.add_(2.0 + rank)
        assert bool((weight == 3).all())  # kept, and no change of the outer one's
    with zeroshard.unsharded(weight, modifier_rank=0):
        with zeroshard.unsharded(model):
            pass
        if rank == 0:
            weight.data.fill_(4.0)
    before = whole(model)
    assert bool((before["blocks.0.up.weight"] == 4).all())
    for inner in ([], [model]):  # an inner block does not store what the outer one reports
        for write in (
            lambda: weight.detach().fill_(5.0),
            lambda: setattr(weight, "data", torch.full_like(weight, 5.0)),
        ):
            with pytest.raises(UsageError, match="without a modifier rank"), zeroshard.unsharded(weight):
                write()
                with zeroshard.unsharded(inner):
                    pass
            assert same(whole(model), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["born", "stage 3"])
def test_an_exception_leaves_what_rests(rank: int, kind: str) -> None:
    model = models_of(kind)
    before, weight = whole(model), model.blocks[0].up.weight
    for modifier in (None, 0):
        with pytest.raises(KeyError), zeroshard.unsharded(model, modifier), torch.no_grad():
            if rank == 0:
                weight.fill_(5.0)
            raise KeyError
        assert not zeroshard.parameter_states(weight).is_here
        assert same(whole(model), before)


@pytest.mark.ranks(2)
def test_both_kinds_at_once(rank: int) -> None:
    trained, born = build(3)[0], born_stack()
    pairs = zip(trained.parameters(), born.parameters(), strict=True)
    with zeroshard.unsharded([*trained.parameters(), *born.parameters()], modifier_rank=0):
        if rank == 0:
            for mine, other in pairs:
                mine.data.copy_(other.data * 2)
    ours, others = whole(trained), whole(born)
    assert all(torch.equal(ours[fqn], value * 2) for fqn, value in others.items())


@pytest.mark.ranks(2)
def test_modules_and_parameters_are_unsharded_together(rank: int) -> None:
    model = build(3)[0]
    other = model.blocks[2].up.weight
    with zeroshard.unsharded([model.blocks[0], None, other]):
        assert all(zeroshard.parameter_states(one).is_here for one in (other, *model.blocks[0].parameters()))
        assert not zeroshard.parameter_states(model.blocks[1].up.weight).is_here


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_are_refused(rank: int, kind: str) -> None:
    model = models_of(kind)
    for target, options, told in (
        (["blocks.0.up.weight"], {}, r"unsharded\(\) got a str in its target. Pass modules and"),
        (model.named_parameters(), {}, r"unsharded\(\) got a tuple in its target. Pass modules and"),
        (model, {"modifier_rank": 2}, "are 0 to 1"),
        (model, {"modifier_rank": -1}, "are 0 to 1"),
        (model, {"undo": True}, r"Change a copy .*named_weights\(merge_adapters=True\)"),
    ):
        with pytest.raises(UsageError, match=told):
            zeroshard.unsharded(target, **options).__enter__()
    if kind == "born":
        with zeroshard.unsharded(model), pytest.raises(UsageError, match=r"unsharded.*outside"):
            zeroshard.shard(model, None)


@pytest.mark.ranks(2)
def test_one_born_sharded_may_take_another_shape_and_dtype(rank: int) -> None:
    """As a resized embedding does."""
    model = born_stack()
    weight = model.blocks[0].up.weight
    with zeroshard.unsharded(weight, modifier_rank=0):
        weight.data = torch.full((5, 3), rank + 1.0, dtype=torch.bfloat16)
    assert weight.shape == (5, 3)
    assert torch.equal(weight.detach().clone(), torch.ones(5, 3, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="same shape and dtype"), zeroshard.unsharded(weight, modifier_rank=0):
        if rank == 0:
            weight.data = torch.ones(4)


# ---------------------------------------------------------------------- sharded_init and cut


class Rooted(nn.Module):
    """The root holds parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(7))
        self.inner = nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.rand(2, 3))
        self.register_buffer("mean", torch.rand(3))


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_roots_own_parameters_are_cut_too(rank: int, dtype: torch.dtype | None, ranks: int) -> None:
    torch.manual_seed(0)
    plain = Rooted().to(dtype)
    torch.manual_seed(0)
    with zeroshard.sharded_init(enabled=False):
        assert not any(isinstance(p, BornSharded) for p in Rooted().parameters())
    torch.manual_seed(0)
    with zeroshard.sharded_init(dtype=dtype), zeroshard.sharded_init(dtype=dtype):
        model = Rooted()
        assert torch.empty(1).dtype is (dtype or torch.float32)
    assert torch.empty(1).dtype is torch.float32
    assert all(isinstance(p, BornSharded) for p in model.parameters())
    found = whole(model)
    assert {value.dtype for value in found.values()} == {dtype or torch.float32}
    if dtype is None:  # in 16 bits torch draws other numbers
        assert same(found, dict(plain.named_parameters()))
    with pytest.raises(KeyError), zeroshard.sharded_init(dtype=torch.float64):
        raise KeyError
    assert torch.empty(1).dtype is torch.float32


@pytest.mark.ranks(2)
def test_what_is_there_is_cut(rank: int) -> None:
    torch.manual_seed(rank)
    model = Stack()
    kept = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    zeroshard.cut(model)
    zeroshard.cut(model)  # a second time: nothing
    assert all(isinstance(p, BornSharded) for p in model.parameters())
    values = whole(model)
    assert rank == 1 or same(kept, values)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="meta"):
        zeroshard.cut(empty)


@pytest.mark.ranks(2)
def test_state_dicts_may_stay_cut(rank: int) -> None:
    torch.manual_seed(0)
    with zeroshard.sharded_init(detached_stay_cut=True):
        model = Stack()
    kept = model.state_dict()
    weight = model.blocks[0].up.weight
    assert isinstance(kept["blocks.0.up.weight"], BornSharded)
    assert not kept["blocks.0.up.weight"].requires_grad
    with torch.no_grad():
        kept["blocks.0.up.weight"].fill_(2.0)
    assert bool((weight == 2).all()), "as with torch, it is the same memory"
    with zeroshard.unsharded(weight, modifier_rank=0):
        if rank == 0:
            weight.data.fill_(3.0)
            assert bool((kept["blocks.0.up.weight"] == 3).all()), "inside, without the other ranks"
    assert bool((kept["blocks.0.up.weight"] == 3).all())
    other = Stack()
    other.load_state_dict(kept)
    assert bool((other.blocks[0].up.weight == 3).all())
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    assert bool((torch.load(file)["blocks.0.up.weight"] == 3).all())


# ---------------------------------------------------------------------- attributes, and borrowed parameters


class Shown:
    @property
    def place(self) -> str:
        return zeroshard.parameter_states(self).fqn  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_parameters_show_attributes_where_they_are_sharded(rank: int, stage: int) -> None:
    model, sharded = build(stage, attributes=Shown)
    weight = model.blocks[0].up.weight

    def check() -> None:
        assert isinstance(weight, nn.Parameter)
        assert hasattr(weight, "place") is (stage == 3)
        assert stage != 3 or weight.place == "blocks.0.up.weight"

    check()
    with zeroshard.unsharded(model):
        check()
        assert type(weight * 1) is torch.Tensor
        twin = copy.deepcopy(model)
        assert type(twin.blocks[0].up.weight) is nn.Parameter
        assert torch.equal(twin.blocks[0].up.weight, weight)
    seen = list[bool]()
    model.blocks[0].register_forward_hook(lambda *_: seen.append(hasattr(weight, "place")))
    for number in range(2):
        model(*tokens(rank, number)).backward()
        check()
        sharded.optimizer.step()
        check()
        sharded.optimizer.zero_grad()
        check()
    assert seen == [stage == 3] * 2
    plain, its = build(stage)
    steps(plain, its, rank, range(2))
    assert same(whole(model), whole(plain)), "they change no number"
    sharded.remove()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not hasattr(weight, "place")


class Borrows(nn.Module):
    """The second block uses the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        lender: Any = self.blocks[0]
        return self.blocks[1](x).matmul(lender.weight).square().mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_borrowed_parameter_is_whole_in_the_borrowers_forward(rank: int, stage: int) -> None:
    def run(stage: int, borrow: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Borrows()
        borrowed = zeroshard.borrow(model, model.blocks[0].weight) if borrow else None
        sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(stage))
        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
            update(model(x), sharded.optimizer)
            assert stage != 3 or not zeroshard.parameter_states(model.blocks[0].weight).is_here
        if borrowed is not None:
            borrowed.remove()
        if stage == 3:
            with pytest.raises(UsageError, match="sharded at rest"):
                model(x)
        return list(whole(model).values())

    assert all(map(torch.equal, run(stage, True), run(0, False)))


@pytest.mark.ranks(2)
@pytest.mark.full
def test_attributes_cost_no_compilation(rank: int) -> None:
    from torch._dynamo.utils import counters

    def compiled() -> Stack:
        model = Stack()
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    graphs = []
    for attributes in (None, Shown):
        torch._dynamo.reset()
        counters.clear()
        steps(*build(3, make_model=compiled, attributes=attributes), rank, range(2))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_states_inside_a_block_whose_changes_are_undecided_are_refused(
    rank: int, stage: int, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """They would be of one rank only."""
    model, sharded = build(stage, precision=dtype)
    weight = model.blocks[0].up.weight
    before = sharded.states.get("blocks.0.up.weight")
    sharded.save(tmp_path / "checkpoints", "first")
    with (
        pytest.raises(UsageError, match="without a modifier rank"),
        zeroshard.unsharded(model),
        torch.no_grad(),
    ):
        assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)
        weight.mul_(2)
        if stage == 3:
            assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)
        weight.div_(2)
    with zeroshard.unsharded(model, modifier_rank=0):
        for call in (
            lambda: sharded.states, zeroshard.parameter_states(weight).get,
            lambda: sharded.save(tmp_path / "checkpoints", "one"), lambda: sharded.export(tmp_path / "export"),
            lambda: sharded.load(tmp_path / "checkpoints"),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=r"inside unsharded\(modifier_rank=...\), where changes"):
                call()
    assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)
