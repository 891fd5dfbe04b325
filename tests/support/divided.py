"""Owns training runs of models that a mesh divides, the same runs in one process, and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import sharded_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import zeroshard
from zeroshard import Policy, Sharded

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


def ordinary(model: Any) -> None:
    """Leave a model as it is."""


def in_bf16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


Change = Callable[[Any], None]
"""Changes a model before it is divided."""


@dataclass(frozen=True)
class Division:
    """A way to divide a model over ranks.

    Attributes:
        make: returns the model, the same on every rank.
        cut: divides it over the ranks of a dimension.
        dimension: the name of this dimension.
        group: returns what `shard` takes, of the whole mesh.
        loss: the loss of a model on a batch.
    """

    make: Callable[[], nn.Module]
    cut: Callable[[nn.Module, DeviceMesh], None]
    dimension: str
    group: Callable[[DeviceMesh], DeviceMesh]
    loss: Loss

    def made(self, change: Change = ordinary) -> Any:
        torch.manual_seed(0)
        model = self.make()
        change(model)
        return model

    def meshed(self, parts: int) -> DeviceMesh:
        """Return the mesh of all ranks, of which each `parts` divide a model."""
        return init_device_mesh("cpu", (dist.get_world_size() // parts, parts), mesh_dim_names=("dp", self.dimension))

    def shard(self, mesh: DeviceMesh | int, policy: Policy | int, change: Change = ordinary, **options: Any) -> Sharded:
        """Return the changed and divided model. In place of the mesh, the number of parts may be given."""
        mesh = self.meshed(mesh) if isinstance(mesh, int) else mesh
        model = self.made(change)
        self.cut(model, mesh[self.dimension])
        return zeroshard.shard(model, adamw(model), policy, group=self.group(mesh), **options)

    def take_steps(self, sharded: Sharded, steps: Iterable[int], microbatches: int = 1) -> Run:
        return take_steps(sharded, self.loss, sharded.rank, steps, microbatches)

    def in_one_process(self, ranks: int, steps: int, change: Change = ordinary, microbatches: int = 1) -> Run:
        return in_one_process(self.made(change), self.loss, ranks, steps, microbatches)

    def train(
        self, rank: int, parts: int, policies: Sequence[int | Policy], change: Change = ordinary, *, steps: int = 3,
        microbatches: int = 1, **options: Any,
    ) -> list[Run]:  # fmt: skip
        """Train under each policy on every rank. The model keeps its values after `remove`."""
        runs = []
        for policy in policies:
            sharded = self.shard(parts, policy, change, **options)
            run = self.take_steps(sharded, range(steps), microbatches) | {"states": states_of(sharded)}
            with torch.no_grad():
                run["evaluated"] = float(self.loss(sharded.model, 99, sharded.rank))
            with zeroshard.unsharded(sharded.model):
                run["values"] = values_of(sharded.model)
            sharded.remove()
            for name, value in values_of(sharded.model).items():
                assert torch.equal(value, run["values"][name]), name
            runs.append(run)
        return runs


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


def expect_all_same(everyone: Iterable[Iterable[Run]]) -> Run:
    """Expect the bits of one run from all ranks' runs, and return it. What a rank evaluates on its own batch is its own."""
    first: Run | None = None
    for runs in everyone:
        assert len({run.pop("evaluated", None) for run in runs}) == 1
        for run in runs:
            first = first or run
            expect_same(run, first)
    assert first is not None
    return first


def expect_near(run: Run, reference: Run, within: float = 1e-5) -> None:
    for part in ("losses", "norms"):
        assert run[part] == pytest.approx(reference[part], abs=within)
    for name, value in reference["values"].items():
        torch.testing.assert_close(
            run["values"][name], value, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )
