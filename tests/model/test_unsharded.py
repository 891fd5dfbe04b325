"""Parameters that are unsharded temporarily or by a borrower, even if born sharded, and their attributes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Stack, sgd, tokens
from test_sharded_init import born_stack
from torch import nn
from twin import build, same, steps, update, whole

import zeroshard
from zeroshard import UsageError
from zeroshard.model.born import BornSharded


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
        _, sharded = build(stage, make_model=lambda: model, make_optimizer=sgd)
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
