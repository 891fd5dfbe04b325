"""Owns the number of state tensors that each optimizer keeps for a parameter."""

from __future__ import annotations

import torch

from zeroshard.optim.several import optimizers_of

STATES_PER_PARAMETER = {
    "ASGD": 1,
    "Adadelta": 2,
    "Adafactor": 1,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "Lion": 1,
    "Muon": 1,
    "MuonWithAdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 1,
}
"""The most tensors of a parameter's size that an optimizer with default options keeps for it; for SGD, with momentum.

Adafactor keeps less for a matrix (a row and a column), and MuonWithAdamW keeps one tensor for a matrix.
"""

_UNKNOWN = 2
"""The number that is assumed for other optimizers, most of which are similar to Adam."""


def states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Return the most tensors of a parameter's size that this optimizer keeps for it, with its options."""
    return max(_states_per_parameter(member) for member in optimizers_of(optimizer))


def _states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    names = [base.__name__ for base in type(optimizer).__mro__]
    name = next((name for name in names if name in STATES_PER_PARAMETER), None)
    if name is None:
        return _UNKNOWN
    more = 0
    for group in optimizer.param_groups:
        options = [group.get("amsgrad"), group.get("centered"), name == "RMSprop" and group["momentum"]]
        more = max(more, sum(bool(option) for option in options))
    return STATES_PER_PARAMETER[name] + more
