"""16-bit gradients are cast for the optimizer in parts: memory is bounded, and the bits are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from twin import gpt_batch as batch

from zeroshard import Policy, Precision
from zeroshard.core import resident
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

NARROW = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize("stage", range(4))
def test_in_parts_the_bits_are_the_same(stage: int) -> None:
    work = Workload(lambda: GPT(GPTConfig(layers=3, width=64, heads=2, context=16)), batch, adam, steps=3, max_norm=0.5)

    def body(rank: int) -> list[bool]:
        calls: list[torch.optim.Optimizer] = []
        step_inner = ShardedStep.step_inner

        def counted(self: ShardedStep, optimizer: torch.optim.Optimizer, *evaluated: Any) -> None:
            calls.append(optimizer)
            step_inner(self, optimizer, *evaluated)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ShardedStep, "step_inner", counted)
            return compared(rank, calls)

    def compared(rank: int, calls: list[torch.optim.Optimizer]) -> list[bool]:
        whole = train(rank, work, Policy.stage(stage), precision=NARROW)
        at_once, before = len(calls), resident.LENT_NUMEL
        resident.LENT_NUMEL = 10_000
        try:
            parts = train(rank, work, Policy.stage(stage), precision=NARROW)
        finally:
            resident.LENT_NUMEL = before
        return [parts.equals(whole), at_once == work.steps, len(calls) - at_once > 2 * work.steps]

    for told in run_ranks(body, 2):
        assert told == [True, True, True]
