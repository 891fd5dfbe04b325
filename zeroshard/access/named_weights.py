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

from zeroshard.access.unsharded import unsharded
from zeroshard.checkpoint.live_model import Description, LiveModel, describe, persistent_buffers
from zeroshard.collectives.members import refuse_no_rank
from zeroshard.errors import CollectiveError, UsageError
from zeroshard.layout.named_parameter import name_of, refuse_distributed
from zeroshard.schedule.unit import Unit
from zeroshard.torch_private import own_parameters

_GOES_ON, _LEFT = b"\0", b"\1"
_BASE = "base_layer"
"""PEFT's name for the module that an adapter wraps, and whose weights a merge changes."""


@dataclass(frozen=True)
class _Part:
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


def named_weights(live: LiveModel, to: int | None, *, merge_adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the weights of a model; see `Sharded.named_weights`. Raise for wrong arguments at once."""
    refuse_distributed(live.model.named_parameters(), "named_weights()")
    if to is not None:
        refuse_no_rank(f"named_weights(to={to})", to, live.collectives.world_size)
    return _hand_over(live, to, merge_adapters=merge_adapters)


def _hand_over(live: LiveModel, to: int | None, *, merge_adapters: bool) -> Iterator[tuple[str, Tensor]]:
    live.schedule.refuse_unseen_changes()
    live.schedule.refuse_aborted_step()
    steps = live.schedule.steps_ended
    is_together = any(unit.sharded_at_rest and not unit.is_pinned for unit in live.units)
    with live.collectives.operation("named_weights()"):  # PEFT may read parameters to name them
        parts = _merged_parts(live) if merge_adapters else _parts(live)
    unit_of = _units_by_parameter(live)
    for part in parts:
        try:
            with ExitStack() as stack:
                with live.collectives.operation("named_weights()"):
                    _make_whole(part, unit_of, stack)
                weights: Iterable[tuple[str, Tensor]] = ()
                if to in (None, live.rank):
                    weights = part.weights()
                for weight in weights:
                    yield weight
                    del weight
                    if live.schedule.steps_ended != steps:
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


def _make_whole(part: _Part, unit_of: Mapping[int, Unit], stack: ExitStack) -> None:
    """Unshard a part's units until the stack ends."""
    tensors = [tensor for _, tensor in part.plain]
    for _, module in part.adapted:
        tensors += module.parameters()
    # An outer `unsharded` already holds the pinned units and checks for writes when it ends.
    wanted = [tensor for tensor in tensors if id(tensor) in unit_of and not unit_of[id(tensor)].is_pinned]
    stack.enter_context(unsharded(wanted))


def _exchange(live: LiveModel, part: _Part, status: bytes) -> list[int]:
    """Exchange one byte with the other ranks and return the ranks that left their loops."""
    with live.collectives.operation("named_weights()"):
        everyone = live.collectives.exchange(status, f"the end of {part.label}")
    return [rank for rank, other in enumerate(everyone) if other == _LEFT]


def _goes_on(live: LiveModel, part: _Part, to: int | None, *, is_last: bool) -> bool:
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


def _units_by_parameter(live: LiveModel) -> dict[int, Unit]:
    return {id(entry.parameter): unit for unit in live.units for entry in unit.named}


def _parts(live: LiveModel) -> list[_Part]:
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
    parts = [_Part("the buffers", [(name, one) for fqn, one in live.buffers.items() for name in names.get(fqn, [])])]
    for unit in reversed(live.units):
        parts.append(_Part(unit.label, [(name, e.parameter) for e in unit.named for name in names.get(e.fqn, [])]))
    return [part for part in reversed(parts) if part.plain]


# ---------------------------------------------------------------------- adapters


def _merged_parts(live: LiveModel) -> list[_Part]:
    """List the tensors that the model has after PEFT's `merge_and_unload`.

    Raises:
        UsageError: some parameters are not in that model, or two layers with adapters share a weight.
    """
    model: Any = live.model
    root: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    unit_of = _units_by_parameter(live)
    parts = {unit: _Part(unit.label) for unit in live.units}
    buffers = _Part("the buffers")
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
