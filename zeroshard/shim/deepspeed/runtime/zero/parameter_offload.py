"""What trainers take off a stage-3 engine before they generate, and put back: nothing, since `unsharded` lets the model run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from deepspeed._missing import missing

__all__ = ["DeepSpeedZeRoOffload"]
__getattr__ = missing(__name__)


class _NoModule:
    """A module without parameters: there is nothing to clear on them."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


class _NoTrace:
    """A trace of parameters that was never taken."""

    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        return


class DeepSpeedZeRoOffload:
    """An engine's `optimizer.parameter_offload`: hooks that are none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.module = _NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _NoTrace()

    def _register_deepspeed_module(self, *_: Any, **__: Any) -> None:
        return

    setup_zero_stage3_hooks = _register_deepspeed_module
