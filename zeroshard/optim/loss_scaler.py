"""Owns the loss scale of fp16 training: the factor of the loss, and the rules by which it changes.

fp16 holds nothing between 0 and 6e-8: small gradients would vanish. The loss is multiplied by a scale before the
backward, and the gradients are divided by the same scale after it. The scale grows while all gradients are finite
(Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.2).

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
    """A scale for the next backward. It is the same on every rank, since every rank gets the same norm."""

    scale: float

    @abstractmethod
    def update(self, overflow: bool) -> None:
        """Change the scale after a step whose gradients overflowed, or did not. Raises `LossScaleError` at the smallest
        scale.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` takes."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        vars(self).update(state)


@final
@dataclass
class StaticLossScaler(LossScaler):
    """A loss scaler with one scale for the whole run; 1.0 is no scaling."""

    scale: float = 1.0

    def update(self, overflow: bool) -> None:
        """Leave the scale as it is."""


@final
@dataclass
class DynamicLossScaler(LossScaler):
    """Halves the scale when gradients overflow, and doubles it after a clean window.

    Attributes:
        scale: the scale now.
        window: clean steps after which the scale doubles.
        hysteresis: the number of overflows at which the scale halves; the first `hysteresis - 1` leave it as it is.
        consecutive_hysteresis: whether any clean step resets the count of overflows, or only a clean window.
        min_scale: the smallest scale; an overflow there is an error.
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
        """Change the scale, as DeepSpeed does at stages 1 to 3."""
        if overflow:
            if self._left > 1:
                self._left -= 1
            elif self.scale == self.min_scale:
                raise LossScaleError(
                    f"the gradients overflow at the smallest loss scale allowed ({self.scale:g}): the loss itself is "
                    "infinite or NaN, or the model does not fit into fp16's range (65504). Look at the loss, lower the "
                    "learning rate, train in bf16, or lower fp16.min_loss_scale."
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
        """Continue from the state of another dynamic scaler; window, hysteresis and smallest scale stay this one's."""
        if "_step" in saved:
            self.scale = float(saved["scale"])
            self._left = int(saved["_left"])
            self._step = int(saved["_step"])
            self._last_overflow = int(saved["_last_overflow"])
