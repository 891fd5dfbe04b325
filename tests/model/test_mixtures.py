"""Mixtures of experts train alike at every stage: experts without tokens, biases that move between steps, saves and loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import text
from mixtures import MIXTURES
from torch import Tensor

import zeroshard
from zeroshard import Policy

BIAS = "e_score_correction_bias"


def batch(rank: int, step: int) -> dict[str, Tensor]:
    """Rank 0 has one token again and again, so it reaches two of a layer's four experts."""
    found = text(rank, step)
    if rank == 0:
        found = {name: torch.full_like(one, 5 + step) for name, one in found.items()}
    return found


def trained(
    rank: int, name: str, stage: int, steps: range, folder: Path | None = None, *, resumes: bool = False
) -> dict[str, Any]:
    """Train, with the bias of DeepSeek-V3's routers moved after each step as its trainer does; save at the end, or load first."""
    torch.manual_seed(1 if resumes else 0)
    model: Any = MIXTURES[name]()
    model.train()
    sharded = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), Policy.stage(stage), bucket_numel=3000
    )
    if resumes:
        assert folder is not None
        sharded.load(folder, "1")
    for step in steps:
        loss = model(**batch(rank, step)).loss
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        for fqn, buffer in model.named_buffers():
            if fqn.endswith(BIAS):
                buffer.add_(0.01 * torch.arange(buffer.numel()) * (-1) ** step)
    if folder is not None and not resumes:
        sharded.save(folder, "1")
    with zeroshard.unsharded(model):
        values = {fqn: one.detach().clone() for fqn, one in model.state_dict().items()}
    sharded.remove()
    return {"loss": loss.detach(), "values": values}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = all(torch.equal(value, other["values"][fqn]) for fqn, value in one["values"].items())
    return same and torch.equal(one["loss"], other["loss"])


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize("name", MIXTURES)
def test_stages_are_bit_equal(rank: int, name: str) -> None:
    first = trained(rank, name, 0, range(4))
    assert any(fqn.endswith(BIAS) for fqn in first["values"]) == (name in ("DeepSeek-V3", "GLM-4-MoE"))
    for stage in (1, 2, 3):
        assert equal(trained(rank, name, stage, range(4)), first), stage


def test_a_rank_reaches_few_experts() -> None:
    """Of what the tests above do: on rank 0 alone, some experts get no gradient."""
    for rank, expected in ((0, 2), (1, 4)):
        torch.manual_seed(0)
        model: Any = MIXTURES["Qwen3-MoE"]()
        model(**batch(rank, 0)).loss.backward()
        gradients = model.model.layers[0].mlp.experts.down_proj.grad
        assert sum(bool(one.any()) for one in gradients) == expected


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_run_resumes_at_another_stage(rank: int, name: str, tmp_path: Path) -> None:
    whole = trained(rank, name, 3, range(4))
    trained(rank, name, 3, range(2), tmp_path)
    for stage in (1, 3):
        assert equal(trained(rank, name, stage, range(2, 4), tmp_path, resumes=True), whole), stage
