"""Access from a parameter to its states in zeroshard, and parameters that are unsharded temporarily, even if born sharded."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack, tokens
from ranks import on_ranks
from torch import Tensor, nn
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
        assert states.fqn == fqn
        assert states.is_trained
        assert states.is_sharded is (stage == 3)
        assert torch.equal(states.get(), sharded.states.get(fqn))
        assert torch.equal(states.get("gradients"), sharded.states.get(fqn, "gradients"))
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
            mine = states.flat(name)
            states.set_flat(mine * 2, name)
            assert torch.equal(states.get(name), new * 2)
        with pytest.raises(UsageError, match="holds"):
            states.set_flat(torch.zeros(parameter.numel() + 1))
    with zeroshard.unsharded(model):
        for fqn, parameter in model.named_parameters():
            assert zeroshard.parameter_states(parameter).is_here
            assert torch.equal(parameter, sharded.states.get(fqn).to(parameter.dtype))


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
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    sharded = zeroshard.shard(model, torch.optim.SGD(trained, lr=0.1), Policy.stage(3))
    frozen = model.blocks[0].up.weight
    states = zeroshard.parameter_states(frozen)
    assert not states.is_trained
    assert torch.equal(states.get(), plain.blocks[0].up.weight.detach() + 1 + 1)
    assert states.get("gradients") is None
    del sharded
    gc.collect()
    assert torch.equal(states.get(), plain.blocks[0].up.weight.detach() + 1 + 1)  # the model keeps what it needs


def test_numbers_are_the_same_on_every_rank() -> None:
    def body(rank: int) -> list[int]:
        model, _ = build(3)
        return [zeroshard.parameter_states(p).number for p in model.parameters()]

    first, second = on_ranks(body, 2)
    assert first == second
    assert len(set(first)) == len(first)


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
@pytest.mark.parametrize("kind", KINDS)
def test_changes_without_a_modifier_are_an_error(rank: int, kind: str) -> None:
    model = models_of(kind)
    before, weight = whole(model), model.blocks[0].up.weight
    with pytest.raises(UsageError, match="without a modifier"), zeroshard.unsharded(weight), torch.no_grad():
        weight.fill_(1)
    with pytest.raises(UsageError, match="without a modifier"), zeroshard.unsharded(weight):
        weight.data = weight.data + 1
    if kind != "stage 2":
        assert same(whole(model), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_nests(rank: int, kind: str) -> None:
    model = models_of(kind)
    before, weight = whole(model), model.blocks[0].up.weight
    with zeroshard.unsharded(model):
        with zeroshard.unsharded(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(3.0 - rank)
        assert bool((weight == 3).all())  # kept, and no change of the outer one's
    assert bool((whole(model)["blocks.0.up.weight"] == 3).all())
    with zeroshard.unsharded(weight, modifier_rank=0):
        with zeroshard.unsharded(model):
            pass
        if rank == 0:
            weight.data.fill_(4.0)
    assert bool((whole(model)["blocks.0.up.weight"] == 4).all())
    assert torch.equal(whole(model)["blocks.1.up.weight"], before["blocks.1.up.weight"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_inside_one_that_changed_something_does_not_store_the_change(rank: int, kind: str, data: bool) -> None:
    """The outer block reports it."""
    model = models_of(kind)
    before, weight = whole(model), model.blocks[0].up.weight
    with pytest.raises(UsageError, match="without a modifier rank"), zeroshard.unsharded(weight):
        if data:
            weight.data = torch.full_like(weight, 5.0)
        else:
            weight.detach().fill_(5.0)
        with zeroshard.unsharded(model):
            pass
    if kind != "stage 2":
        assert same(whole(model), before)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_inside_a_forward_that_wrote_to_what_it_borrows_begins(stage: int) -> None:
    """Such writes count like those in a forward of the parameter's own module: no block has to report them."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weight.detach().mul_(2)
            with zeroshard.unsharded(weight):
                return x * weight.detach().sum()

    model, _ = build(stage)
    weight, writes = model.blocks[0].up.weight, Writes()
    before = whole(model)["blocks.0.up.weight"]
    zeroshard.borrow(writes, weight)
    assert torch.equal(writes(torch.ones(())), 2 * before.sum())


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
    for wrong in (["blocks.0.up.weight"], model.named_parameters()):
        with pytest.raises(UsageError, match=r"unsharded\(\) got a (str|tuple) in its target. Pass modules and"):
            zeroshard.unsharded(wrong).__enter__()


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


@pytest.mark.ranks(2)
def test_sharding_inside_is_refused(rank: int) -> None:
    model = born_stack()
    with zeroshard.unsharded(model), pytest.raises(UsageError, match=r"unsharded.*outside"):
        zeroshard.shard(model, None)


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
def test_a_roots_own_parameters_are_cut_too(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    plain = Rooted()
    torch.manual_seed(0)
    with zeroshard.sharded_init(enabled=False):
        assert not any(isinstance(p, BornSharded) for p in Rooted().parameters())
    torch.manual_seed(0)
    with zeroshard.sharded_init(), zeroshard.sharded_init():
        model = Rooted()
    assert all(isinstance(p, BornSharded) for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(whole(model).values(), plain.parameters(), strict=True))


@pytest.mark.ranks(2)
def test_one_ranks_values_and_a_dtype(rank: int) -> None:
    torch.manual_seed(0)
    plain = Rooted().to(torch.bfloat16)
    torch.manual_seed(rank)
    with zeroshard.sharded_init(dtype=torch.bfloat16, source=0):
        model = Rooted()
        assert torch.empty(1).dtype is torch.bfloat16
    assert torch.empty(1).dtype is torch.float32
    values = whole(model)
    assert values["inner.weight"].dtype is torch.bfloat16
    assert all(value.dtype is torch.bfloat16 for value in values.values())
    assert values["scale"].shape == plain.scale.shape
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, {fqn: value.float().tolist() for fqn, value in values.items()})
    assert told[0] == told[1]
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
    with pytest.raises(UsageError, match="meta"):
        with torch.device("meta"):
            empty = nn.Linear(2, 2)
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
    sharded.remove()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not hasattr(weight, "place")


@pytest.mark.ranks(2)
def test_attributes_change_no_number(rank: int) -> None:
    def run(**kwargs: Any) -> dict[str, torch.Tensor]:
        model, sharded = build(3, **kwargs)
        steps(model, sharded, rank, range(3))
        return whole(model)

    plain, shown = run(), run(attributes=Shown)
    assert same(plain, shown)


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
    def graphs(**kwargs: Any) -> int:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Stack()
        for block in model.blocks:
            block.compile(backend="eager")
        sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(3), **kwargs)
        steps(model, sharded, rank, range(2))
        return counters["stats"]["unique_graphs"]

    assert graphs(attributes=Shown) == graphs() > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_modifier_rank_that_does_not_exist_is_refused(rank: int, kind: str) -> None:
    model = models_of(kind)
    for modifier_rank in (2, -1):
        with pytest.raises(UsageError, match="are 0 to 1"):
            zeroshard.unsharded(model, modifier_rank=modifier_rank).__enter__()


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

    def calls() -> None:
        for call in (
            lambda: sharded.states,
            lambda: zeroshard.parameter_states(weight).get(),
            lambda: sharded.save(tmp_path / "checkpoints", "one"),
            lambda: sharded.export(tmp_path / "export"),
            lambda: sharded.load(tmp_path / "checkpoints"),
        ):
            with pytest.raises(UsageError, match=r"inside unsharded\(modifier_rank=...\), where changes"):
                call()

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
    with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
        calls()
    assert torch.equal(sharded.states.get("blocks.0.up.weight"), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_outer_block_reports_no_change_of_an_inner_modifier(rank: int, kind: str) -> None:
    model = models_of(kind)
    weight = model.blocks[0].up.weight
    with zeroshard.unsharded(model):
        with zeroshard.unsharded(weight, modifier_rank=1):
            weight.data = torch.full_like(weight, rank)
        with zeroshard.unsharded(weight, modifier_rank=0), torch.no_grad():
            weight.add_(2.0 + rank)
    assert bool((whole(model)["blocks.0.up.weight"] == 3).all())


def test_undo_is_refused() -> None:
    model, _ = build(3)
    with pytest.raises(UsageError, match=r"Change a copy .*named_weights\(merge_adapters=True\)"):
        zeroshard.unsharded(model, undo=True).__enter__()
