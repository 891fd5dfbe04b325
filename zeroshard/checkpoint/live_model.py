"""Owns the model that trains, as checkpoints and exports see it. Called by checkpoints, saving, loading and formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zeroshard.collectives.base import Collectives
from zeroshard.layout.names import name_of
from zeroshard.policy import Policy
from zeroshard.schedule.schedule import Schedule
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import ModelStates
from zeroshard.step.sharded_optimizer import ShardedOptimizer


@dataclass(frozen=True)
class LiveModel:
    """One sharded model with its optimizer. The same object for the model's life; what it shows is present."""

    model: nn.Module
    schedule: Schedule
    optimizer: ShardedOptimizer
    collectives: Collectives
    policy: Policy
    adapter_names: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    """What PEFT said of its adapters, see description."""

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def units(self) -> Sequence[Unit]:
        return self.schedule.units

    @property
    def states(self) -> ModelStates:
        """The model states by name, made anew."""
        return ModelStates(self.schedule.units, self.optimizer, self.collectives)

    @property
    def inner(self) -> torch.optim.Optimizer | None:
        """The user's optimizer, where its param groups are known by names."""
        return self.optimizer.inner if self.optimizer.groups_are_known else None

    @property
    def group_names(self) -> list[list[str]]:
        """The first names of each param group's parameters."""
        fqn_of: Mapping[int, str] = {id(entry.parameter): entry.fqn for unit in self.units for entry in unit.named}
        return [[fqn_of[parameter] for parameter in group if parameter in fqn_of] for group in self.optimizer.groups]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a state dict holds, by name."""
        return dict(_persistent_buffers(self.model))


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield name_of(f"{prefix}.{name}" if prefix else name), buffer.detach()
