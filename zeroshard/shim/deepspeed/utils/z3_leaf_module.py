"""Modules that are one unit with all that they contain: marks on modules, which reach `zeroshard.initialize` by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from zeroshard.config.load import read
from zeroshard.layout.bucketing import MIXTURES

_marks: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def z3_leaf_module(model: nn.Module) -> bool:
    return _marks.get(model, False)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    return any(parameter is model for module, is_leaf in _marks.items() if is_leaf for parameter in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    _marks[model] = flag


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _mark_classes(
    model: nn.Module, classes: Sequence[type | str] | str, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    if isinstance(classes, str):  # not its letters
        classes = [classes]
    wrong = [one for one in classes if not isinstance(one, type | str)]
    if wrong:
        raise AssertionError(f"leaf_module_classes must be a list of types or names, got {wrong[0]!r}.")
    # Children first, as DeepSpeed lists them.
    found = [module for module in reversed(list(model.modules())) if any(_is_of(module, one) for one in classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {classes} found in model {type(model).__name__}.")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or of classes so named."""
    return _mark_classes(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    return _mark_classes(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their full names. Return them, and the names without a module."""
    known = dict(model.named_modules())
    return _mark(
        model, [[name] if name in known else [] for name in module_names], module_names, flag, raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their full names. Returns them, and the ends that fit none."""
    names = [name for name, _ in model.named_modules()]
    found = [[name for name in names if name.endswith(suffix)] for suffix in module_name_suffixes]
    return _mark(model, found, module_name_suffixes, flag, raise_if_not_found)


def _mark(
    model: nn.Module, found: Sequence[Sequence[str]], asked: Sequence[str], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    missing_names = [one for one, names in zip(asked, found, strict=True) if not names]
    if missing_names and raise_if_not_found:
        raise ValueError(f"No modules named {missing_names} found in model {type(model).__name__}.")
    modules = list(dict.fromkeys(model.get_submodule(name) for names in found for name in names))
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules, missing_names


def with_leaf_modules(model: nn.Module, config: str | os.PathLike[str] | Mapping[str, Any]) -> Any:
    """The config with the model's marked modules in its `leaf_module.names`. What the config names itself is marked too."""
    raw = read(config)
    zero = raw.get("zero_optimization")
    block = dict((zero.get("leaf_module") if isinstance(zero, Mapping) else None) or {})
    said = {key: [value] if isinstance(value, str) else list(value) for key, value in block.items()}
    set_z3_leaf_modules(model, said.get("classes", list(MIXTURES)), raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, said.get("names", []), raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, said.get("name_suffixes", []), raise_if_not_found=False)
    names = [name for name, module in model.named_modules() if name and z3_leaf_module(module)]
    if not names or not isinstance(zero, Mapping):
        return config
    # By name alone: what the config asks for and the model lacks is no error to DeepSpeed's users.
    return {**raw, "zero_optimization": {**zero, "leaf_module": {"names": names}}}
