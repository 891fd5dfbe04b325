"""Owns the facts about known optimizers: their states, whether they need parameters whole, and those that are refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.several import Several, optimizers_of


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


REFUSED = {
    "LBFGS": "looks at all parameters at once",
    "SparseAdam": "takes sparse gradients",
    **dict.fromkeys(
        ("Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
        "estimates one step size from all parameters at once",
    ),
}
"""Classes that no sharding is right for, and why. Those of libraries go by their names: they are not imported."""


def refuse_what_cannot_be_sharded(cls: type[torch.optim.Optimizer]) -> None:
    """Raise `UsageError` if an optimizer on a rank's part of the parameters would compute other values, or wait forever."""
    for base in cls.__mro__:
        if base.__name__ in REFUSED:
            raise UsageError(
                f"{cls.__name__} {REFUSED[base.__name__]}, and zeroshard shards dense parameters over ranks: the "
                f"result would be wrong. Use one of {', '.join(KNOWN)}."
            )


def looks_at_whole_parameters(cls: type[torch.optim.Optimizer]) -> bool | None:
    """Return whether optimizers of this class need each parameter whole in one shard; None if that is unknown."""
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.optim", "zeroshard.optim")) and base.__name__ in KNOWN:
            return not KNOWN[base.__name__].elementwise
    return None


def needs_whole_parameters(optimizer: torch.optim.Optimizer, elementwise: bool | None = None) -> bool:
    """Return whether this optimizer needs each parameter whole in one shard.

    Args:
        elementwise: the user's argument, which overrides the list of classes.

    Raises:
        UsageError: the class is unknown, so either way may be wrong.
    """
    if isinstance(optimizer, Several):
        whole = [needs_whole_parameters(one, elementwise) for one in optimizer.members]  # each may be refused
        return any(whole)
    refuse_what_cannot_be_sharded(type(optimizer))
    if elementwise is not None:
        return not elementwise
    known = looks_at_whole_parameters(type(optimizer))
    if known is not None:
        return known
    name = type(optimizer).__name__
    raise UsageError(
        f"zeroshard cuts parameters into shards, and {name} may need whole ones. If its update "
        "of an element uses nothing but that element's own gradient and state, pass elementwise=True; if it uses the "
        "parameter that the element lies in (its norm, its rows), pass elementwise=False, and no parameter is cut; in a config "
        f'"zero_allow_untested_optimizer": true is the same. Or use one of {", ".join(KNOWN)}.'
    )
