"""Owns what `engine.step()` returns, and its wording. Called by engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What `engine.step()` did.

    Attributes:
        applied: whether the parameters were updated.
        reason: why not, or None.
        not_finite: fqns of the parameters whose gradient has an infinite or NaN element.
        grad_norm: the global L2 norm before clipping, of unscaled gradients; None between the microbatches of a step.
        loss_scale: the scale that the gradients were made with.
    """

    applied: bool
    reason: str | None = None
    not_finite: tuple[str, ...] = ()
    grad_norm: float | None = None
    loss_scale: float = 1.0


def why_not_finite(norm: float, not_finite: Sequence[str]) -> str:
    """The reason for a step that is not applied."""
    named = f": those of {', '.join(not_finite[:3])}" + (", ..." if len(not_finite) > 3 else "")
    return f"the gradient norm is {norm}; {len(not_finite)} gradients are not finite{named if not_finite else ''}"
