"""Owns the choice whether an optimizer needs parameters whole, and the refusal of those that no sharding is right for."""

from __future__ import annotations

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.several import Several
from zeroshard.optim.states import KNOWN

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
