"""Owns the combination of several optimizers of one model into one: each has its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroshard.errors import UsageError


class Several(torch.optim.Optimizer):
    """Optimizers of disjoint parameters; its param groups are theirs, one optimizer's after the other's.

    Raises:
        UsageError: two of them list the same parameter, or one of them is made of others.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        for member in members:
            if any(isinstance(held, torch.optim.Optimizer) for value in vars(member).values() for held in _flat(value)):
                raise UsageError(
                    f"{type(member).__name__} is made of other optimizers, which may keep states elsewhere: "
                    "pass those, or only this one."
                )
        groups = [group for member in members for group in member.param_groups]
        parameters = [id(parameter) for group in groups for parameter in group["params"]]
        twice = len(parameters) - len({*parameters})
        if twice:
            raise UsageError(f"{twice} parameters are in more than one of the optimizers. Give each parameter to one.")
        super().__init__(groups, {})
        self.members = list(members)
        for member in members:
            self.state.update(member.state)
        self._connect()

    def __repr__(self) -> str:
        return f"Several({self.members!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    def _connect(self) -> None:
        """Make the members share this one's groups and states."""
        start = 0
        for member in self.members:
            end = start + len(member.param_groups)
            member.param_groups = self.param_groups[start:end]
            member.state = self.state
            start = end

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all of them."""
        if closure is not None:
            raise UsageError("several optimizers step without a closure: run forward and backward before.")
        for member in self.members:
            member.step()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def optimizers_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the user made."""
    return optimizer.members if isinstance(optimizer, Several) else [optimizer]
