"""Owns `named_weights`, which yields the weights that an export would write, one unit at a time, without writing files.

If parameters are sharded at rest, all ranks loop over the units together. After each unit they exchange one byte, so
that a rank that left its loop early is found before the next all-gather. If parameters are unsharded at rest, no rank
waits for another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.conversions import NotOnlyMoved, targets_in_files
from zeroshard.checkpoint.live_model import Description, LiveModel, describe, persistent_buffers
from zeroshard.core.blocks import Target, TensorBlock
from zeroshard.core.named_parameter import name_of, refuse_distributed
from zeroshard.core.transport.members import refuse_no_rank
from zeroshard.core.unit import Unit
from zeroshard.errors import CollectiveError, UsageError
from zeroshard.model.unsharded import unsharded
from zeroshard.torch_private import own_parameters

_GOES_ON, _LEFT = b"\0", b"\1"
_BASE = "base_layer"
"""PEFT's name for the module that an adapter wraps, and whose weights a merge changes."""
_UNWRAPPED = {_BASE, "original_module", "token_adapter"}
"""PEFT's names for modules inside its layers that a merge takes away from names."""


@dataclass(frozen=True)
class UnitWeights:
    """The weights yielded while one unit is unsharded.

    Attributes:
        label: the unit's name.
        plain: parameters and buffers by name, as they are.
        adapted: PEFT's layers by name, to be merged with their adapters.
    """

    label: str
    plain: list[tuple[str, Tensor]] = field(default_factory=list)
    adapted: list[tuple[str, nn.Module]] = field(default_factory=list)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values. Merged weights and the last value are copies; the others are the model's own memory.

        When the unit is resharded, the caller's loop variable still refers to the last value and would keep its memory
        allocated. So the smallest value comes last, as a copy.
        """
        for name, module in self.adapted:
            yield from _merge(name, module)
        smallest = min(range(len(self.plain)), key=lambda index: self.plain[index][1].numel(), default=-1)
        for index, (name, tensor) in enumerate(self.plain):
            if index != smallest:
                yield name, tensor.detach()
        if self.plain:
            name, tensor = self.plain[smallest]
            yield name, tensor.detach().clone()


def named_weights(
    live: LiveModel, to: int | None, *, merge_adapters: bool, names: str = "checkpoint"
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the weights of a model; see `Sharded.named_weights`. Raise for wrong arguments at once."""
    refuse_divided(live)
    if to is not None:
        refuse_no_rank(f"named_weights(to={to})", to, live.collectives.world_size)
    refuse_other_names(names)
    targets = targets_of(live, merge_adapters=merge_adapters) if names == "checkpoint" else None
    return _hand_over(live, to, merge_adapters=merge_adapters, targets=targets)


def refuse_divided(live: LiveModel) -> None:
    """Raise `UsageError` if the model has DTensors."""
    remedy = "Get whole tensors from sharded.states.get(name) or sharded.consolidated_state_dict(), or write files: sharded.export."
    refuse_distributed(live.model.named_parameters(), "named_weights()", remedy)


def refuse_other_names(names: str) -> None:
    """Raise `UsageError` if `names` is not a value that `named_weights` takes."""
    if names not in ("checkpoint", "model"):
        raise UsageError(f'named_weights(names={names!r}): there are no such names. Pass "checkpoint" or "model".')


def _hand_over(
    live: LiveModel, to: int | None, *, merge_adapters: bool, targets: Sequence[Target] | None
) -> Iterator[tuple[str, Tensor]]:
    live.schedule.refuse_unseen_changes()
    live.schedule.refuse_aborted_step()
    values = live.schedule.values
    is_together = any(unit.sharded_at_rest and not unit.is_pinned for unit in live.units)
    with live.collectives.operation("named_weights()"):  # PEFT may read parameters to name them
        parts = _merged_parts(live) if merge_adapters else parts_of(live)
    unit_of = _units_by_parameter(live)
    is_merged = merge_adapters and bool(getattr(live.model, "peft_config", None))
    converter = _Converter(targets, is_merged=is_merged) if targets is not None else None
    for part in parts:
        try:
            with ExitStack() as stack:
                with live.collectives.operation("named_weights()"):
                    _make_whole(part, unit_of, stack)
                weights: Iterable[tuple[str, Tensor]] = ()
                if to in (None, live.rank):
                    weights = part.weights() if converter is None else converter(part.weights())
                for weight in weights:
                    yield weight
                    del weight
                    if live.schedule.values is not values:
                        raise UsageError(
                            "optimizer.step() was called inside a loop over named_weights(): later weights would be newer "
                            "than earlier ones. Call it after the loop."
                        )
        except CollectiveError:
            raise  # other ranks raise it too or have ended
        except BaseException:  # the consumer's error, or the end of its loop
            if is_together:
                _exchange(live, part, _LEFT)
            raise
        if is_together and not _goes_on(live, part, to, is_last=part is parts[-1]):
            return


def _make_whole(part: UnitWeights, unit_of: Mapping[int, Unit], stack: ExitStack) -> None:
    """Unshard a part's units until the stack ends."""
    tensors = [tensor for _, tensor in part.plain]
    for _, module in part.adapted:
        tensors += module.parameters()
    # An outer `unsharded` already holds the pinned units and checks for writes when it ends.
    wanted = [tensor for tensor in tensors if id(tensor) in unit_of and not unit_of[id(tensor)].is_pinned]
    stack.enter_context(unsharded(wanted))


def _exchange(live: LiveModel, part: UnitWeights, status: bytes) -> list[int]:
    """Exchange one byte with the other ranks and return the ranks that left their loops."""
    with live.collectives.operation("named_weights()"):
        everyone = live.collectives.exchange_if_different(status, f"the end of {part.label}")
    return [rank for rank, other in enumerate(everyone) if other == _LEFT]


def _goes_on(live: LiveModel, part: UnitWeights, to: int | None, *, is_last: bool) -> bool:
    """Return whether to continue with the next part: not if rank `to`, which gets the weights, has left its loop.

    Raises:
        UsageError: a rank other than `to` has left the loop before its last part.
    """
    left = _exchange(live, part, _GOES_ON)
    if not left or is_last:
        return True
    if to in left:
        return False  # the rank that gets the weights has left its loop
    raise UsageError(
        f"ranks {left} of the group left the loop over named_weights() after {part.label}, by a break or an exception, but rank "
        f"{live.rank} continues. Leave it on every rank, or on none. For a loop on one rank, use named_weights(to=rank)."
    )


# ---------------------------------------------------------------------- names


def targets_of(live: LiveModel, *, merge_adapters: bool) -> Sequence[Target] | None:
    """List what transformers' `save_pretrained` would write; None if the names in memory stay, as for PEFT's adapters."""
    model: Any = live.model
    try:
        if not getattr(model, "peft_config", None):
            return live.targets()
        if not merge_adapters:
            return None
        root: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
        shapes = _merged_shapes(root)
        return targets_in_files(root, shapes, list(shapes))
    except NotOnlyMoved as error:
        raise UsageError(
            f'transformers converts this model\'s weights for files, and {error}. Call named_weights(names="model") for '
            "the names and shapes in memory."
        ) from error


class _Converter:
    """The conversion of weights to those of files, one after another. A weight made of several ones waits for the last of them."""

    def __init__(self, targets: Sequence[Target], *, is_merged: bool) -> None:
        self._is_merged = is_merged
        self._of: dict[str, list[Target]] = {}
        for target in targets:
            for source in dict.fromkeys(block.source for block in target.blocks):
                self._of.setdefault(source, []).append(target)
        self._begun: dict[str, tuple[Tensor, set[str]]] = {}  # by name: the values, and the sources that lack

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name not in self._of and self._is_merged:
                raise UsageError(
                    f"{name} has a name that transformers' conversion of this model does not know after a merge. Call "
                    'named_weights(merge_adapters=True, names="model") for the names in memory.'
                )
            flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
            for target in self._of.get(name, ()):
                if target.is_whole:
                    yield target.name, tensor
                elif len(target.blocks) == 1:
                    yield target.name, _view(flat, target.blocks[0]).contiguous()
                else:
                    lacking = {block.source for block in target.blocks}
                    out, lacking = self._begun.setdefault(target.name, (tensor.new_empty(target.shape), lacking))
                    for block in target.blocks:
                        if block.source == name:
                            place = tuple(
                                map(slice, block.starts, map(sum, zip(block.starts, block.shape, strict=True)))
                            )
                            out[place].copy_(_view(flat, block))
                    lacking.discard(name)
                    if not lacking:
                        yield target.name, self._begun.pop(target.name)[0]
                    del out
            del tensor, flat


def _view(flat: Tensor, block: TensorBlock) -> Tensor:
    return flat.as_strided(block.shape, block.strides, flat.storage_offset() + block.offset)


def _units_by_parameter(live: LiveModel) -> dict[int, Unit]:
    return {id(entry.parameter): unit for unit in live.units for entry in unit.named}


def parts_of(live: LiveModel) -> list[UnitWeights]:
    """List the tensors of an export; for a PEFT model, the tensors of its adapters."""
    names: dict[str, list[str]] = {}
    """The names under which each parameter or buffer is yielded, by fqn."""
    adapters = getattr(live.model, "peft_config", None)
    described = describe(live) if adapters else Description()
    if adapters and described.problem is not None:
        raise UsageError(
            f"the adapters cannot be handed over as PEFT would load them: {described.problem} Call "
            "named_weights(merge_adapters=True) for the weights of the whole model."
        )
    if described.adapters is None:
        names = {entry.fqn: [entry.fqn] for unit in live.units for entry in unit.named}
        names |= {name: [name] for name in live.buffers}
    else:
        for folder, adapter in described.adapters.items():
            for name, fqn in adapter.items():
                names.setdefault(fqn, []).append(folder + name)
    parts = [
        UnitWeights("the buffers", [(name, one) for fqn, one in live.buffers.items() for name in names.get(fqn, [])])
    ]
    for unit in reversed(live.units):
        parts.append(
            UnitWeights(unit.label, [(name, e.parameter) for e in unit.named for name in names.get(e.fqn, [])])
        )
    return [part for part in reversed(parts) if part.plain]


# ---------------------------------------------------------------------- adapters


def _merged_parts(live: LiveModel) -> list[UnitWeights]:
    """List the tensors that the model has after PEFT's `merge_and_unload`.

    Raises:
        UsageError: some parameters are not in that model, or two layers with adapters share a weight.
    """
    model: Any = live.model
    root: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    unit_of = _units_by_parameter(live)
    parts = {unit: UnitWeights(unit.label) for unit in live.units}
    buffers = UnitWeights("the buffers")
    adapted = _adapted(root) if getattr(model, "peft_config", None) else {}
    inside = tuple(f"{name}." for name in adapted)
    bases = set[int]()
    for name, module in adapted.items():
        own = {id(parameter): parameter for parameter in _base_parameters(module)}
        if bases & own.keys():
            raise UsageError(
                f"{name} shares its weight with another layer that has an adapter, so there is no single merged weight. "
                "Adapt one of them, or pass merge_adapters=False for the adapters."
            )
        bases |= own.keys()
        largest = max(own.values() or module.parameters(), key=lambda parameter: parameter.shape.numel())
        parts[unit_of[id(largest)]].adapted.append((name_of(name), module))
    plain = set[int]()
    for prefix, module in root.named_modules():
        if f"{prefix}.".startswith(inside):
            continue
        for name, parameter in own_parameters(module).items():
            if parameter is not None and id(parameter) not in plain | bases:
                plain.add(id(parameter))
                parts[unit_of[id(parameter)]].plain.append((name_of(f"{prefix}.{name}".lstrip(".")), parameter))
    buffers.plain.extend(
        (name_of(name), buffer) for name, buffer in persistent_buffers(root) if not name.startswith(inside)
    )
    handed_over = plain.union(id(p) for module in adapted.values() for p in module.parameters())
    entries = chain.from_iterable(unit.named for unit in live.units)
    lost = [entry.fqn for entry in entries if id(entry.parameter) not in handed_over]
    if lost:
        raise UsageError(
            f"{lost[0]} belongs to an adapter that PEFT does not merge into weights ({len(lost)} such parameters). "
            "Pass merge_adapters=False for the adapter itself, or export it."
        )
    return [part for part in [*parts.values(), buffers] if part.plain or part.adapted]


def _merged_shapes(root: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and buffers after a merge, by the names that they have then."""
    inside = tuple(f"{name}." for name in _adapted(root))
    shapes = {}
    seen = set[int]()
    for name, tensor in chain(root.named_parameters(), persistent_buffers(root)):
        parts = name.split(".")
        if name.startswith(inside):
            if not {_BASE, "original_module"} & set(parts):
                continue
            parts = [part for part in parts if part not in _UNWRAPPED]
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shapes[name_of(".".join(parts))] = tuple(tensor.shape)
    return shapes


def _adapted(root: nn.Module) -> dict[str, nn.Module]:
    """Find PEFT's layers that wrap modules of the model, as `merge_and_unload` does, but no layer inside another."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        is_layer = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, _BASE)
        if is_layer and not name.startswith(tuple(f"{outer}." for outer in found)):
            found[name] = module
    return found


def _base_parameters(layer: nn.Module) -> Sequence[nn.Parameter]:
    """List the parameters that a merge changes."""
    return [parameter for name, parameter in layer.named_parameters() if _BASE in name.split(".")]


def _merge(name: str, layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Let PEFT merge a copy of one of its layers and yield the weights. The layer's parameters must be unsharded."""
    bases = {id(parameter) for parameter in _base_parameters(layer)}
    copies: dict[int, Any] = {}
    for parameter in layer.parameters():
        values = parameter.detach()
        copies[id(parameter)] = nn.Parameter(values.clone() if id(parameter) in bases else values, requires_grad=False)
    own = {id(copies[id(parameter)]) for parameter in layer.parameters() if id(parameter) not in bases}
    with torch.no_grad():
        merged: Any = copy.deepcopy(layer, copies)
        if hasattr(merged, "unload_and_optionally_merge_module"):
            merged = merged.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            merged.merge(safe_merge=False, adapter_names=None)
            merged = merged.get_base_layer()
    for inner, tensor in chain(merged.named_parameters(), persistent_buffers(merged)):
        yield f"{name}.{name_of(inner)}", tensor.detach().clone() if id(tensor) in own else tensor.detach()
