"""Functions that scripts call about features that zeroshard lacks: experts, kernels, hooks, other versions of torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zeroshard import DynamicLossScaler, StaticLossScaler

LossScalerBase = (DynamicLossScaler, StaticLossScaler)
"""The loss scalers, for isinstance."""


class ZeRORuntimeException(Exception):
    """An error that is never raised: zeroshard's errors are of `zeroshard.errors`."""


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    return hasattr(optimizer, "param_groups")


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    from packaging.version import Version

    own = Version(Version(torch.__version__).base_version)
    if min_version is not None and own < Version(str(min_version)):
        return False
    return max_version is None or own <= Version(str(max_version))


# ---------------------------------------------------------------------- experts: no parameter is one rank's own


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): no module has layers of DeepSpeed's MoE, since none can be made."""
    return False, 0


def is_moe_param(parameter: Tensor) -> bool:
    return False


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


# ---------------------------------------------------------------------- kernels: each is compatible, with nothing to load


class _Builder:
    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: there is nothing to compile."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Raise an error: there is no kernel."""
        raise NotImplementedError(
            f"zeroshard has no compiled kernels to load: it replaces {type(self).__name__} by Python code on torch."
        )


def _builder(name: str, kernel: str, product: str) -> type[_Builder]:
    return type(name, (_Builder,), {"__doc__": f"{product}.", "__module__": __name__, "NAME": kernel})


FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", "FusedAdam")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", "DeepSpeedCPUAdam")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", "DeepSpeedCPUAdagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", "DeepSpeedCPULion")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", "FusedLion")
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", "Files of offload")


# ---------------------------------------------------------------------- hooks: trainers take them off before they generate


class _NoModule:
    """A module without parameters: there is nothing to clear on them."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    ds_external_parameters = named_parameters


class _NoTrace:
    """A trace of parameters that was never taken."""

    def is_invalid_trace(self) -> bool:
        return True

    def _invalidate_trace(self) -> None:
        return


class DeepSpeedZeRoOffload:
    """An engine's `optimizer.parameter_offload`: hooks that are none, since `unsharded` lets the model run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.module = _NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _NoTrace()

    def _register_deepspeed_module(self, *_: Any, **__: Any) -> None:
        return

    setup_zero_stage3_hooks = _register_deepspeed_module
