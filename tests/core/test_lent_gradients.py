"""16-bit gradients are cast for the optimizer in parts: memory is bounded, and the bits are the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from twin import gpt_batch as batch

from zeroshard import Policy, Precision
from zeroshard.core import resident
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

NARROW = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", range(4))
def test_in_parts_the_bits_are_the_same(rank: int, stage: int) -> None:
    make = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    work = Workload(lambda: GPT(GPTConfig(layers=3, width=64, heads=2, context=16)), batch, make, steps=3, max_norm=0.5)
    calls: list[int] = []
    step_inner = ShardedStep.step_inner

    def counted(self: ShardedStep, optimizer: torch.optim.Optimizer, *evaluated: Any) -> None:
        calls.append(1)
        step_inner(self, optimizer, *evaluated)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ShardedStep, "step_inner", counted)
        whole = train(rank, work, Policy.stage(stage), precision=NARROW)
        assert len(calls) == work.steps
        patched.setattr(resident, "LENT_NUMEL", 10_000)
        parts = train(rank, work, Policy.stage(stage), precision=NARROW)
    assert len(calls) > 3 * work.steps
    assert parts.equals(whole)
