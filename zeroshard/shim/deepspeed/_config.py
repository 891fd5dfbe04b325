"""DeepSpeed's config class and constants, and the marks of modules that each form one unit."""

from __future__ import annotations

import enum
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn

from zeroshard import ConfigError
from zeroshard.core.bucketing import MIXTURES
from zeroshard.core.named_parameter import named_modules
from zeroshard.engine.config.load import load_config, read

DEFAULT_LEAF_MODULE_CLASSES = list(MIXTURES)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
ZeroStageEnum = enum.Enum("ZeroStageEnum", _STAGES, type=int)  # type: ignore[misc]
OffloadDeviceEnum = enum.Enum("OffloadDeviceEnum", {"none": "none", "cpu": "cpu", "nvme": "nvme"}, type=str)
_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
OffloadStateTypeEnum = enum.Enum("OffloadStateTypeEnum", {name: name for name in _STATES}, type=str)  # type: ignore[misc]
"""The states that `engine.offload_states(include=...)` accepts."""


class DeepSpeedConfig:
    """A config that was read and checked, with resolved batch sizes. Other attributes are the config's keys."""

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise ConfigError(
                "DeepSpeedConfig(mesh_device=...) is not supported. Leave it out, and use zeroshard.sequence for long sequences."
            )
        group = None if mpu is None else mpu.get_data_parallel_group()
        joined = dist.is_initialized()
        self.world_size = dist.get_world_size(group) if joined else 1
        self.global_rank = dist.get_rank() if joined else 0
        self._resolved = load_config(config, self.world_size)
        schema = self._resolved.schema
        self.train_batch_size = self._resolved.batch.train
        self.train_micro_batch_size_per_gpu = self._resolved.batch.micro
        self.gradient_accumulation_steps = self._resolved.batch.accumulation
        self.zero_config = schema.zero_optimization
        self.zero_optimization_stage = self._resolved.stage
        self.zero_enabled = self._resolved.stage > 0
        self.float16_config = schema.fp16
        self.bfloat16_config = schema.bf16
        self.optimizer_name = schema.optimizer.type.lower() if schema.optimizer else None
        self.optimizer_params = schema.optimizer.params if schema.optimizer else None
        self.scheduler_name = schema.scheduler.type if schema.scheduler else None
        self.scheduler_params = schema.scheduler.params if schema.scheduler else None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(self._resolved.schema, name):
            return getattr(self._resolved.schema, name)
        raise AttributeError(f"the config has no key {name!r}")


# ---------------------------------------------------------------------- modules that each form one unit with their submodules

_LEAF = "_z3_leaf"
"""The attribute of marked modules, which accelerate's users read."""
_marked: WeakSet[nn.Module] = WeakSet()


def z3_leaf_module(model: nn.Module) -> bool:
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    return any(parameter is model for module in _marked if z3_leaf_module(module) for parameter in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    setattr(model, _LEAF, flag)
    _marked.add(model)


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _mark_classes(
    model: nn.Module, leaf_module_classes: Sequence[type | str] | str, raise_if_not_found: bool = True, *, flag: bool
) -> list[nn.Module]:
    """Set the marks of the modules of these classes or class names, and return them, children first as in DeepSpeed."""
    classes = [leaf_module_classes] if isinstance(leaf_module_classes, str) else leaf_module_classes
    wrong = [one for one in classes if not isinstance(one, type | str)]
    if wrong:
        raise AssertionError(f"leaf_module_classes must be a list of types or names, got {wrong[0]!r}.")
    found = [module for module in reversed(list(model.modules())) if any(_is_of(module, one) for one in classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {classes} found in model {type(model).__name__}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


set_z3_leaf_modules = partial(_mark_classes, flag=True)
unset_z3_leaf_modules = partial(_mark_classes, flag=False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names. Return the modules and the names without a module."""
    return _mark(model, module_names, operator.eq, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the endings of their full names. Return the modules and the endings without a module."""
    return _mark(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark(
    model: nn.Module, asked: Sequence[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    known = list(named_modules(model))
    found = [[module for name, module in known if fits(name, one)] for one in asked]
    missing_names = [one for one, modules in zip(asked, found, strict=True) if not modules]
    if missing_names and raise_if_not_found:
        raise ValueError(f"No modules named {missing_names} found in model {type(model).__name__}.")
    modules = list(dict.fromkeys(chain.from_iterable(found)))
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules, missing_names


def with_leaf_modules(model: nn.Module, config: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    """Mark the config's leaf modules, and return the config with all marked modules in `leaf_module.names`.

    If the config names no classes, the known mixtures of experts are marked. If nothing is marked, the config is returned
    unchanged.
    """
    raw = read(config)
    zero = raw.get("zero_optimization")
    block = dict((zero.get("leaf_module") if isinstance(zero, Mapping) else None) or {})
    said = {key: [value] if isinstance(value, str) else list(value) for key, value in block.items()}
    set_z3_leaf_modules(model, said.get("classes", list(MIXTURES)), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, said.get("names", []), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, said.get("name_suffixes", []), raise_if_not_found=False)
    names = [name for name, module in named_modules(model) if name and z3_leaf_module(module)]
    if not names or not isinstance(zero, Mapping):
        return config
    # Only the names of existing modules: DeepSpeed does not raise for a module that the model lacks.
    return {**raw, "zero_optimization": {**zero, "leaf_module": {"names": names}}}
