"""Owns the knowledge of which optimizers treat each element alone, so that a parameter may be cut anywhere. Called by shard."""

from __future__ import annotations

import torch

from zeroshard.errors import UsageError

ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Classes of torch.optim whose update of an element depends on that element's own history alone."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the optimizer may be given pieces of parameters; None where we do not know."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("torch.optim"):
            return cls.__name__ in ELEMENTWISE if cls is not torch.optim.Optimizer else None
    return None


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, declared: bool | None) -> None:
    """Raise `UsageError` for an optimizer that would be silently wrong on pieces of parameters."""
    known = is_elementwise(optimizer) if declared is None else declared
    name = type(optimizer).__name__
    if known is None:
        raise UsageError(
            f"zeroshard cuts parameters into shards and does not know whether {name} treats each element alone. If its "
            "update of an element uses nothing but that element's own gradient and state, pass elementwise=True; else "
            f"use one of {', '.join(ELEMENTWISE)}."
        )
    if not known:
        raise UsageError(
            f"{name} looks at whole parameters, and zeroshard cuts them into shards: the result would be silently wrong. "
            f"Use an elementwise optimizer: {', '.join(ELEMENTWISE)}."
        )
