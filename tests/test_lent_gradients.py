"""Gradients in 16 bits are cast for the optimizer in parts: a bounded amount of memory, the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeroshard import Policy, Precision
from zeroshard.step import sub_groups
from zeroshard.testing import Workload, run_ranks, train
from zeroshard.testing.gpt import GPT, GPTConfig

NARROW = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def adam(parameters: object) -> torch.optim.Optimizer:
    """One that counts how often it is called."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # type: ignore[arg-type]
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    return optimizer


calls: list[int] = []


@pytest.mark.parametrize("stage", range(4))
def test_in_parts_the_bits_are_the_same(stage: int) -> None:
    work = Workload(lambda: GPT(GPTConfig(layers=3, width=64, heads=2, context=16)), batch, adam, steps=3, max_norm=0.5)

    def body(rank: int) -> list[bool]:
        whole = train(rank, work, Policy.stage(stage), precision=NARROW)
        at_once, before = len(calls), sub_groups.LENT_NUMEL
        sub_groups.LENT_NUMEL = 10_000
        try:
            parts = train(rank, work, Policy.stage(stage), precision=NARROW)
        finally:
            sub_groups.LENT_NUMEL = before
        return [parts.equals(whole), at_once == work.steps, len(calls) - at_once > 2 * work.steps]

    for told in run_ranks(body, 2):
        assert told == [True, True, True]
