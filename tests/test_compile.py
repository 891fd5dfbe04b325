"""torch.compile before zeroshard: the graph breaks at the borders of units, and the bits stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Policy
from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=3, width=32, heads=4, context=16)


def train(rank: int, stage: int, compiled: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for module in {"model": [model], "blocks": model.blocks, "nothing": []}[compiled]:
        assert isinstance(module, nn.Module)
        module.compile(backend="aot_eager")
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), Policy.stage(stage))
    losses = []
    for step in range(4):
        tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        losses.append(loss.detach())
    with zeroshard.unsharded(model):
        return [torch.stack(losses), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_models_give_the_same_bits(compiled: str) -> None:
    def body(rank: int) -> None:
        plain = train(rank, 0, "nothing")
        for stage in range(4):
            for one, other in zip(plain, train(rank, stage, compiled), strict=True):
                assert torch.equal(one, other), f"stage {stage}"
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "something was compiled"

    run_ranks(body, 2, timeout=120)
