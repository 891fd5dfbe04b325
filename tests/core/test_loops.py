"""Training loops as people write them, with one line of zeroshard, compared with the same loops under DDP.

A loop gets a model and `take(model, optimizer, ...)`: `zeroshard.shard` in one run, DDP's wrapper in the other. The loop
returns further values to compare, in addition to the parameters.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Stack, tokens
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, swa_utils
from twin import same_on_all_ranks, whole

import zeroshard

Loop = Callable[[nn.Module, Callable[..., nn.Module], int], Any]
LOOPS: dict[str, Loop] = {}
STEPS = 4


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


@loop
def classifier_with_scheduler(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    forward = take(model, optimizer)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = forward(*tokens(rank, number))
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@loop
def gradient_accumulation(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward = take(model, optimizer)
    for number in range(2 * STEPS):
        (forward(*tokens(rank, number)) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@loop
def clipping_of_the_norm(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    norms = []
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@loop
def clipping_over_the_groups(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    norms = []
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        norms.append(float(nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@loop
def clipping_of_values(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@loop
def log_of_gradient_norms(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    log = []
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        log.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return log


@loop
def mixed_precision_by_autocast(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(*tokens(rank, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def mixed_precision_with_a_scaler(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    """A scale of 2^40 overflows in the first steps, which are left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    forward = take(model, optimizer)
    scales = []
    for number in range(2 * STEPS):
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
def moving_average_of_weights(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zeroshard.unsharded(model):
            average.update_parameters(model)
    return [p.detach().clone() for p in average.parameters()]


@loop
def swa_with_its_scheduler(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = swa_utils.AveragedModel(model)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        with zeroshard.unsharded(model):
            average.update_parameters(model)
    return [p.detach().clone() for p in average.parameters()]


@loop
def moving_average_in_a_hook(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    """Registered before the one line; parameters are read in the hook."""
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def follow(*_: Any) -> None:
        with zeroshard.unsharded(model):
            for one, p in zip(average, model.parameters(), strict=True):
                one.lerp_(p.detach(), 0.1)

    optimizer.register_step_post_hook(follow)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return average


@loop
def two_models_against_each_other(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
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
def two_optimizers(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    """Matrices to the one, the rest to the other."""
    first = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)
    forward = take(model, [first, second])
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second):
            optimizer.zero_grad()


@loop
def two_optimizers_of_which_one_steps_seldom(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
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
def rates_by_layer(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    groups = [{"params": list(block.parameters()), "lr": 0.01 * 0.5**depth} for depth, block in enumerate(model.blocks)]
    groups.append({"params": list(model.embedding.parameters()), "weight_decay": 0.0})
    groups.append({"params": [p for p in model.head.parameters() if p is not model.embedding.weight]})
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.02)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


@loop
def one_cycle_made_before(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return optimizer.param_groups[0]["momentum"]


@loop
def noise_on_gradients(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient + 0.01 * torch.ones_like(gradient))
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def clamped_weights(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)


@loop
def clamped_through_the_groups(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)


@loop
def lookahead(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    with zeroshard.unsharded(model):
        slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 2:
            with zeroshard.unsharded(model, modifier_rank=0):
                fast = [p for g in optimizer.param_groups for p in g["params"]]
                for one, p in zip(slow, fast, strict=True):
                    one.add_(p.data - one, alpha=0.5)
                    p.data.copy_(one)


@loop
def freezing_schedule(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        if number == 2:
            optimizer.zero_grad()
        model.blocks[0].requires_grad_(number < 2)
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def zero_grad_that_keeps_tensors(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@loop
def resumed_by_state_dicts(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(kept[0])
    model.load_state_dict(kept[1])
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def evaluation_in_between(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    losses = []
    for number in range(STEPS):
        model.train()
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(model(*tokens(rank, 100)).item())
    return losses


@loop
def penalty_on_weights(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    """It is computed in the forward's place, which is where a stage that shards parameters has them."""
    plain = model.forward
    model.forward = lambda *batch: plain(*batch) + 0.01 * sum(p.abs().sum() for p in model.head.parameters())  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


@loop
def steps_without_a_finite_loss_are_left_out(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        (forward(*tokens(rank, number)) * (float("inf") if number == 1 else 1.0)).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()


@loop
def two_steps_on_the_same_gradients(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@loop
def a_step_with_a_closure(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    losses = []
    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = forward(*tokens(rank, number))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


@loop
def rates_found_by_hand(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    """As a learning-rate finder: begin anew from the state that was kept."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    forward = take(model, optimizer)
    kept = copy.deepcopy(model.state_dict())
    losses = []
    for number in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-3 * 4**number
        loss = forward(*tokens(rank, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.load_state_dict(kept)
    return losses


@loop
def two_losses_one_after_the_other(model: nn.Module, take: Callable[..., nn.Module], rank: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    forward = take(model, optimizer)
    for number in range(STEPS):
        forward(*tokens(rank, number)).backward()
        forward(*tokens(rank, number + 100)).backward()
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(3))
def test_stochastic_depth_by_rank(rank: int, stage: int) -> None:
    """Until parameters are sharded, no rank has to run what another runs."""

    def train(take: Callable[..., nn.Module]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Depth()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        forward = take(model, optimizer)
        for number in range(STEPS):
            forward(*tokens(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    expected = train(lambda model, _: DistributedDataParallel(model, find_unused_parameters=True))

    def take(model: nn.Module, optimizer: Any) -> nn.Module:
        zeroshard.shard(model, optimizer, stage, bucket_numel=100)
        return model

    found = train(take)
    assert same_on_all_ranks(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def run(function: Loop, take: Callable[..., nn.Module], rank: int) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = Stack()
    more = function(model, take, rank)
    return whole(model), more


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", LOOPS)
def test_one_line_changes_nothing_else(rank: int, name: str, stage: int) -> None:
    function = LOOPS[name]
    expected, theirs = run(function, lambda model, _: DistributedDataParallel(model, find_unused_parameters=True), rank)

    def take(model: nn.Module, optimizer: Any) -> nn.Module:
        zeroshard.shard(model, optimizer, stage)
        return model

    found, ours = run(function, take, rank)
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
