"""Owns the facts about known optimizers: the states that each keeps for a parameter, and whether it needs parameters whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.optim.several import optimizers_of


@dataclass(frozen=True)
class Known:
    """Facts about an optimizer.

    Attributes:
        states: the most tensors of a parameter's size that it keeps for it with default options; for SGD, with momentum. Adafactor
            keeps less for a matrix (a row and a column), and MuonWithAdamW keeps one tensor for a matrix.
        elementwise: its update of an element depends only on that element's own history; otherwise on the parameter that the
            element lies in, and on no other.
        starts_at_zero: whether its first states are zeros, at any learning rate.
    """

    states: int
    elementwise: bool = True
    starts_at_zero: bool = True


KNOWN = {
    "ASGD": Known(1, starts_at_zero=False),
    "Adadelta": Known(2),
    "Adafactor": Known(1, elementwise=False, starts_at_zero=False),
    "Adagrad": Known(1),
    "Adam": Known(2),
    "AdamW": Known(2),
    "Adamax": Known(2),
    "Lion": Known(1),
    "Muon": Known(1, elementwise=False, starts_at_zero=False),
    "MuonWithAdamW": Known(2, elementwise=False),
    "NAdam": Known(2),
    "RAdam": Known(2),
    "RMSprop": Known(1),
    "Rprop": Known(2, starts_at_zero=False),
    "SGD": Known(1),
}
"""The optimizers of torch.optim and of ours that shards are right for, by the names of their classes."""

_UNKNOWN = 2
"""The number that is assumed for other optimizers, most of which are similar to Adam."""


def states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Return the most tensors of a parameter's size that this optimizer keeps for it, with its options."""
    return max(_states_per_parameter(member) for member in optimizers_of(optimizer))


def _states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    names = [base.__name__ for base in type(optimizer).__mro__]
    name = next((name for name in names if name in KNOWN), None)
    if name is None:
        return _UNKNOWN
    more = 0
    for group in optimizer.param_groups:
        options = [group.get("amsgrad"), group.get("centered"), name == "RMSprop" and group["momentum"]]
        more = max(more, sum(bool(option) for option in options))
    return KNOWN[name].states + more
