"""Owns the combination of several optimizers of one model into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError


class Several(torch.optim.Optimizer):
    """An optimizer that combines optimizers of different parameters, with all their param groups.

    Raises:
        UsageError: two optimizers have the same parameter, or one optimizer contains others.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.step_members: Callable[[], Any] | None = None
        """Steps all members at once; set when the model is sharded."""
        for member in members:
            values = list(vars(member).values())
            for value in vars(member).values():
                if isinstance(value, dict):
                    values += value.values()
                elif isinstance(value, list | tuple):
                    values += value
            if any(isinstance(value, torch.optim.Optimizer) for value in values):
                raise UsageError(
                    f"{type(member).__name__} contains other optimizers, which may keep states elsewhere: "
                    "pass those optimizers instead, or pass only this one."
                )
        groups = [group for member in members for group in member.param_groups]
        parameters = [id(parameter) for group in groups for parameter in group["params"]]
        twice = len(parameters) - len({*parameters})
        if twice:
            raise UsageError(
                f"{twice} parameters are in more than one of the optimizers. Put each parameter into only one."
            )
        names = [group.pop("param_names", None) for group in groups]
        super().__init__(groups, {})  # it refuses groups of which only some have names
        for group, own in zip(groups, names, strict=True):
            if own is not None:
                group["param_names"] = own
        self.members = list(members)
        for member in members:
            self.state.update(member.state)

    def __repr__(self) -> str:
        return f"Several({self.members!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.connect()

    def connect(self) -> None:
        """Share this optimizer's groups and states with its members. Before this call, the members are as the user created them."""
        start = 0
        for member in self.members:
            end = start + len(member.param_groups)
            member.param_groups = self.param_groups[start:end]
            member.state = self.state
            start = end

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all members, after a call of the closure, if there is one. Return its value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.step_members is not None:
            report = self.step_members()
            return report if closure is None else loss
        for member in self.members:
            member.step()
        return loss


def optimizers_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the user created: the members of a `Several`, or the only one."""
    return optimizer.members if isinstance(optimizer, Several) else [optimizer]


def tensors_of(parameters: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of a param group, which lists them alone or, as torch allows, as pairs of a name and a tensor."""
    return [one[1] if isinstance(one, tuple) else one for one in parameters]


def class_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return, for each param group, the name of the class of the optimizer that the user created for it."""
    return [type(one).__qualname__ for one in optimizers_of(optimizer) for _ in one.param_groups]
