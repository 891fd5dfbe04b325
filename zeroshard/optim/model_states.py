"""Owns the way from a parameter's name to its model states: what this rank holds of them, and the whole. Called by shard.

    states = sharded.states
    states.get("head.weight")                  the whole fp32 value, on every rank
    states.get("head.weight", "exp_avg")       the whole of a state of the optimizer
    states.set("head.weight", "exp_avg", x)    gives every rank its part
    states.local("head.weight", "gradients")   the ranges that this rank holds

States are called "parameters" (the master weights), "gradients" (the mean over ranks, between the last backward and `zero_grad`),
and as the optimizer calls its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.bucket import Shard
from zeroshard.core.collectives import Collectives
from zeroshard.core.unit import NamedParameter, Unit
from zeroshard.errors import UsageError
from zeroshard.optim.sharded_optimizer import ShardedOptimizer, ShardView

PARAMETERS, GRADIENTS = "parameters", "gradients"


@dataclass(frozen=True)
class Range:
    """A contiguous part of one flattened parameter: `tensor` [numel] is live memory, `start` counts elements."""

    start: int
    tensor: Tensor


@dataclass(frozen=True)
class Held:
    """A contiguous part of one flattened parameter that this rank keeps at rest. `owner` is the rank whose shard it lies in."""

    named: NamedParameter
    owner: int
    start: int
    value: Tensor
    """Master weights, [numel]; of a parameter that is not trained, the parameter itself."""
    state: Mapping[str, Any]
    """What the optimizer keeps for it. Tensors of its length run along the part."""
    shard: Shard | None = None
    view: ShardView | None = None

    @property
    def numel(self) -> int:
        return self.value.numel()

    def along(self, name: str) -> Tensor | None:
        """The optimizer's state `name` where it has one number an element, flattened."""
        value = self.state.get(name)
        if not isinstance(value, Tensor) or value.ndim == 0 or value.numel() != self.numel or name == "step":
            return None
        return value.view(-1)


class ModelStates:
    """See the module's docstring. Made anew wherever it is asked for: it keeps nothing."""

    def __init__(self, units: Sequence[Unit], optimizer: ShardedOptimizer | None, collectives: Collectives) -> None:
        self._optimizer, self._collectives = optimizer, collectives
        self._unit_of: dict[str, tuple[Unit, int]] = {}
        for unit in units:
            for index, entry in enumerate(unit.named):
                for fqn in entry.fqns:
                    self._unit_of[fqn] = (unit, index)
        self._held: dict[str, list[Held]] = {}
        for held in _holdings(units, optimizer):
            self._held.setdefault(held.named.fqn, []).append(held)

    def held(self) -> Iterator[Held]:
        """Everything that this rank keeps, parameter by parameter."""
        for parts in self._held.values():
            yield from parts

    def names(self, fqn: str) -> list[str]:
        """What `get` knows of a parameter, as far as this rank can tell."""
        unit, _ = self._find(fqn)
        own = [name for held in self._parts(fqn) for name in held.state]
        return [PARAMETERS, *([GRADIENTS] if unit.trainable else []), *dict.fromkeys(own)]

    def optimizer_names(self) -> list[str]:
        """The names of everything that the optimizer keeps, on any rank. Every rank must call it."""
        own = list(dict.fromkeys(name for held in self.held() for name in held.state))
        everyone = self._collectives.exchange_json(own, "the names of the optimizer's states")
        return sorted({name for names in everyone for name in names})

    # ------------------------------------------------------------------ what this rank holds

    def local(self, fqn: str, state: str = PARAMETERS) -> list[Range]:
        """The ranges of a state that this rank holds: live memory, but for gradients in 16 bits, which are copies.

        Runs no collective; for gradients, call it after `clip_grad_norm_` (or a `get` of any gradient) on every rank.
        """
        found = []
        for held in self._parts(fqn):
            tensor = self._part(held, state)
            if tensor is not None:
                found.append(Range(held.start, tensor))
        return found

    def set_local(self, fqn: str, state: str, ranges: Sequence[Range]) -> None:
        """Overwrite ranges that this rank holds. Every rank must call it, with its own."""
        mine = {(held.start, held.numel): held for held in self._parts(fqn)}
        for part in ranges:
            held = mine.get((part.start, part.tensor.numel()))
            if held is None or not self._overwrite(held, state, part.tensor.reshape(-1)):
                raise UsageError(
                    f"rank {self._collectives.rank} holds no range [{part.start}, {part.start + part.tensor.numel()}) of "
                    f"{state} of {fqn}; it holds {[(h.start, h.start + h.numel) for h in mine.values()]}."
                )
        if state == PARAMETERS:
            unit, _ = self._find(fqn)
            unit.take_masters()

    # ------------------------------------------------------------------ the whole

    def get(self, fqn: str, state: str = PARAMETERS) -> Tensor | None:
        """The whole of a state, in the parameter's shape, on every rank; None where there is none. Every rank must call it.

        A state that is no tensor along the parameter (a step count) comes as it is.
        """
        unit, index = self._find(fqn)
        if state == GRADIENTS and not self._has_gradient(unit.named[index].fqn):
            return None
        if unit.named[index].shape.numel() == 0:  # nobody holds a part of it
            return torch.zeros(unit.named[index].shape)
        parts = [(held, self._part(held, state)) for held in self._parts(fqn)]
        told = self._describe(fqn, state, parts)
        if told is None:
            return None
        if "value" in told:
            return (
                torch.tensor(told["value"])
                if told["dtype"] is None
                else torch.tensor(told["value"], dtype=_dtype(told))
            )
        entry = unit.named[index]
        whole = torch.zeros(entry.shape.numel(), dtype=_dtype(told), device=entry.parameter.device)
        for held, tensor in parts:
            if tensor is not None:
                whole[held.start : held.start + held.numel].copy_(tensor)
        for owner, start, stop in unit.owners(index):
            self._collectives.broadcast(whole[start:stop], owner)
        return whole.view(entry.shape)

    def set(self, fqn: str, state: str, value: Tensor) -> None:
        """Give every rank its part of a whole. Every rank must call it, with the same values."""
        unit, index = self._find(fqn)
        shape = unit.named[index].shape
        if value.shape != shape:
            raise UsageError(f"{state} of {fqn} has shape {tuple(shape)}, not {tuple(value.shape)}.")
        flat = value.detach().reshape(-1)
        if state == GRADIENTS and not self._has_gradient(
            unit.named[index].fqn
        ):  # reductions under way must not come after
            raise UsageError(
                f"{fqn} has no gradient to set: set it between the last backward of a step and zero_grad()."
            )
        for held in self._parts(fqn):
            if not self._overwrite(held, state, flat[held.start : held.start + held.numel]):
                raise UsageError(f"{fqn} has no state {state!r} to set; it has {', '.join(self.names(fqn))}.")
        if state == PARAMETERS:
            unit.take_masters()

    def restore(self, fqn: str, values: Mapping[str, Tensor | None]) -> None:
        """Give a parameter wholes of its master weights and of the optimizer's states, if it keeps any. Every rank must call it."""
        value = values[PARAMETERS]
        assert value is not None
        self.set(fqn, PARAMETERS, value)
        on_device = counting_on_device(self._optimizer.inner) if self._optimizer is not None else set()
        for held in self._parts(fqn):
            if held.view is None or self._optimizer is None:
                continue
            target = self._optimizer.state[held.view.value]
            for name, whole in values.items():
                if name == PARAMETERS or whole is None:
                    continue
                if name != "step" and whole.shape == value.shape:
                    part = whole.reshape(-1)[held.start : held.start + held.numel]
                    target[name] = part.reshape(held.view.value.shape).clone()
                else:
                    moves = whole.ndim > 0 or id(held.view.value) in on_device
                    target[name] = whole.to(held.value.device if moves else "cpu", copy=True)

    # ------------------------------------------------------------------ pieces

    def _find(self, fqn: str) -> tuple[Unit, int]:
        if fqn not in self._unit_of:
            raise UsageError(
                f"the model has no parameter {fqn!r}; one that it has is {next(iter(self._unit_of), 'none')}."
            )
        return self._unit_of[fqn]

    def _parts(self, fqn: str) -> list[Held]:
        unit, index = self._find(fqn)
        return self._held.get(unit.named[index].fqn, [])

    def _part(self, held: Held | None, state: str) -> Tensor | None:
        if held is None or state == PARAMETERS:
            return held.value if held is not None else None
        if state == GRADIENTS:
            if self._optimizer is None or held.shard is None or held.view is None:
                return None
            return self._optimizer.mean_gradient(held.shard, held.view)
        return held.along(state)

    def _overwrite(self, held: Held, state: str, value: Tensor) -> bool:
        if state == GRADIENTS and self._optimizer is not None and held.shard is not None and held.view is not None:
            self._optimizer.set_mean_gradient(held.shard, held.view, value)
            return True
        target = self._part(held, state)
        if target is not None:
            target.copy_(value)
        return target is not None

    def _has_gradient(self, fqn: str) -> bool:
        return self._optimizer is not None and self._optimizer.used().get(fqn, False)

    def _describe(self, fqn: str, state: str, parts: Sequence[tuple[Held, Tensor | None]]) -> dict[str, Any] | None:
        """What a rank that holds a part says of the state, for those that hold none."""
        own: dict[str, Any] | None = None
        for held, tensor in parts:
            if tensor is not None:
                own = {"dtype": str(tensor.dtype).removeprefix("torch.")}
            elif state in held.state:
                value = held.state[state]
                is_tensor = isinstance(value, Tensor)
                dtype = str(value.dtype).removeprefix("torch.") if is_tensor else None
                own = {"dtype": dtype, "value": value.tolist() if is_tensor else value}
        told = self._collectives.exchange_json(own, f"the description of {state} of {fqn}")
        return next((one for one in told if one is not None), None)


def counting_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """`id`s of the tensors whose step count torch keeps on their device: those of fused and capturable groups."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {id(value) for group in groups for value in group["params"]}


def _dtype(told: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, told["dtype"])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _holdings(units: Sequence[Unit], optimizer: ShardedOptimizer | None) -> Iterator[Held]:
    if optimizer is not None:
        for shard, views in optimizer.shards():
            for view in views:
                state = optimizer.state.get(view.value, {})
                yield Held(view.named, shard.rank, view.parameter_start, view.value.view(-1), state, shard, view)
    for unit in units:
        for bucket in unit.buckets if not unit.trainable else ():
            for piece, tensor in bucket.own_parameters():
                yield Held(unit.named[piece.index], bucket.rank, piece.parameter_start, tensor, {})
