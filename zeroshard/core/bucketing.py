"""Owns who shares a bucket: finds the units of any model. Called once, by shard.

Units are the children of the outermost `ModuleList`s and `Sequential`s (a transformer's blocks), in models that nobody
prepared; what remains, and parameters that several units share (tied weights), belong to the root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.core.unit import NamedParameter
from zeroshard.errors import UsageError


@dataclass(frozen=True)
class Group:
    """Parameters that become one unit: same module, dtype, device, and trainability."""

    label: str
    module: nn.Module
    named: tuple[NamedParameter, ...]
    trainable: bool
    dtype: torch.dtype


def find_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The (fqn, module) pairs that are unsharded one at a time, without the root, in the order of registration."""
    return list(_units_below("", model))


def _units_below(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        fqn = f"{prefix}.{name}" if prefix else name
        in_container = isinstance(module, nn.ModuleList | nn.Sequential)
        if in_container and _is_callable(child) and any(True for _ in child.parameters()):
            yield fqn, child
        else:
            yield from _units_below(fqn, child)


def _is_callable(module: nn.Module) -> bool:
    """A pure container (ModuleList, ModuleDict, ParameterList) is never called itself, so no hook on it would run."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def group_parameters(model: nn.Module, optimized: set[int]) -> list[Group]:
    """Who shares a flat buffer.

    Args:
        optimized: `id`s of the parameters that the optimizer updates; a trainable parameter outside of it is left as
            plain PyTorch leaves it, with a local gradient that nobody uses.
    """
    units = [("", model), *find_units(model)]
    users: dict[int, list[int]] = defaultdict(list)  # id of a parameter -> units that contain it
    for number, (_, module) in enumerate(units[1:], start=1):
        for parameter in {id(p): p for p in module.parameters()}.values():
            users[id(parameter)].append(number)
    names: dict[int, list[str]] = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(fqn)

    members: dict[tuple[int, torch.dtype, torch.device, bool], list[NamedParameter]] = defaultdict(list)
    for parameter in model.parameters():
        _refuse_unshardable(names[id(parameter)][0], parameter)
        home = users[id(parameter)][0] if len(users[id(parameter)]) == 1 else 0
        trainable = parameter.requires_grad and id(parameter) in optimized
        entry = NamedParameter(tuple(names[id(parameter)]), parameter, parameter.shape)
        members[home, parameter.dtype, parameter.device, trainable].append(entry)

    groups = []
    for (home, dtype, _, trainable), named in sorted(members.items(), key=lambda item: item[0][0]):
        fqn, module = units[home]
        label = (fqn or "the root module") + ("" if trainable else " (frozen)")
        groups.append(Group(label, module, tuple(named), trainable, dtype))
    return groups


def _refuse_unshardable(fqn: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise UsageError(f"parameter {fqn} is on the meta device and has no values: materialise the model first.")
    if parameter.layout is not torch.strided or isinstance(parameter, nn.parameter.UninitializedParameter):
        raise UsageError(f"parameter {fqn} is not an initialised dense tensor ({type(parameter).__name__}, "
                         f"{parameter.layout}); zeroshard cuts dense tensors only.")  # fmt: skip
    if parameter.is_complex():
        raise UsageError(f"parameter {fqn} is complex ({parameter.dtype}); store it as real with torch.view_as_real.")
    if parameter.grad is not None:
        raise UsageError(f"parameter {fqn} already has a gradient: call zero_grad() before zeroshard takes the model.")
