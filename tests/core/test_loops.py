"""Training loops as people write them, with one line of zeroshard, compared with the same loops under DDP.

A loop gets a model and `take(model, optimizer)`: `zeroshard.shard` in one run, DDP's wrapper in the other. The loop
returns further values to compare, in addition to the parameters. `promises/test_fuzz.py` mixes the calls of other loops.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Stack, sgd, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from twin import same_on_all_ranks, step, steps, whole

import zeroshard

Take = Callable[[nn.Module, Any], nn.Module]
Loop = Callable[[nn.Module, Take, int], Any]
LOOPS: list[Loop] = []
STEPS = 4


def loop(function: Loop) -> Loop:
    LOOPS.append(function)
    return function


@loop
def two_losses_before_each_step(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = sgd(model.parameters())
    forward = take(model, optimizer)
    for number in range(2 * STEPS):
        (forward(*tokens(rank, number)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@loop
def clipping_over_the_groups(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    norms = []

    def clip() -> None:
        norms.append(float(nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)))

    for number in range(STEPS):
        step(forward, optimizer, rank, number, clip=clip)
    return norms


@loop
def mixed_precision_with_a_scaler(model: nn.Module, take: Take, rank: int) -> Any:
    """The first steps overflow, and are left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    forward = take(model, optimizer)
    scales = []
    for number in range(2 * STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=number > 4):
            loss = forward(*tokens(rank, number))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@loop
def swa_with_its_scheduler(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = swa_utils.AveragedModel(model)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    forward = take(model, optimizer)
    for number in range(STEPS):
        step(forward, optimizer, rank, number)
        scheduler.step()
        with zeroshard.unsharded(model):
            average.update_parameters(model)
    return [p.detach().clone() for p in average.parameters()]


@loop
def two_models_against_each_other(model: nn.Module, take: Take, rank: int) -> Any:
    """As a GAN: each has its optimizer, and the second's gradients of the first's step are dropped."""
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    judge, make = take(critic, of_critic), take(maker, of_maker)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        noise, real = torch.randn(3, 2, generator=generator), torch.randn(3, 4, generator=generator)
        of_critic.zero_grad()
        (judge(torch.cat([make(noise).detach(), real])) * torch.tensor([[1.0]] * 3 + [[-1.0]] * 3)).mean().backward()
        of_critic.step()
        of_maker.zero_grad()
        judge(make(noise)).mean().neg().backward()
        of_maker.step()
    return [value for one in (critic, maker) for value in whole(one).values()]


@loop
def two_optimizers_of_which_one_steps_seldom(model: nn.Module, take: Take, rank: int) -> Any:
    first = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    schedulers = [lr_scheduler.ExponentialLR(one, 0.9) for one in (first, second)]
    forward = take(model, [first, second])
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        first.step()
        if number % 2:
            second.step()
        for scheduler in schedulers:
            scheduler.step()
        second.zero_grad()
        first.zero_grad()


@loop
def one_cycle_made_before(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = sgd(model.parameters())
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return optimizer.param_groups[0]["momentum"]


@loop
def lookahead(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    with zeroshard.unsharded(model):
        slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    for number in range(STEPS):
        step(forward, optimizer, rank, number)
        if number % 2:
            with zeroshard.unsharded(model, modifier_rank=0):
                fast = [p for g in optimizer.param_groups for p in g["params"]]
                for one, p in zip(slow, fast, strict=True):
                    one.add_(p.data - one, alpha=0.5)
                    p.data.copy_(one)


@loop
def freezing_schedule(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    steps(forward, optimizer, rank, range(2))
    model.blocks[0].requires_grad_(False)
    return steps(forward, optimizer, rank, range(2, STEPS))


@loop
def steps_without_a_finite_loss_are_left_out(model: nn.Module, take: Take, rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        (forward(*tokens(rank, number)) * (float("inf") if number == 1 else 1.0)).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()


class Depth(Stack):
    """Each rank leaves out blocks of its own choice in each forward, and runs the others in an order of its own."""

    def __init__(self) -> None:
        super().__init__(widths=(7, 33, 16, 16, 16))
        self.choice = random.Random(torch.distributed.get_rank())

    def run(self, x: Tensor) -> Tensor:
        for number in self.choice.sample(range(5), 3):
            x = self.blocks[number](x)
        return x


def stochastic_depth_by_rank(model: nn.Module, take: Take, rank: int) -> Any:
    """Until parameters are sharded, no rank has to run what another runs."""
    optimizer = sgd(model.parameters())
    return steps(take(model, optimizer), optimizer, rank, range(STEPS))


def run(function: Loop, make_model: Callable[[], nn.Module], take: Take, rank: int) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = make_model()
    more = function(model, take, rank)
    return whole(model), more


CASES = [
    *((function, Stack, stage) for function in LOOPS for stage in range(4)),
    *((stochastic_depth_by_rank, Depth, stage) for stage in range(3)),
]


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize(("function", "make_model", "stage"), CASES)
def test_one_line_changes_nothing_else(
    rank: int, function: Loop, make_model: Callable[[], nn.Module], stage: int
) -> None:
    def wrapped(model: nn.Module, _: Any) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True)

    def sharded(model: nn.Module, optimizer: Any) -> nn.Module:
        zeroshard.shard(model, optimizer, stage, bucket_numel=100)
        return model

    expected, theirs = run(function, make_model, wrapped, rank)
    found, ours = run(function, make_model, sharded, rank)
    assert same_on_all_ranks(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_sum_over_ranks_of_a_loss(rank: int) -> None:
    sharded = zeroshard.shard(nn.Linear(2, 1), None, 1)
    loss = torch.tensor(rank + 1.0, requires_grad=True) * 2
    total = sharded.sum_over_ranks(loss)
    assert total.shape == () and float(total) == 6.0 and not total.requires_grad
    assert sharded.sum_over_ranks(torch.full((2, 3), 0.5).T).tolist() == [[1.0, 1.0]] * 3
