"""Models that are born sharded: the same values, and no rank ever holds a whole model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from memory import allocated_peak
from models import MODELS, Stack, sgd
from ranks import on_ranks
from test_pretrained import save
from torch import nn
from twin import build, same, steps, whole

import zeroshard
from zeroshard import UsageError
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
    assert same(values(model), plain)
    assert same(values(copy.deepcopy(model)), plain)


def born_stack() -> Stack:
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        return Stack()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_it_trains_as_one_that_was_whole(rank: int, stage: int) -> None:
    results = []
    for make in (Stack, born_stack):
        torch.manual_seed(0)
        shapes = [(p.shape, p.requires_grad, p.dtype) for p in make().parameters()]
        model, sharded = build(stage, make_model=make)
        assert shapes == [(p.shape, p.requires_grad, p.dtype) for p in model.parameters()]
        assert not any(isinstance(p, BornSharded) for p in model.parameters())
        steps(model, sharded, rank, range(3))
        results.append(whole(model))
    assert same(*results)


@torch.no_grad()
def directly(model: nn.Module) -> None:
    """What shows how often it was called."""
    model.blocks[0].up.weight.add_(3.0)
    model.blocks[0].up.bias.data.add_(1.0)
    nn.init.constant_(model.blocks[1].up.weight, 2.0)
    model.blocks[1].up.bias.copy_(model.blocks[2].up.bias.new_ones(33))


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

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Stack()).apply(initialise)

    expected = made(source)
    with zeroshard.sharded_init(source=source):
        model = made(rank)
    build(3, make_model=lambda: model, make_optimizer=sgd)
    assert same(values(expected), whole(model))


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
@pytest.mark.parametrize("write", [directly, by_views])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_written_after_the_cut_counts(rank: int, ranks: int, write: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    plain = Stack()
    write(plain)
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        model = Stack()
        write(model)
    write(plain)
    write(model)
    assert same(values(model), values(plain))
    model.blocks[2].up.weight.requires_grad_(False)
    assert "shape" not in repr(model)
    build(3, make_model=lambda: model, make_optimizer=sgd)
    assert same(whole(model), values(plain))
    assert not model.blocks[2].up.weight.requires_grad


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
@pytest.mark.parametrize("source", ["constructor", "files"])
def test_the_whole_never_exists(source: str, tmp_path: Path) -> None:
    """24 blocks on 4 ranks: the peak of tensors is the shards, one block whole, and what the layout of one needs."""
    config = GPTConfig(layers=24, width=256, heads=4)
    save(GPT(config), tmp_path / "model")
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(config).parameters())
    shard, block = 4 * numel / 4, 4 * 12 * config.width**2

    def bytes_read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("rchar")))

    def body(rank: int) -> tuple[int, int, int]:
        with torch.device("meta"):
            model: nn.Module = GPT(config)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = torch.zeros(buffer.shape)

        def construct() -> None:
            nonlocal model
            with zeroshard.sharded_init():
                model = GPT(config)

        read = bytes_read()
        load = partial(zeroshard.load_pretrained, model, tmp_path / "model")
        made = allocated_peak(load if source == "files" else construct)
        read = bytes_read() - read
        optimizer = torch.optim.SGD(model.parameters())
        return made, read, allocated_peak(lambda: zeroshard.shard(model, optimizer, 3))

    for made, read, laid_out in on_ranks(body, 4):
        assert shard <= made < shard + 2 * block, "its shards, and one block while it is constructed or read"
        if source == "files":
            assert read < shard + 200_000, "a quarter, the headers, and what Python reads itself"
        assert laid_out < shard + 3 * block, (
            "gradients; one block whole, its copy in the new order, and its earlier shards"
        )


@pytest.mark.ranks(2)
def test_one_rank_may_open_a_block_inside_another_that_keeps_changes(rank: int) -> None:
    """transformers' PatchTST initialises in such a block, on rank 0 alone: the outer block decides."""
    with zeroshard.sharded_init():
        model = nn.Sequential(nn.Linear(4, 4))
    weight = model[0].weight
    with zeroshard.unsharded([weight], modifier_rank=0), torch.no_grad():
        if rank == 0:
            with zeroshard.unsharded([weight]):
                weight.fill_(3.0)
    assert torch.equal(weight + 0, torch.full((4, 4), 3.0))


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
