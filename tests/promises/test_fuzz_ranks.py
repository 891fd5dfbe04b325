"""Random sequences on several ranks give plain PyTorch's bits.

In training, ranks differ: below stage 3, each rank skips blocks and runs them in its own order; at every stage, a rank may use a
side path. In other actions of users (see fuzzing.py), all ranks do the same with the same batches, so that the mean over two
ranks is one rank's gradient.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from fuzzing import ACTIONS, OPTIMIZERS, Setting
from fuzzing_comparison import compare
from models import WIDTH, Untied, tokens
from oracles import average_gradients
from ranks import on_ranks
from torch import Tensor, nn
from twin import ACCELERATOR, CPU, DISK, as_set, build, whole
from twin import Setting as Twin

from zeroshard.core.norm import clip_coefficient

pytestmark = pytest.mark.full

STEPS = 5
Turn = tuple[list[int], bool]
"""Which blocks run, in which order, and whether the side path does."""


class Net(Untied):
    """A stack whose blocks run as a turn says, with a side path."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor, turn: Turn) -> Tensor:  # type: ignore[override]
        x = self.embedding(tokens)
        for number in turn[0]:
            x = self.blocks[number](x)
        loss = self.head(x).square().mean()
        return loss + self.side(x).square().mean() if turn[1] else loss


def turn_of(choice: random.Random, stage: int) -> Turn:
    blocks = [0, 1, 2]
    if stage < 3:
        blocks = choice.sample(blocks, choice.randint(0, 3))
    return blocks, choice.random() < 0.5


def run(rank: int, ranks: int, seed: int) -> None:
    """One sequence on this rank, and its twin."""
    choice = random.Random(seed)
    stage, make = choice.randrange(4), OPTIMIZERS[choice.choice(["adamw", "sgd"])]
    buckets = choice.choice([20, 100, 1 << 20])
    model, sharded = build(stage, make_model=Net, make_optimizer=make, seed=seed, bucket_numel=buckets)
    torch.manual_seed(seed)
    twin = Net()
    parameters = list(twin.parameters())
    other = make(parameters)
    for step in range(STEPS):
        # Gradients that are not sharded are summed over microbatches first, in another order than the twin's.
        microbatches = choice.choice([1, 1, 2]) if stage >= 2 else 1
        means: list[Tensor | None] = [None for _ in parameters]
        for microbatch in range(microbatches):
            turns = [turn_of(choice, stage) for _ in range(ranks)]
            batches = [tokens(one, 10 * step + microbatch)[0] for one in range(ranks)]
            with sharded.accumulate(microbatch < microbatches - 1):
                model(batches[rank], turns[rank]).backward()
            twin.zero_grad()
            average_gradients(parameters, ranks, lambda one: twin(batches[one], turns[one]).backward())  # noqa: B023
            for index, (before, now) in enumerate(zip(means, [p.grad for p in parameters], strict=True)):
                means[index] = now if before is None else before if now is None else before + now
        for parameter, gradient in zip(parameters, means, strict=True):
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
            turn, batch = turn_of(choice, 3), tokens(rank, 900)[0]
            with torch.no_grad():
                assert torch.equal(model(batch, turn), twin(batch, turn)), step
        for (fqn, value), expected in zip(whole(model).items(), parameters, strict=True):
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
