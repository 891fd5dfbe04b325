"""Owns what an optimizer knows of the engine that drives it: whose a step is, how the last one went. Part of sharded_optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class Driven:
    """The part of an optimizer that an engine sets, and reads.

    Attributes:
        driver: does what belongs to a step besides the update (clipping, counting), where the user calls `step` all the same.
        overflow: whether the last gradient norm that was asked for was infinite or NaN; an engine's: and the step was left out.
        loss_scale: what the next loss is multiplied by before its backward; 1 but under fp16.
    """

    driver: Callable[[], Any] | None = None
    loss_scale = 1.0
    _is_driven = False
    _overflow = False
    _norm: float | Tensor | None = None

    @property
    def overflow(self) -> bool:
        """See above. It is read when it is asked for: a norm may be on its way from an accelerator still."""
        if self._norm is not None:
            self._overflow, self._norm = not math.isfinite(self._norm), None
        return self._overflow

    @overflow.setter
    def overflow(self, overflow: bool) -> None:
        self._overflow, self._norm = overflow, None

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Inside, `step` is the update alone: its caller is the driver."""
        self._is_driven = True
        try:
            yield
        finally:
            self._is_driven = False

    @property
    def cur_scale(self) -> float:
        """DeepSpeed's name of `loss_scale`."""
        return self.loss_scale
