"""Models that are born sharded: the same values, and no rank ever holds a whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES
from memory import allocated_peak
from models import MODELS, Stack
from ranks import on_ranks
from torch import nn
from twin import same, steps

import zeroshard
from zeroshard import Policy, UsageError
from zeroshard.model.born import BornSharded
from zeroshard.testing.gpt import GPT, GPTConfig


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


@pytest.mark.ranks("ranks")
@pytest.mark.quick(8)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_the_numbers_are_the_same(rank: int, name: str, ranks: int) -> None:
    make = MODELS[name] if name in MODELS else FAMILIES[name][0]
    torch.manual_seed(0)
    plain = values(make())
    after = torch.rand(1)
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        model = make()
    assert torch.equal(torch.rand(1), after), "as many random numbers were drawn"
    born = values(model)
    assert born.keys() == plain.keys()
    for fqn, value in plain.items():
        assert torch.equal(born[fqn], value), fqn
    twin = copy.deepcopy(model)
    assert same(values(twin), plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_it_trains_as_one_that_was_whole(rank: int, stage: int) -> None:
    def run(born: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        if born:
            with zeroshard.sharded_init():
                model = Stack()
        else:
            model = Stack()
        shapes = [(p.shape, p.requires_grad, p.dtype) for p in model.parameters()]
        sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), Policy.stage(stage))
        assert shapes == [(p.shape, p.requires_grad, p.dtype) for p in model.parameters()]
        assert not any(isinstance(p, BornSharded) for p in model.parameters())
        steps(model, sharded, rank, range(3))
        with zeroshard.unsharded(model):
            return values(model)

    plain, born = run(False), run(True)
    assert same(born, plain)


@pytest.mark.ranks(2)
def test_what_is_written_after_the_cut_counts(rank: int) -> None:
    with zeroshard.sharded_init():
        model = Stack()
    with torch.no_grad():
        model.blocks[0].up.weight.fill_(3.0)
        model.blocks[0].up.bias.data.zero_()
        nn.init.constant_(model.blocks[1].up.weight, 2.0)
        model.blocks[1].up.bias.copy_(model.blocks[2].up.bias.new_ones(33))
    model.blocks[2].up.weight.requires_grad_(False)
    assert "shape" not in repr(model)
    sharded = zeroshard.shard(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), Policy.stage(3)
    )
    with zeroshard.unsharded(model):
        assert bool((model.blocks[0].up.weight == 3).all())
        assert bool((model.blocks[0].up.bias == 0).all())
        assert bool((model.blocks[1].up.weight == 2).all())
        assert bool((model.blocks[1].up.bias == 1).all())
    assert not model.blocks[2].up.weight.requires_grad
    del sharded


@pytest.mark.ranks(2)
@pytest.mark.parametrize("source", [0, 1])
def test_where_ranks_initialise_differently_one_ranks_values_count(rank: int, source: int) -> None:
    """As a parent's constructor does that initialises everything once more."""

    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            module.weight[0].zero_()
            module.weight.data.mul_(2)

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(Stack())
        model.apply(initialise)
        return model

    expected = build(source)
    with zeroshard.sharded_init(source=source):
        model = build(rank)
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    with zeroshard.unsharded(model):
        assert same(values(expected), values(model))


def by_views(model: nn.Module) -> None:
    """What initialisers do that hold views of several parameters, and write to them later."""
    first, second, third = (block.up.weight for block in model.blocks)
    with torch.no_grad():
        a, b = first.data.view(-1), second.data.view(-1)
        a.fill_(1.5)
        b.fill_(2.5)
        rows = [third[:2], first[3:5]]  # of one that is open, once more
        arrays = [third.numpy()]
        rows[0].zero_()
        rows[1].mul_(2)
        arrays[0][4, 5] = 7.0
        assert float(third[4, 5]) == 7
        flat = nn.utils.parameters_to_vector([first, second, third])
        a[0] = flat.sum()
        del a, b
        first.add_(1)
        last = rows[1][1][0:1]  # a view of a view, whose views are gone
        del rows
        second.mul_(2)
        last.fill_(-1)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_written_to_views_of_several_counts(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    plain = Stack()
    by_views(plain)
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        model = Stack()
        by_views(model)
    by_views(plain)
    by_views(model)
    for fqn, value in values(plain).items():
        assert torch.equal(dict(model.named_parameters())[fqn].detach().clone(), value), fqn
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(3))
    with zeroshard.unsharded(model):
        assert all(torch.equal(p, values(plain)[fqn]) for fqn, p in model.named_parameters())


@pytest.mark.ranks(2)
def test_ranks_need_not_drop_their_views_together(rank: int) -> None:
    """When Python frees a view is each rank's own affair: what is sent must not depend on it."""
    with zeroshard.sharded_init():
        model = Stack()
    kept = []
    with torch.no_grad():
        for block in model.blocks:
            view = block.up.weight.view(-1)
            view.fill_(4.0)
            if rank == 0:
                kept.append(view)
            del view
        model.blocks[0].up.bias.zero_()
        for block in model.blocks:
            block.up.weight.add_(1)
    assert all(bool((view == 5).all()) for view in kept)
    assert all(bool((block.up.weight.detach() == 5).all()) for block in model.blocks)
    model.bfloat16()
    assert all(bool((block.up.weight.detach() == 5).all()) for block in model.blocks)


@pytest.mark.full
def test_the_whole_never_exists() -> None:
    """24 blocks on 4 ranks: the peak of tensors is the shards, one block whole, and what the layout of one needs."""
    config = GPTConfig(layers=24, width=512, heads=8)
    block = 4 * 12 * 512**2  # bytes of a block's parameters
    numel = sum(p.numel() for p in _meta(config).parameters())

    def body(rank: int) -> Any:
        model: nn.Module = nn.Module()

        def construct() -> None:
            nonlocal model
            with zeroshard.sharded_init():
                model = GPT(config)

        born = allocated_peak(construct)
        optimizer = torch.optim.SGD(model.parameters())
        return born, allocated_peak(lambda: zeroshard.shard(model, optimizer, Policy.stage(3)))

    shard = 4 * numel / 4
    for born, laid_out in on_ranks(body, 4):
        assert shard <= born < shard + 2 * block, "its shards, and one block while it is constructed"
        assert laid_out < shard + 3 * block, (
            "gradients; one block whole, its copy in the new order, and its earlier shards"
        )


def _meta(config: GPTConfig) -> nn.Module:
    with torch.device("meta"):
        return GPT(config)


@pytest.mark.ranks(2)
def test_a_block_inside_another_that_keeps_changes(rank: int) -> None:
    """transformers' PatchTST initialises in such a block, on rank 0 alone: the outer block decides."""
    with zeroshard.sharded_init():
        model = nn.Sequential(nn.Linear(4, 4))
    weight = model[0].weight
    with zeroshard.unsharded([weight], modifier_rank=0), torch.no_grad():
        if rank == 0:
            with zeroshard.unsharded([weight]):
                weight.fill_(3.0)
    assert torch.equal(weight + 0, torch.full((4, 4), 3.0))
    outer, inner = zeroshard.unsharded([weight]), zeroshard.unsharded([weight])
    with pytest.raises(UsageError, match="without a modifier rank"), outer, inner, torch.no_grad():
        weight.fill_(4.0)
