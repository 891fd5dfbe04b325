"""16-bit gradients are cast for the optimizer in parts: memory is bounded, and the bits are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from twin import gpt_batch as batch

from zeroshard import Policy, Precision
from zeroshard.step import resident
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

NARROW = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)


calls: list[int] = []


class Counting(torch.optim.AdamW):
    """Counts how often it is called with gradients."""

    def step(self, closure: Any = None) -> Any:
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        if any(gradient is not None and gradient.any() for gradient in gradients):
            calls.append(1)
        return super().step(closure)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return Counting(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize("stage", range(4))
def test_in_parts_the_bits_are_the_same(stage: int) -> None:
    work = Workload(lambda: GPT(GPTConfig(layers=3, width=64, heads=2, context=16)), batch, adam, steps=3, max_norm=0.5)

    def body(rank: int) -> list[bool]:
        whole = train(rank, work, Policy.stage(stage), precision=NARROW, elementwise=True)
        at_once, before = len(calls), resident.LENT_NUMEL
        resident.LENT_NUMEL = 10_000
        try:
            parts = train(rank, work, Policy.stage(stage), precision=NARROW, elementwise=True)
        finally:
            resident.LENT_NUMEL = before
        return [parts.equals(whole), at_once == work.steps, len(calls) - at_once > 2 * work.steps]

    for told in run_ranks(body, 2):
        assert told == [True, True, True]
