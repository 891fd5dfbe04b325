"""Owns what users do to `parameter.grad` by hand: what is taken of it, and what is refused by name. Called by schedule."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zeroshard.errors import UsageError
from zeroshard.parameters.shown import grad_of
from zeroshard.schedule.unit import Unit


def gradients_of_users(unit: Unit) -> list[tuple[int, nn.Parameter]]:
    """The trained parameters in whose `grad` the user has put something."""
    named = enumerate(unit.named) if unit.trainable else ()
    return [(index, entry.parameter) for index, entry in named if grad_of(entry.parameter) is not None]


def refuse_replaced(unit: Unit, indices: Iterable[int] | None = None) -> None:
    """Raise where the user wants another gradient, or none, in the place of one that is in the mean already.

    Args:
        indices: of parameters of which that is known; default: those that told so themselves.
    """
    for index in unit.replaced_gradients if indices is None else indices:
        fqn = unit.named[index].fqn
        raise UsageError(
            f"{fqn}.grad was set after a backward of this step had given it a gradient (or to None, by model.zero_grad()). Set "
            "it before any backward, after sharded.optimizer.zero_grad(), or change the mean over ranks with "
            f'sharded.states.set("{fqn}", "gradients", value).'
        )


def refuse_frozen(unit: Unit, optimized: set[int]) -> None:
    """Raise where a parameter of the optimizer that is not trained has a gradient all the same: nobody would update it.

    Args:
        optimized: `id`s of the parameters that the optimizer lists.
    """
    for entry in () if unit.trainable else unit.named:
        if id(entry.parameter) in optimized and grad_of(entry.parameter) is not None:
            raise UsageError(
                f"{entry.fqn} has a gradient, and is frozen as far as zeroshard knows: it would not be updated. Call "
                "update_trainable() (on every rank) after changing requires_grad, or set its grad to None."
            )
