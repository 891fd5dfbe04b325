"""Owns the loss scale of fp16 training, and the rules by which it changes.

fp16 has no values between 0 and 6e-8, so small gradients would become 0. The training loop multiplies the loss by a
scale before the backward and divides the gradients by the scale afterwards. The scale grows while all gradients are finite
(Micikevicius et al., arXiv:1710.03740, section 3.2).

    scaler = zeroshard.DynamicLossScaler()
    (loss.float() * scaler.scale).backward()
    norm = sharded.clip_grad_norm_(1.0, loss_scale=scaler.scale)
    overflow = not math.isfinite(norm)
    if not overflow:
        sharded.optimizer.step()
    sharded.optimizer.zero_grad()
    scaler.update(overflow)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from zeroshard.errors import LossScaleError


class LossScaler(ABC):
    """The loss scale of the next backward. It is the same on every rank, since all ranks have the same norm."""

    scale: float

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """Update the scale after a step.

        Args:
            overflow: whether a gradient was infinite or NaN.

        Raises:
            LossScaleError: the gradients overflowed at the smallest scale.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` takes."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        vars(self).update(state)


@final
@dataclass
class StaticLossScaler(LossScaler):
    """A loss scaler with a constant scale. 1.0 means no scaling."""

    scale: float = 1.0

    def update(self, overflow: bool) -> None:
        """Keep the scale."""


@final
@dataclass
class DynamicLossScaler(LossScaler):
    """A loss scaler that halves the scale if gradients overflow and doubles it after a window without overflow.

    Attributes:
        scale: the current scale.
        window: after each `window` steps in a row without overflow, the next step without overflow doubles the scale.
        hysteresis: the number of overflows until the scale halves; each later overflow halves it again until the count
            is reset.
        consecutive_hysteresis: whether one step without overflow resets the count of overflows. Otherwise only
            `window` steps in a row without overflow do.
        min_scale: the smallest scale. An overflow that would halve it raises LossScaleError.
    """

    scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    _left: int = 0
    """The number of overflows left until the scale halves."""
    _step: int = 0
    _last_overflow: int = -1

    def __post_init__(self) -> None:
        self._left = self.hysteresis

    def update(self, overflow: bool) -> None:
        """Update the scale after a step, as DeepSpeed does at stages 1 to 3.

        Raises:
            LossScaleError: an overflow would halve the smallest scale.
        """
        if overflow:
            if self._left > 1:
                self._left -= 1
            elif self.scale == self.min_scale:
                raise LossScaleError(
                    f"the gradients overflow at the smallest loss scale allowed ({self.scale:g}): the loss itself is "
                    "infinite or NaN, or the model exceeds fp16's range (65504). Check the loss, lower the learning "
                    "rate, train in bf16, or lower fp16.min_loss_scale."
                )
            else:
                self.scale = max(self.scale / 2, self.min_scale)
            self._last_overflow = self._step
        else:
            clean = self._step - self._last_overflow - 1
            doubles = clean > 0 and clean % self.window == 0
            if doubles or self.consecutive_hysteresis:
                self._left = self.hysteresis
            if doubles:
                self.scale *= 2
        self._step += 1

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the scale and counts of another dynamic scaler, but keep this scaler's settings. Ignore a static scaler."""
        if "_step" in saved:
            self.scale = float(saved["scale"])
            self._left = int(saved["_left"])
            self._step = int(saved["_step"])
            self._last_overflow = int(saved["_last_overflow"])
