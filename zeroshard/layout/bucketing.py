"""Owns who shares a bucket: finds the units of any model. Called once, by shard.

Units are the children of the outermost `ModuleList`s and `Sequential`s (a transformer's blocks), in models that nobody
prepared; what remains, and parameters that several units share (tied weights), belong to the root. `Units` says otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.names import name_of
from zeroshard.policy import Units

MIXTURES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""Mixtures of experts that are leaf modules in any case, as they are to DeepSpeed."""


@dataclass(frozen=True)
class NamedParameter:
    """A user's parameter with its true shape; `fqns` are all names under which the model knows it, first name first."""

    fqns: tuple[str, ...]
    parameter: nn.Parameter
    shape: torch.Size

    @property
    def fqn(self) -> str:
        return self.fqns[0]


@dataclass(frozen=True)
class Group:
    """Parameters that become one unit: same module, dtype, device, and trainability."""

    label: str
    module: nn.Module
    named: tuple[NamedParameter, ...]
    trainable: bool
    dtype: torch.dtype
    persistent: bool
    """Small enough not to be sharded at rest."""


def find_units(model: nn.Module, rule: Units | None = None) -> list[tuple[str, nn.Module]]:
    """The (fqn, module) pairs that are unsharded one at a time, without the root, in the order of registration."""
    rule = rule or Units()
    return list(_units_below("", model, _leaves(model, rule), max(rule.min_numel, 1)))


def _units_below(
    prefix: str, module: nn.Module, leaves: set[nn.Module], min_numel: int
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        fqn = name_of(f"{prefix}.{name}" if prefix else name)
        is_block = isinstance(module, nn.ModuleList | nn.Sequential) and _is_callable(child)
        if child in leaves or (is_block and sum(p.numel() for p in child.parameters()) >= min_numel):
            yield fqn, child
        else:
            yield from _units_below(fqn, child, leaves, min_numel)


def _leaves(model: nn.Module, rule: Units) -> set[nn.Module]:
    """The modules that were declared to be one unit each."""
    declared = [
        *[(f"class {name}", _is_of_class, name) for name in rule.leaf_classes],
        *[(f"name {name}", _is_named, name) for name in rule.leaf_names],
        *[(f"suffix {name}", _ends_in, name) for name in rule.leaf_suffixes],
    ]
    found: set[nn.Module] = set()
    for what, test, name in declared:
        matching = [(fqn, module) for fqn, module in model.named_modules() if fqn and test(fqn, module, name)]
        containers = [fqn for fqn, module in matching if not _is_callable(module)]
        if not matching or containers:
            problem = f"{containers[0]} is a container, which is never called itself" if containers else "none is so"
            raise UsageError(f"a leaf module of {what} was declared, and {problem} in this {type(model).__name__}.")
        found |= {module for _, module in matching}
    usual = [
        module for fqn, module in model.named_modules() if fqn and any(_is_of_class(fqn, module, m) for m in MIXTURES)
    ]
    return found.union(usual)


def _is_of_class(_: str, module: nn.Module, name: str) -> bool:
    return any(name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def _is_named(fqn: str, _: nn.Module, pattern: str) -> bool:
    return fnmatchcase(name_of(fqn), pattern)


def _ends_in(fqn: str, _: nn.Module, suffix: str) -> bool:
    return name_of(fqn).endswith(suffix)


def _is_callable(module: nn.Module) -> bool:
    """A pure container (ModuleList, ModuleDict, ParameterList) is never called itself, so no hook on it would run."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def group_parameters(model: nn.Module, optimized: set[int], rule: Units | None = None) -> list[Group]:
    """Who shares a flat buffer.

    Args:
        optimized: `id`s of the parameters that the optimizer updates; a trainable parameter outside of it is left as
            plain PyTorch leaves it, with a local gradient that nobody uses.
        rule: what the user says of units.
    """
    rule = rule or Units()
    units = [("", model), *find_units(model, rule)]
    persistent = _persistent(model, rule)
    users: dict[int, list[int]] = defaultdict(list)  # id of a parameter -> units that contain it
    for number, (_, module) in enumerate(units[1:], start=1):
        for parameter in {id(p): p for p in module.parameters()}.values():
            users[id(parameter)].append(number)
    names: dict[int, list[str]] = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name_of(fqn))

    members: dict[tuple[int, bool, torch.dtype, torch.device, bool], list[NamedParameter]] = defaultdict(list)
    for parameter in model.parameters():
        _refuse_unshardable(names[id(parameter)][0], parameter)
        is_persistent = id(parameter) in persistent
        home = users[id(parameter)][0] if len(users[id(parameter)]) == 1 and not is_persistent else 0
        trainable = parameter.requires_grad and id(parameter) in optimized
        entry = NamedParameter(tuple(names[id(parameter)]), parameter, parameter.shape)
        members[home, is_persistent, parameter.dtype, parameter.device, trainable].append(entry)

    groups = []
    for (home, is_persistent, dtype, _, trainable), named in sorted(members.items(), key=lambda item: item[0][:2]):
        fqn, module = units[home]
        label = "small parameters" if is_persistent else fqn or "the root module"
        label += "" if trainable else " (frozen)"
        groups.append(Group(label, module, tuple(named), trainable, dtype, is_persistent))
    return groups


def _persistent(model: nn.Module, rule: Units) -> set[int]:
    """`id`s of the parameters that are too small to be sharded: the smallest first, as many as the total allows."""
    small = sorted((p for p in model.parameters() if p.numel() < rule.persistent_numel), key=Tensor.numel)
    found, total = set(), 0
    for parameter in small:
        total += parameter.numel()
        if rule.max_persistent_numel is None or total <= rule.max_persistent_numel:
            found.add(id(parameter))
    return found


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
