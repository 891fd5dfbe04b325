"""The gradients of many small parameters are processed together, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from models import CheckpointedTwice, Gated, tokens
from oracles import train_reference
from ranks import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twin import LARGE_BUCKETS, SMALL_BUCKETS, STAGES, Setting, abort, build, close, expect_equal, same, step, whole

import zeroshard
from zeroshard import Policy, Units, UsageError
from zeroshard.core import unit as units
from zeroshard.core.bucketing import find_units
from zeroshard.core.gradient_bucket import GradientBucket
from zeroshard.testing import Run, Workload

pytestmark = pytest.mark.full

COUNT, WIDTH = 30, 5
EVERY_STAGE = pytest.mark.parametrize("stage", range(4))


class Many(nn.Module):
    """A root with many small parameters and no block; a batch of integers leaves out the layers that it names.

    One layer is large beside the others, one parameter has no elements, and one layer is used by no rank.
    """

    def __init__(self) -> None:
        super().__init__()
        for number in range(COUNT):
            self.add_module(f"layer{number}", nn.Linear(WIDTH, WIDTH))
        self.wide = nn.Linear(WIDTH, 40 * WIDTH)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        left_out = set(skipped.tolist())
        for number in range(COUNT):
            if number not in left_out:
                x = x + self.get_submodule(f"layer{number}")(x).tanh()
        return self.wide(x).float().square().mean() + self.empty.sum()


def batch(rank: int, microbatch: int, skips: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * microbatch + rank)
    skipped = torch.randint(0, COUNT, (8,), generator=generator) if skips else torch.tensor([])
    return torch.randn(3, WIDTH, generator=generator), skipped


class InTwoPieces(Many):
    """Under reentrant checkpointing each half is differentiated by itself, and both halves use the same layers."""

    def half(self, x: Tensor) -> Tensor:
        for number in range(10):
            x = x + self.get_submodule(f"layer{number}")(x).tanh()
        return x

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.half, x, use_reentrant=True)
        return self.wide(x).square().mean()


class NeverAll(CheckpointedTwice):
    """Its blocks have a side path that is never used. One is called twice, has two backwards, and each begins anew."""

    def __init__(self) -> None:
        super().__init__(use_reentrant=True)
        self.blocks = nn.ModuleList(Gated() for _ in range(3))


@contextmanager
def taken_at_once(count: int) -> Iterator[None]:
    before = units.TAKEN_AT_ONCE
    units.TAKEN_AT_ONCE = count
    try:
        yield
    finally:
        units.TAKEN_AT_ONCE = before


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_numel", [SMALL_BUCKETS, LARGE_BUCKETS])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bits_do_not_depend_on_how_many_are_taken_at_once(rank: int, microbatches: int, bucket_numel: int) -> None:
    work = Workload(make_model=Many, make_batch=batch, steps=2, microbatches=microbatches, max_norm=0.5)
    settings = {**STAGES, "stage 2 over gloo": Setting(Policy.stage(2), "gloo")}
    one_by_one: dict[bool, Run] = {}
    for count in (1, 50, units.TAKEN_AT_ONCE):
        with taken_at_once(count):
            for kind, done in expect_equal(rank, work, settings, bucket_numel=bucket_numel).items():
                assert one_by_one.setdefault(kind, done).equals(done)
    close(done.parameters, train_reference(work, 2).parameters)


@pytest.mark.ranks(2)
@EVERY_STAGE
@pytest.mark.parametrize("count", [1, 1 << 16])
@pytest.mark.parametrize("model", [InTwoPieces, NeverAll])
def test_a_parameter_that_gives_two_gradients_in_one_backward(
    rank: int, model: type[nn.Module], count: int, stage: int
) -> None:
    make_batch = tokens if model is NeverAll else partial(batch, skips=False)
    work = Workload(make_model=model, make_batch=make_batch, steps=2)
    with taken_at_once(count):
        done = expect_equal(rank, work, {"": list(STAGES.values())[stage]})
    close(done[False].parameters, train_reference(work, 2).parameters)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_a_bucket_is_asked_once_for_many_gradients(rank: int, skips: bool) -> None:
    model, sharded = build(1, make_model=Many, bucket_numel=LARGE_BUCKETS)
    asked = []
    ask = GradientBucket.add_gradients
    GradientBucket.add_gradients = lambda bucket, gradients: (asked.append(len(gradients)), ask(bucket, gradients))
    try:
        model(*batch(rank, 0, skips)).backward()
    finally:
        GradientBucket.add_gradients = ask
    assert len(asked) == 1
    assert asked[0] > 2 * COUNT - 20
    sharded.remove()


@pytest.mark.ranks(2)
@EVERY_STAGE
@pytest.mark.parametrize("before", ["nothing", "a microbatch", "another graph"])
def test_what_waits_when_a_backward_aborts_is_forgotten(rank: int, stage: int, before: str) -> None:
    def run(disturbed: bool) -> dict[str, Tensor]:
        model, sharded = build(stage, make_model=Many)
        if disturbed:
            if before == "a microbatch":
                with sharded.accumulate():
                    model(*batch(rank, 10)).backward()
            loss, other = (model(*batch(rank, number, skips=False)) for number in (20, 21))
            abort(loss, model.layer15.weight)
            with pytest.raises(UsageError, match="was aborted"):
                other.backward() if before == "another graph" else sharded.optimizer.step()
            del loss, other
            sharded.optimizer.zero_grad()
        step(model, sharded, rank, 0, batch)
        return whole(model)

    assert same(run(False), run(True))


@pytest.mark.ranks(2)
@EVERY_STAGE
def test_zero_grad_inside_of_a_backward_forgets_what_waits(rank: int, stage: int) -> None:
    """As plain PyTorch: the gradients that come later are those of the step."""
    model, sharded = build(stage, make_model=Many, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    before = whole(model)
    loss = model(*batch(rank, 0, skips=False))
    model.layer15.weight.register_post_accumulate_grad_hook(lambda _: sharded.optimizer.zero_grad())
    loss.backward()
    sharded.optimizer.step()
    now = whole(model)
    changed = {fqn.split(".")[0] for fqn, value in now.items() if not torch.equal(value, before[fqn])}
    assert {f"layer{number}" for number in range(14)} <= changed
    assert not {"wide", *(f"layer{number}" for number in range(17, COUNT))} & changed


@pytest.mark.ranks(2)
@EVERY_STAGE
def test_a_hook_of_the_users_finds_every_gradient(rank: int, stage: int) -> None:
    model, _ = build(stage, make_model=Many)
    shapes = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: shapes.append((p.grad.shape, p.shape)))
    model(*batch(rank, 0, skips=False)).backward()
    assert len(shapes) > 2 * COUNT
    assert all(gradient == parameter for gradient, parameter in shapes)


@pytest.mark.ranks(2)
@EVERY_STAGE
def test_gradients_with_a_graph_of_their_own_are_taken_without_it(rank: int, stage: int) -> None:
    bits = []
    for create_graph in (False, True):
        model, sharded = build(stage, make_model=Many)
        model(*batch(rank, 0)).backward(create_graph=create_graph)
        model(*batch(rank, 1)).backward()  # no graph is left, so nothing keeps the parameters
        here = [zeroshard.parameter_states(parameter).is_here for parameter in model.parameters()]
        assert any(here) == (stage < 3)
        sharded.optimizer.step()
        bits.append(whole(model))
    assert same(*bits)


@pytest.mark.ranks(2, fresh=True)
def test_a_compiled_step_does_not_read_the_hooks(rank: int) -> None:
    model, sharded = build(2, make_model=Many)
    compiled_frames = []

    def keep(graph: Any, inputs: Any) -> Any:
        compiled_frames.append(graph)
        return graph.forward

    def run(x: Tensor) -> Tensor:
        loss = model.wide(x + 1).square().mean()
        loss.backward()
        return loss.detach() * 2

    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
    other, twin = build(2, make_model=Many)
    torch.compile(run, backend=keep)(x)
    other.wide(x + 1).square().mean().backward()
    sharded.optimizer.step()
    twin.optimizer.step()
    assert same(whole(other), whole(model))
    names = {str(node.target) for graph in compiled_frames for node in graph.graph.nodes}
    assert not [name for name in names if "grad" in name]


class Deep(nn.Module):
    """Very many blocks that are tiny, and one that is not."""

    def __init__(self, blocks: int = 129) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.large = nn.ModuleList([nn.Linear(WIDTH, 2000)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.large[0](x).square().mean()


def test_tiny_blocks_are_one_unit_where_there_are_many() -> None:
    assert [fqn for fqn, _ in find_units(Deep())] == ["large.0"]
    assert len(find_units(Deep(), Units(min_numel=0))) == 130
    assert len(find_units(Deep(127))) == 128

    def body(rank: int) -> None:
        ends: list[dict[str, Tensor]] = []
        for stage, rule in ((0, Units(min_numel=0)), (0, None), (2, None), (3, None)):
            model, sharded = build(stage, make_model=Deep, units=rule)
            for number in range(2):
                clip = partial(sharded.clip_grad_norm_, 0.1)
                step(model, sharded, rank, number, lambda *of: batch(*of)[:1], clip)
            ends.append(whole(model))
            assert same(ends[-1], ends[0]), stage

    on_ranks(body, 2)
