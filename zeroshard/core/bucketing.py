"""Owns the grouping of a model's parameters into units and refuses parameters that no flat buffer can hold.

Units are the children of the outermost `ModuleList`s and `Sequential`s (a transformer's blocks). The model does not
need preparation. All other parameters, and those that several units share (tied weights), belong to the root unit. A
`Units` rule changes this.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.core.named_parameter import (
    NamedParameter,
    name_of,
    named_buffers,
    named_modules,
    named_parameters,
    placement_of,
)
from zeroshard.core.quantised import EIGHT_BIT, FOUR_BIT, quantised_kind, refuse_unquantised
from zeroshard.errors import UsageError
from zeroshard.policy import Precision, Units
from zeroshard.torch_private import is_distributed, local_of, past_torch_function, storage_id

MIXTURES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
"""Mixtures of experts that are always leaf modules, as in DeepSpeed."""

MANY_UNITS = 128
TINY_NUMEL = 10_000
"""With more than `MANY_UNITS` units, a block with fewer than `TINY_NUMEL` elements belongs to the unit around it, unless the rule
sets `min_numel`. The messages of a separate unit would take longer than the block's computation."""

OWN_CLASSES = " (own classes)"
"""The `kind` of a group of parameters whose classes are the user's own."""
_QUANTISED = (f" ({FOUR_BIT})", f" ({EIGHT_BIT})")


@dataclass(frozen=True)
class Group:
    """A group of parameters that become one unit, with the same module, dtype, device, and trainability."""

    name: str
    module: nn.Module
    named: tuple[NamedParameter, ...]
    trainable: bool
    dtype: torch.dtype
    persistent: bool
    """Whether the parameters are small enough not to be sharded at rest."""
    kind: str = ""
    """The suffix of the unit's label: " (tensor-parallel)" or " (experts)" for divided DTensors, " (whole DTensors)" for DTensors
    that are whole on each rank, `OWN_CLASSES`, " (Params4bit)" and " (Int8Params)" for frozen parameters of bitsandbytes, and
    "" for others.
    """
    in_fp32: bool = False
    """Whether the parameters stay in fp32 in 16-bit training."""

    @property
    def is_of_own_class(self) -> bool:
        """Whether the parameters are of classes of the user's own: nothing tells of reads of them, so they keep class and place."""
        return self.kind == OWN_CLASSES

    @property
    def is_cut(self) -> bool:
        """Whether the parameters are DTensors that are divided over ranks."""
        return not self.named[0].placement.is_whole

    @property
    def is_quantised(self) -> bool:
        """Whether the parameters are bytes of bitsandbytes, which no dtype of the run converts."""
        return self.kind in _QUANTISED

    @property
    def stays(self) -> bool:
        """Whether the parameters stay whole on the accelerator, under every policy."""
        return self.persistent or self.is_of_own_class or self.kind == _QUANTISED[1]

    @property
    def label(self) -> str:
        """The label of the group's unit, without `kind`."""
        return self.name if self.trainable else f"{self.name} (frozen)"


def find_units(model: nn.Module, rule: Units | None = None) -> list[tuple[str, nn.Module]]:
    """Return (fqn, module) of each unit except the root unit, in the order of registration."""
    rule = rule or Units()
    leaves = _leaves(model, rule)
    if model in leaves:
        return []
    units = list(_units_below("", model, leaves, max(rule.min_numel or 0, 1)))
    if rule.min_numel is None and len(units) > MANY_UNITS:
        units = list(_units_below("", model, leaves, TINY_NUMEL))
    return units


def _units_below(
    prefix: str, module: nn.Module, leaves: set[nn.Module], min_numel: int
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        fqn = name_of(f"{prefix}.{name}".lstrip("."))
        is_block = isinstance(module, nn.ModuleList | nn.Sequential) and _is_callable(child)
        if child in leaves or (is_block and sum(p.numel() for p in child.parameters()) >= min_numel):
            yield fqn, child
        else:
            yield from _units_below(fqn, child, leaves, min_numel)


def _leaves(model: nn.Module, rule: Units) -> set[nn.Module]:
    """Return the modules that `rule` or `MIXTURES` declares as units. A class selects the model only if no module inside has it."""
    modules = [(fqn, module) for fqn, module in named_modules(model) if module is not model]
    declared: list[tuple[str, set[nn.Module]]] = []
    for kind in rule.leaf_classes:
        inside = {module for _, module in modules if _is_of_class(module, kind)}
        itself = {module for module in [model] if _is_of_class(module, kind)}
        declared.append((f"class {kind.__name__ if isinstance(kind, type) else kind}", inside or itself))
    for name in rule.leaf_names:
        declared.append((f"name {name}", {module for fqn, module in modules if fnmatchcase(fqn, name_of(name))}))
    for name in rule.leaf_suffixes:
        declared.append((f"suffix {name}", {module for fqn, module in modules if fqn.endswith(name)}))
    found: set[nn.Module] = set()
    for what, matching in declared:
        containers = [fqn for fqn, module in modules if module in matching and not _is_callable(module)]
        if containers:
            raise UsageError(
                f"a leaf module of {what} was declared, and {containers[0]} is a container, which is never called: declare the "
                f'module that runs its modules or, if each of these chooses what it runs, them (leaf_names=("{containers[0]}.*",)).'
            )
        if not matching:
            raise UsageError(
                f"a leaf module of {what} was declared, but there is none in {type(model).__name__}: name them, or their "
                "classes, as model.named_modules() lists them."
            )
        found |= matching
    return found.union(module for _, module in modules if any(_is_of_class(module, name) for name in MIXTURES))


def _is_of_class(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return any(wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}") for kind in type(module).__mro__)


def _is_callable(module: nn.Module) -> bool:
    """Return whether hooks on a module run: a pure container (ModuleList, ModuleDict, ParameterList) is never called."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def group_parameters(
    model: nn.Module, optimized: set[int], rule: Units | None = None, of_own_class: Collection[int] = (),
    in_fp32: Collection[int] = (),
) -> list[Group]:  # fmt: skip
    """Return the groups of parameters, one for each flat buffer. DTensors are in separate groups.

    Args:
        optimized: the `id`s of the parameters that the optimizer updates. Others count as frozen. If they require a gradient,
            autograd computes one from this rank's batches only, and no step uses it.
        of_own_class: the `id`s of parameters whose classes are the user's own.
        in_fp32: the `id`s of parameters that stay in fp32 in 16-bit training.
    """
    rule = rule or Units()
    units = [("", model), *find_units(model, rule)]
    persistent = _persistent(model, rule)
    users: dict[int, list[int]] = defaultdict(list)  # id of a parameter -> units that contain it
    for number, (_, module) in enumerate(units[1:], start=1):
        for parameter in {id(p): p for p in module.parameters()}.values():
            users[id(parameter)].append(number)
    names: dict[int, list[str]] = defaultdict(list)
    for fqn, parameter in named_parameters(model, all_names=True):
        names[id(parameter)].append(fqn)

    members: dict[tuple[int, bool, torch.dtype, torch.device, bool, str, bool], list[NamedParameter]] = defaultdict(
        list
    )
    for parameter in model.parameters():
        _refuse_unshardable(names[id(parameter)][0], parameter)
        is_persistent = id(parameter) in persistent
        home = 0  # the root
        if len(users[id(parameter)]) == 1 and not is_persistent:
            (home,) = users[id(parameter)]
        trainable = parameter.requires_grad and id(parameter) in optimized
        fqns = tuple(names[id(parameter)])
        placement = placement_of(fqns[0], parameter)
        entry = NamedParameter(fqns, parameter, torch.Size(placement.local_shape), placement)
        # A norm counts divided DTensors on each rank of a mesh, and whole ones once.
        kind = OWN_CLASSES if id(parameter) in of_own_class else entry.kind
        if kind == OWN_CLASSES and quantised_kind(parameter) and not trainable:
            refuse_unquantised(fqns[0], parameter)
            kind = f" ({quantised_kind(parameter)})"
        key = (home, is_persistent, parameter.dtype, parameter.device, trainable, kind, id(parameter) in in_fp32)
        members[key].append(entry)

    groups = []
    for (home, is_persistent, dtype, _, trainable, kind, stays_wide), named in sorted(
        members.items(), key=lambda item: item[0][:2]
    ):
        fqn, module = units[home]
        name = "small parameters" if is_persistent else fqn or "the root module"
        groups.append(Group(name, module, tuple(named), trainable, dtype, is_persistent, kind, stays_wide))
    return groups


def kept_in_fp32(model: nn.Module, precision: Precision) -> set[int]:
    """Return the `id`s of the parameters that stay in fp32 in 16-bit training.

    They are those that a transformers model declares, as `from_pretrained` selects them, and those that the user names.

    Raises:
        UsageError: the user names what no parameter's name contains.
    """
    if precision.param_dtype is None or precision.param_dtype.itemsize != 2:
        return set()
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    # transformers' patterns are regular expressions in which * stands for any text. The user's are text.
    patterns = {one: re.compile(one.replace("*", ".*")) for one in sorted(declared)}
    patterns |= {one: re.compile(re.escape(one).replace(r"\*", ".*")) for one in precision.keep_in_fp32}
    found: dict[str, set[int]] = {one: set() for one in patterns}
    for name, parameter in named_parameters(model, all_names=True):
        plain = name.replace(".base_layer", "")  # PEFT's name for the module inside an adapter
        for one, pattern in patterns.items():
            if pattern.search(plain):
                found[one].add(id(parameter))
    strangers = [one for one in precision.keep_in_fp32 if not found[one]]
    if strangers:
        raise UsageError(
            f"{strangers[0]!r} is to stay in fp32, and no parameter of {type(model).__name__} has such a name. Pass a part "
            "of a name, as model.named_parameters() lists them, with * for any text."
        )
    return set().union(*found.values())


def _persistent(model: nn.Module, rule: Units) -> set[int]:
    """Return the `id`s of the parameters too small to be sharded: the smallest, up to `max_persistent_numel` elements in all."""
    small = sorted((p for p in model.parameters() if p.numel() < rule.persistent_numel), key=Tensor.numel)
    found = set()
    total = 0
    for parameter in small:
        total += parameter.numel()
        if rule.max_persistent_numel is None or total <= rule.max_persistent_numel:
            found.add(id(parameter))
    return found


def _refuse_unshardable(fqn: str, parameter: nn.Parameter) -> None:
    if parameter.is_meta:
        raise UsageError(f"parameter {fqn} is on the meta device and has no values: materialise the model first.")
    if parameter.layout is not torch.strided:
        raise UsageError(f"parameter {fqn} is not an initialised dense tensor ({type(parameter).__name__}, "
                         f"{parameter.layout}); zeroshard shards dense tensors only. Initialise it, or make it "
                         "dense.")  # fmt: skip
    if parameter.is_complex():
        raise UsageError(f"parameter {fqn} is complex ({parameter.dtype}); store it as real with torch.view_as_real.")
    if parameter.requires_grad and parameter.dtype.itemsize == 1:
        raise UsageError(f"parameter {fqn} of {parameter.dtype} cannot be trained: freeze it (requires_grad_(False)), or train it "
                         "in 16 or 32 bits.")  # fmt: skip
    if parameter.grad is not None:
        raise UsageError(f"parameter {fqn} already has a gradient: call zero_grad() before zeroshard takes the model.")


# ---------------------------------------------------------------------- memory that several parameters share


class _Extent(NamedTuple):
    """A tensor, and the bytes `start` to `stop` of its storage that its elements span."""

    start: int
    stop: int
    name: str
    tensor: Tensor
    is_parameter: bool


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise `UsageError` if a parameter shares elements in memory with another parameter or with a buffer.

    In plain PyTorch, a write to one of the two shows in the other. With parameters in flat buffers, it would not.
    """
    by_storage: dict[int, list[_Extent]] = defaultdict(list)
    with past_torch_function():  # for a parameter that was born sharded, look at its placeholder
        for name, tensor in [*named_parameters(model), *named_buffers(model)]:
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
                here = local_of(tensor) if is_distributed(tensor) else tensor
                start = int(here.storage_offset()) * here.itemsize
                last = sum((size - 1) * stride for size, stride in zip(here.shape, here.stride(), strict=True))
                stop = start + (last + 1) * here.itemsize
                extent = _Extent(start, stop, name, here, isinstance(tensor, nn.Parameter))
                by_storage[storage_id(here)].append(extent)
        for extents in by_storage.values():
            extents.sort(key=lambda extent: extent.start)
            for number, one in enumerate(extents):
                for other in extents[number + 1 :]:
                    if other.start >= one.stop:
                        break
                    if (one.is_parameter or other.is_parameter) and _overlap(one, other):
                        _refuse_overlap(one, other)


def _overlap(one: _Extent, other: _Extent) -> bool:
    """Return whether two tensors with overlapping extents share an element. Two columns of one matrix do not."""
    if one.tensor.is_contiguous() and other.tensor.is_contiguous():
        return True
    if one.tensor.itemsize != other.tensor.itemsize:
        return True  # not compared element by element: refused, to be safe
    taken = torch.zeros((max(one.stop, other.stop) - one.start) // one.tensor.itemsize, dtype=torch.bool, device="cpu")
    offset = (other.start - one.start) // one.tensor.itemsize
    taken.as_strided(one.tensor.shape, one.tensor.stride()).fill_(True)
    return bool(taken.as_strided(other.tensor.shape, other.tensor.stride(), offset).any())


def _refuse_overlap(one: _Extent, other: _Extent) -> None:
    buffers = [extent.name for extent in (one, other) if not extent.is_parameter]
    if not buffers:
        raise UsageError(
            f"parameters {one.name} and {other.name} share memory but are two Parameters (tied through `.data`?): they "
            "would diverge. Assign one Parameter to both modules (`b.weight = a.weight`), or give one a copy: `.data.clone()`."
        )
    names = [one.name, other.name]
    names.remove(buffers[0])
    raise UsageError(
        f"buffer {buffers[0]} shares memory with parameter {names[0]}: they would diverge. Read the parameter "
        "instead, or give the buffer a copy: `.clone()`."
    )
