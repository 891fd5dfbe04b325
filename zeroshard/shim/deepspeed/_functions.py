"""Functions and classes of DeepSpeed that zeroshard offers only under DeepSpeed's names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

import zeroshard
from deepspeed._names import constant
from zeroshard import DynamicLossScaler, StaticLossScaler
from zeroshard.integrations.accelerate import refuse_divided_by_transformers
from zeroshard.torch_private import is_distributed

# ---------------------------------------------------------------------- training loops


class RepeatingLoader:
    """A loader that repeats another loader without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Unshard the engine's parameters in this context, in which each rank may generate independently."""
    with zeroshard.unsharded(model.parameters()):
        yield model


# ---------------------------------------------------------------------- tensors on other devices


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copy tensors to `device`, each into its own storage, in lists, tuples and dicts of any depth.

    Tied tensors stay tied. Without a copy, torch.save would save the whole flat buffer of a view. DTensors become whole: every
    rank of their mesh must call it.
    """
    copies: dict[Any, Tensor] = {}

    def clone(item: Any) -> Any:
        if isinstance(item, Tensor) and is_distributed(item):
            return item.detach().full_tensor().to(device)  # type: ignore[attr-defined]
        if isinstance(item, Tensor):
            same = (item.data_ptr(), item.shape, item.stride(), item.dtype) if item.numel() else id(item)
            if same not in copies:
                copies[same] = item.detach().to(device, copy=True)
            return copies[same]
        if isinstance(item, list | tuple):
            return type(item)([clone(one) for one in item])
        if isinstance(item, dict):
            return type(item)({key: clone(one) for key, one in item.items()})
        return item

    return clone(item)


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move tensors to `device`, in lists, tuples and dicts of any depth. Values that `criterion_func` rejects stay.

    Args:
        item: the value.
        device: the device.
        criterion_func: returns whether to move a value, in place; default: every tensor, as a copy.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple):
        return type(item)([move_to_device(one, device, criterion_func) for one in item])
    if isinstance(item, dict):
        return {key: move_to_device(one, device, criterion_func) for key, one in item.items()}
    if criterion_func is None and isinstance(item, Tensor):
        return item.to(device)
    return item


class OnDevice:
    """A context (`with OnDevice(dtype, device):`) with a default dtype and device for new tensors."""

    def __init__(
        self, dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype or torch.get_default_dtype())
            self._stack.enter_context(torch.device(self.device))

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()


# ---------------------------------------------------------------------- the logger


class _OfTrainings(logging.Logger):
    """A logger that refuses a training run without an engine.

    transformers sets its level at the start of training (`deepspeed_init`). If transformers divided the model itself,
    it calls nothing else in this package.
    """

    def setLevel(self, level: int | str) -> None:
        refuse_divided_by_transformers()
        super().setLevel(level)


logger = logging.getLogger("DeepSpeed")
logger.setLevel(logging.WARNING)
logger.propagate = False
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
logger.__class__ = _OfTrainings


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks: [-1] means all, None means none. Before the ranks are joined, always log."""
    line = _line(message, ranks)
    if line is not None:
        logger.log(level, line)


def print_dist(message: str, ranks: list[int] | None = None) -> None:
    """Print on the given ranks: [-1] means all, None means none. Before the ranks are joined, always print."""
    line = _line(message, ranks)
    if line is not None:
        print(line)


def _line(message: str, ranks: list[int] | None) -> str | None:
    if not dist.is_initialized():
        return f"[Rank -1] {message}"
    rank = dist.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by its name: "debug", "info", "warning", "error" or "critical"."""
    (custom_logger or logger).setLevel(log_level_str.upper())


# ---------------------------------------------------------------------- features that zeroshard lacks

LossScalerBase = (DynamicLossScaler, StaticLossScaler)
"""The classes of loss scalers, for isinstance."""


class ZeRORuntimeException(Exception):
    """An error that is never raised. zeroshard raises the errors of `zeroshard.errors`."""


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    return hasattr(optimizer, "param_groups")


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    from packaging.version import Version

    own = Version(Version(torch.__version__).base_version)
    if min_version is not None and own < Version(str(min_version)):
        return False
    return max_version is None or own <= Version(str(max_version))


# ---------------------------------------------------------------------- experts: no parameter belongs to one rank only


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[Any]:
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


# ---------------------------------------------------------------------- kernels: compatible, with nothing to load


class _Builder:
    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True: there is nothing to compile."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Raise an error: there is no kernel."""
        raise NotImplementedError(
            f"zeroshard has no compiled kernels to load: Python code on torch replaces {type(self).__name__}. Leave load() out."
        )


def _builder(name: str, kernel: str) -> type[_Builder]:
    return type(name, (_Builder,), {"__module__": __name__, "NAME": kernel})


FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam")
CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam")
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad")
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion")
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion")
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io")


# ---------------------------------------------------------------------- hooks that trainers remove before generation


class DeepSpeedZeRoOffload:
    """The `optimizer.parameter_offload` of an engine. It has no hooks, since models run inside `unsharded`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        nothing = constant(())
        self.module = SimpleNamespace(named_parameters=nothing, ds_external_parameters=nothing)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        # No trace of parameters is ever recorded.
        self.param_coordinator = SimpleNamespace(is_invalid_trace=lambda: True, _invalidate_trace=lambda: None)
        self._register_deepspeed_module = self.setup_zero_stage3_hooks = nothing
