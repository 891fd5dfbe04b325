"""Mixtures of experts train alike at every stage: experts without tokens, biases that move between steps, saves and loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import text
from mixtures import MIXTURES
from torch import Tensor
from twin import build, same, update, whole

from zeroshard.testing.parity import buffers_of

BIAS = "e_score_correction_bias"


def batch(rank: int, step: int) -> dict[str, Tensor]:
    """Rank 0 has one token again and again, so it reaches two of a layer's four experts."""
    found = text(rank, step)
    if rank == 0:
        found = {name: torch.full_like(one, 5 + step) for name, one in found.items()}
    return found


def trained(
    rank: int, name: str, stage: int, steps: range, *, resumes: Path | None = None, saves: Path | None = None
) -> dict[str, Tensor]:
    """Train, with the bias of DeepSeek-V3's routers moved after each step as its trainer does; return what the model is then."""
    model, sharded = build(stage, make_model=MIXTURES[name], seed=1 if resumes else 0, bucket_numel=3000)
    model.train()
    if resumes:
        sharded.load(resumes, "1")
    for step in steps:
        loss = update(model(**batch(rank, step)).loss, sharded.optimizer, partial(sharded.clip_grad_norm_, 1.0))
        for fqn, buffer in model.named_buffers():
            if fqn.endswith(BIAS):
                buffer.add_(0.01 * torch.arange(buffer.numel()) * (-1) ** step)
    if saves:
        sharded.save(saves, "1")
    found = whole(model) | buffers_of(model) | {"loss": loss}
    sharded.remove()
    return found


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MIXTURES)
def test_stages_are_bit_equal_and_a_run_resumes_at_any(rank: int, name: str, tmp_path: Path) -> None:
    first = trained(rank, name, 0, range(4))
    assert any(fqn.endswith(BIAS) for fqn in first) == (name in ("DeepSeek-V3", "GLM-4-MoE"))
    for stage in (1, 2, 3):
        assert same(trained(rank, name, stage, range(4)), first), stage
    trained(rank, name, 3, range(2), saves=tmp_path)
    for stage in (1, 3):
        assert same(trained(rank, name, stage, range(2, 4), resumes=tmp_path), first), stage
    if name == "Qwen3-MoE":  # of what this tests: on rank 0 alone, some experts get no gradient
        torch.manual_seed(0)
        model: Any = MIXTURES[name]()
        model(**batch(rank, 0)).loss.backward()
        gradients = model.model.layers[0].mlp.experts.down_proj.grad
        assert sum(bool(one.any()) for one in gradients) == (4 if rank else 2)
