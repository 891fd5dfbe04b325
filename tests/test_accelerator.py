"""The same promises where there is an accelerator."""

from __future__ import annotations

import pytest
import torch
from models import Stack, tokens

import zeroshard
from zeroshard import Policy, Precision


@pytest.mark.accelerator
@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16)], ids=["fp32", "bf16"])
def test_stages_are_bit_equal_on_one_accelerator(precision: Precision | None) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    results = []
    for stage in range(4):
        torch.manual_seed(0)
        model = Stack().to(device)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        sharded = zeroshard.shard(model, adamw, Policy.stage(stage), precision=precision, bucket_numel=256)
        for step in range(10):
            model(tokens(0, step)[0].to(device)).backward()
            sharded.clip_grad_norm_(0.5)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        with zeroshard.unsharded(model):
            results.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        sharded.remove()
    assert all(torch.equal(result, results[0]) for result in results)
