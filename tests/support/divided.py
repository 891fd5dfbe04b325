"""Owns training runs of models that a mesh divides, the same runs in one process, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from insides import sharded_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeroshard import Sharded

Loss = Callable[[Any, int, int], Tensor]
"""Returns the loss of a model, or of an engine, for the number of a batch and a data-parallel rank."""
Run = dict[str, Any]
"""The losses of the last microbatches and the norms of steps, with values and states by name."""
LARGEST_NORM = 0.5


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)


def in_one_process(
    model: nn.Module,
    loss: Loss,
    ranks: int,
    steps: int,
    microbatches: int = 1,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Run:
    """Train with plain PyTorch on the batches of all data-parallel ranks."""
    optimizer = make_optimizer(model)
    run: Run = {"losses": [], "norms": []}
    for step in range(steps):
        for microbatch in range(microbatches):
            losses = [loss(model, step * microbatches + microbatch, rank) for rank in range(ranks)]
            mean = torch.stack(losses).sum() / (ranks * microbatches)
            mean.backward()
        run["losses"].append(float(mean.detach()))
        run["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return run | {"values": {name: one.detach() for name, one in model.named_parameters()}}


def take_steps(sharded: Sharded, loss: Loss, rank: int, steps: Iterable[int], microbatches: int = 1) -> Run:
    """Train on this data-parallel rank's batches."""
    run: Run = {"losses": [], "norms": []}
    for step in steps:
        for microbatch in range(microbatches):
            with sharded.accumulate(microbatch < microbatches - 1):
                part = loss(sharded.model, step * microbatches + microbatch, rank) / microbatches
                part.backward()
        run["losses"].append(float(sharded.sum_over_ranks(part.detach())) / sharded.world_size)
        run["norms"].append(float(sharded.clip_grad_norm_(LARGEST_NORM)))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    return run


def train_engine(engine: Any, loss: Loss, rank: int, numbers: Iterable[int]) -> Run:
    """Train an engine on this data-parallel rank's batches, whose config clips at LARGEST_NORM."""
    sharded = sharded_of(engine)
    run: Run = {"losses": [], "norms": []}
    for number in numbers:
        found = loss(engine, number, rank)
        engine.backward(found)
        engine.step()
        run["losses"].append(float(sharded.sum_over_ranks(found.detach())) / sharded.world_size)
        run["norms"].append(float(engine.get_global_grad_norm() or 0.0))  # None before the first step
    return run | {"values": {name: sharded.states.get(name) for name, _ in engine.module.named_parameters()}}


def states_of(sharded: Sharded) -> dict[str, Tensor]:
    """Return master weights and AdamW's states of the whole parameters."""
    return {
        f"{name} {state}": sharded.states.get(name, state)
        for name, parameter in sharded.model.named_parameters()
        for state in (("parameters", "exp_avg", "exp_avg_sq") if parameter.requires_grad else ("parameters",))
    }


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters of an unsharded model, which may be DTensors."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in model.named_parameters()
    }


def expect_same(one: Run, other: Run) -> None:
    assert one.keys() == other.keys()
    assert one["norms"] == other["norms"] and one.get("losses") == other.get("losses")
    for part in ("values", "states"):
        for name, value in one.get(part, {}).items():
            assert torch.equal(value, other[part][name]), name


def expect_near(run: Run, reference: Run, within: float = 1e-5) -> None:
    for part in ("losses", "norms"):
        assert run[part] == pytest.approx(reference[part], abs=within)
    for name, value in reference["values"].items():
        torch.testing.assert_close(
            run["values"][name], value, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )
