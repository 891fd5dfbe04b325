"""Random sequences on several ranks give plain PyTorch's bits.

In training, ranks differ: below stage 3, each rank skips blocks and runs them in its own order; at every stage, a rank may use a
side path. In other actions of users (see fuzzing.py), all ranks do the same with the same batches, so that the mean over two
ranks is one rank's gradient.
"""

from __future__ import annotations

import random
from functools import reduce
from pathlib import Path

import pytest
import torch
from fuzzing import ACTIONS, OPTIMIZERS, Setting
from fuzzing_comparison import compare
from ranks import on_ranks
from torch import Tensor, nn
from twin import ACCELERATOR, CPU, DISK, as_set, whole
from twin import Setting as Twin

import zeroshard
from zeroshard.core.norm import clip_coefficient

pytestmark = pytest.mark.full

WIDTH, BLOCKS, STEPS = 5, 3, 5
Turn = tuple[list[int], bool]
"""Which blocks run, in which order, and whether the side path does."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor, turn: Turn) -> Tensor:
        x = self.first(x)
        for number in turn[0]:
            x = self.blocks[number](x)
        loss = self.last(x).square().mean()
        return loss + self.side(x).square().mean() if turn[1] else loss


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * number + rank))


def turn_of(choice: random.Random, stage: int) -> Turn:
    blocks = list(range(BLOCKS))
    if stage < 3:
        blocks = choice.sample(blocks, choice.randint(0, BLOCKS))
    return blocks, choice.random() < 0.5


def gradients_of(model: nn.Module, turn: Turn, given: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(given, turn).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def mean(parameter: Tensor, by_rank: tuple[Tensor | None, ...]) -> Tensor | None:
    """In the order of ranks; zeros of a rank that did not use the parameter, unless none did."""
    if all(gradient is None for gradient in by_rank):
        return None
    return reduce(torch.add, [torch.zeros_like(parameter) if g is None else g for g in by_rank]) / len(by_rank)


def added(before: Tensor | None, found: Tensor | None) -> Tensor | None:
    """The gradients of two microbatches."""
    if before is None or found is None:
        return found if before is None else before
    return before + found


def run(rank: int, ranks: int, seed: int) -> None:
    """One sequence on this rank, and its twin."""
    choice = random.Random(seed)
    stage, make = choice.randrange(4), OPTIMIZERS[choice.choice(["adamw", "sgd"])]
    torch.manual_seed(seed)
    model = Net()
    torch.manual_seed(seed)
    twin = Net()
    sharded = zeroshard.shard(model, make([*model.parameters()]), stage, bucket_numel=choice.choice([20, 100, 1 << 20]))
    other = make([*twin.parameters()])
    for step in range(STEPS):
        # Gradients that are not sharded are summed over microbatches first, in another order than the twin's.
        microbatches = choice.choice([1, 1, 2]) if stage >= 2 else 1
        means: list[Tensor | None] = [None for _ in twin.parameters()]
        for number in range(microbatches):
            turns = [turn_of(choice, stage) for _ in range(ranks)]
            with sharded.accumulate(number < microbatches - 1):
                model(batch(rank, 10 * step + number), turns[rank]).backward()
            by_rank = [gradients_of(twin, turn, batch(one, 10 * step + number)) for one, turn in enumerate(turns)]
            for index, (parameter, each) in enumerate(zip(twin.parameters(), zip(*by_rank, strict=True), strict=True)):
                means[index] = added(means[index], mean(parameter, each))
        for parameter, gradient in zip(twin.parameters(), means, strict=True):
            parameter.grad = gradient
        if choice.random() < 0.4:
            norm = float(sharded.clip_grad_norm_(0.3))
            present = [gradient for gradient in means if gradient is not None]
            assert norm == pytest.approx(float(torch.stack([g.norm() for g in present]).norm()), rel=1e-5)
            if clip_coefficient(norm, 0.3) != 1.0:
                for gradient in present:
                    gradient.mul_(clip_coefficient(norm, 0.3))
        for optimizer in (sharded.optimizer, other):
            optimizer.step()
            optimizer.zero_grad()
        if choice.random() < 0.3:
            turn = turn_of(choice, 3)
            with torch.no_grad():
                assert torch.equal(model(batch(rank, 900), turn), twin(batch(rank, 900), turn)), step
        for (fqn, value), expected in zip(whole(model).items(), twin.parameters(), strict=True):
            assert torch.equal(value, expected.detach()), f"{fqn} in step {step} of seed {seed} at stage {stage}"
    sharded.remove()


def run_all(rank: int, ranks: int, seeds: range) -> None:
    for seed in seeds:
        run(rank, ranks, seed)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_differ_by_design_are_as_plain_pytorch(ranks: int) -> None:
    on_ranks(run_all, ranks, ranks, range(12))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_differ_at_length(ranks: int, times: int) -> None:
    for start in range(100, 100 + 50 * times, 50):
        on_ranks(run_all, ranks, ranks, range(start, start + 50))


# ---------------------------------------------------------------------- all actions of users


def setting_of(choice: random.Random) -> tuple[Setting, str, bool]:
    """Return a setting, the ranks' transport, and whether CPU memory counts as separate from the accelerator's."""
    stage = choice.randrange(4)
    places = (
        choice.choice([ACCELERATOR, ACCELERATOR, CPU, *([DISK] if stage > 2 else [])] if stage else [ACCELERATOR]),
        choice.choice([ACCELERATOR, *([CPU, DISK] if stage > 1 else [])]),
        choice.choice([ACCELERATOR, ACCELERATOR, CPU, DISK] if stage else [ACCELERATOR]),
    )
    setting = Setting(
        stage,
        bf16=choice.random() < 0.4,
        optimizer=choice.choice(["sgd", "adamw"]),
        reshard_after_forward=choice.random() < 0.7,
        prefetch_numel=choice.choice([None, 0, 100]),
        overlap=choice.random() < 0.7,
        one_unit=choice.random() < 0.3,
        two_optimizers=choice.random() < 0.3,
        places=places,
    )
    return setting, choice.choice(["shared memory", "gloo"]), choice.random() < 0.8


def act(rank: int, folder: Path, seeds: range) -> None:
    """Run one sequence of actions for each seed, and compare it with its twin."""
    for seed in seeds:
        choice = random.Random(seed)
        setting, transport, apart = setting_of(choice)
        actions = [(choice.choice(ACTIONS), choice.randrange(12)) for _ in range(20)]
        own = folder / str(seed)
        own.mkdir(exist_ok=True)
        try:
            with as_set(Twin(setting.policy(own), transport, apart=apart)):
                compare(setting, actions, own)
        except BaseException as error:
            error.add_note(f"in seed {seed}: {setting}, {transport}, {apart=}, {actions}")
            raise


def test_whatever_users_do_on_two_ranks_is_as_plain_pytorch_does_it_or_refused_by_name(tmp_path: Path) -> None:
    on_ranks(act, 2, tmp_path, range(20))


@pytest.mark.parametrize("part", range(5))
def test_whatever_users_do_on_two_ranks_at_length(part: int, tmp_path: Path, times: int) -> None:
    first = 100 + 40 * times * part
    on_ranks(act, 2, tmp_path, range(first, first + 40 * times), timeout=300.0 * times)
