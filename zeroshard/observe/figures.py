"""Owns what is known of a step when it is over, and how that is written as JSON. Made by progress; told by log and monitors."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepFigures:
    """What is known after a step. `seconds`, `sent`, `memory` and `peak` are this rank's; `loss` is the mean over ranks.

    Attributes:
        has_loss: the backwards were the engine's, which saw the loss.
        samples: since the start.
        samples_per_second: since the last figures.
        seconds: by part of the step, for one step.
        sent: bytes by collective since the last figures.
        memory: bytes of live storage by model state.
        peak: the most bytes that the accelerator's allocator had given out at once, or that the process had, where there is none.
        tokens_per_second: where somebody said how many tokens a sample has.
        at: when that was, in seconds since 1970.
    """

    step: int
    samples: int
    loss: float
    lr: float
    loss_scale: float
    grad_norm: float
    applied: bool
    has_loss: bool
    samples_per_second: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    peak: int = 0
    tokens_per_second: float | None = None
    at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        """Without what is not known; a number that is not finite is null, since JSON has none."""
        told: dict[str, Any] = {
            "step": self.step,
            "samples": self.samples,
            "at": round(self.at, 3),
            "loss": _finite(self.loss),
            "lr": _finite(self.lr),
            "loss_scale": _finite(self.loss_scale),
            "grad_norm": _finite(self.grad_norm),
            "applied": self.applied,
            "samples_per_second": _finite(self.samples_per_second),
            "tokens_per_second": self.tokens_per_second,
            "seconds": dict(self.seconds),
            "sent": dict(self.sent),
            "memory": dict(self.memory),
            "peak": self.peak,
        }
        if not self.has_loss:
            del told["loss"]
        return {key: value for key, value in told.items() if value or key in _ALWAYS}


_ALWAYS = ("step", "samples", "loss", "lr", "loss_scale", "grad_norm", "applied")


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


class Sent:
    """Bytes sent since the last look, out of counters that others look at and clear as well.

    Args:
        before: the counters at the beginning.
    """

    def __init__(self, before: Mapping[str, int]) -> None:
        self._before = dict(before)

    def take(self, now: Mapping[str, int]) -> dict[str, int]:
        """What came since, by collective."""
        before, self._before = self._before, dict(now)
        since = {name: count - before.get(name, 0) for name, count in now.items()}
        return {name: now[name] if more < 0 else more for name, more in since.items() if more}
