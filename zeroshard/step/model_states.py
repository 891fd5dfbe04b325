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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.layout.bucketing import NamedParameter
from zeroshard.layout.names import name_of
from zeroshard.schedule.unit import Unit
from zeroshard.step.resident import Resident
from zeroshard.step.shard_view import ShardView, runs_along
from zeroshard.step.sharded_optimizer import ShardedOptimizer
from zeroshard.storage.base import Slot
from zeroshard.storage.storages import Storages

PARAMETERS, GRADIENTS = "parameters", "gradients"


@dataclass(frozen=True)
class Range:
    """A contiguous part of one flattened parameter: `tensor` [numel] is live memory, `start` counts elements."""

    start: int
    tensor: Tensor


class Trained:
    """A shard that this rank updates. Its values are memory while it is opened, and, where it `is_here`, always."""

    def __init__(self, optimizer: ShardedOptimizer, resident: Resident) -> None:
        self._optimizer, self.resident = optimizer, resident
        self.is_here = resident.is_in_place

    def opened(self, *, write: bool = False, read: bool = True) -> AbstractContextManager[None]:
        """Bring it to memory; with `write`, what is changed inside comes to rest. Without `read`, all of it must be."""
        return self._optimizer.opened(self.resident, write=write, read=read)

    def is_all_of(self, parts: Sequence[Held]) -> bool:
        """Whether nothing of the shard is in none of the parts."""
        return len(parts) == len(self.resident.views)

    def value(self, held: Held) -> Tensor:
        """Master weights."""
        assert held.view is not None
        return held.view.value.view(-1)


class Frozen:
    """A shard of parameters that are not trained."""

    _last: list[Frozen]
    """At most one of a model's is in memory."""

    def __init__(self, slot: Slot, storages: Storages, last: list[Frozen]) -> None:
        self._slot, self._last, self._version = slot, last, 0
        places = (storages.accelerator, storages.host)
        self._memory = next((m for m in (slot.memory_in(place) for place in places) if m is not None), None)
        self.is_here = self._memory is not None

    def is_all_of(self, parts: Sequence[Held]) -> bool:
        """As that of `Trained`."""
        return False

    @contextmanager
    def opened(self, *, write: bool = False, read: bool = True) -> Iterator[None]:
        """As that of `Trained`."""
        self._slot.wait()
        if not self.is_here and (self._memory is None or self._version != self._slot.version):
            while self._last:
                self._last.pop()._memory = None
            self._version = self._slot.version
            self._memory = torch.empty(self._slot.numel, dtype=self._slot.dtype)
            self._slot.read(self._memory).wait(self._memory.device)
            self._last.append(self)
        yield
        if write and not self.is_here:
            assert self._memory is not None
            self._slot.write(self._memory)
            self._slot.wait()
            self._version = self._slot.version

    def value(self, held: Held) -> Tensor:
        """The parameters at rest."""
        assert self._memory is not None
        return self._memory[held.shard_start : held.shard_start + held.numel]


@dataclass(frozen=True)
class Held:
    """A contiguous part of one flattened parameter that this rank keeps at rest.

    Attributes:
        owner: the rank whose shard it lies in.
        shard: to be opened before `value` and `along` are looked at, unless it `is_here`.
        start, shard_start: where it begins, in the parameter and in the shard.
        dtype: of `value`.
        state: what the optimizer keeps for it. Tensors of its length run along the part.
    """

    named: NamedParameter
    owner: int
    shard: Trained | Frozen
    start: int
    shard_start: int
    numel: int
    dtype: torch.dtype
    state: Mapping[str, Any]
    view: ShardView | None = None

    @property
    def value(self) -> Tensor:
        """Master weights, [numel]; of a parameter that is not trained, the parameter itself."""
        return self.shard.value(self)

    def along(self, name: str) -> Tensor | None:
        """The optimizer's state `name` where it has one number an element, flattened."""
        value = self.state.get(name)
        if self.view is None or not runs_along(value, name, self.view.value):
            return None
        return value.reshape(-1)


class ModelStates:
    """See the module's docstring. Made anew wherever it is asked for: of values that rest elsewhere it keeps one shard at most."""

    def __init__(self, units: Sequence[Unit], optimizer: ShardedOptimizer | None, collectives: Collectives) -> None:
        self._optimizer, self._collectives = optimizer, collectives
        if optimizer is not None:
            optimizer.refuse_parked("a look at model states")
        self._unit_of: dict[str, tuple[Unit, int]] = {}
        for unit in units:
            unit.write_back()
            for index, entry in enumerate(unit.named):
                for fqn in entry.fqns:
                    self._unit_of[fqn] = (unit, index)
        self._held: dict[str, list[Held]] = {}
        for held in _holdings(units, optimizer, collectives):
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
        """The ranges of a state that this rank holds: live memory. Gradients in 16 bits, and what rests on disk, are copies.

        Runs no collective; for gradients, call it after `clip_grad_norm_` (or a `get` of any gradient) on every rank.
        """
        found = []
        for held in self._parts(fqn):
            with held.shard.opened():
                tensor = self._part(held, state)
                if tensor is not None:
                    found.append(Range(held.start, tensor if held.shard.is_here else tensor.clone()))
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
            unit, index = self._find(fqn)
            unit.take_masters([index])

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
        told = self._describe(fqn, state)
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
        for held in self._parts(fqn):
            with held.shard.opened():
                tensor = self._part(held, state)
                if tensor is not None:
                    whole[held.start : held.start + held.numel].copy_(tensor)
        for shard, start, stop in unit.layout.owners(index):
            self._collectives.broadcast(whole[start:stop], self._collectives.owner(shard))
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
            unit.take_masters([index])

    def restore(self, fqn: str, values: Mapping[str, Tensor | None]) -> None:
        """Give a parameter wholes of its master weights and of the optimizer's states, if it keeps any. Every rank must call it."""
        value = values[PARAMETERS]
        assert value is not None
        for held in self._parts(fqn):
            self._overwrite(held, PARAMETERS, value.detach().reshape(-1)[held.start : held.start + held.numel])
        self._find(fqn)[0].take_masters(())  # to the user the values are what they were
        on_device = counting_on_device(self._optimizer.inner) if self._optimizer is not None else set()
        for held in self._parts(fqn):
            if held.view is None or self._optimizer is None:
                continue
            target, device = self._optimizer.state[held.view.value], held.view.value.device
            with held.shard.opened(write=True):
                for name, whole in values.items():
                    if name == PARAMETERS or whole is None:
                        continue
                    if name != "step" and whole.shape == value.shape:
                        part = whole.reshape(-1)[held.start : held.start + held.numel]
                        target[name] = part.reshape(held.view.value.shape).to(device, copy=True)
                    else:
                        moves = whole.ndim > 0 or id(held.view.value) in on_device
                        target[name] = whole.to(device if moves else "cpu", copy=True)

    # ------------------------------------------------------------------ pieces

    def _find(self, fqn: str) -> tuple[Unit, int]:
        fqn = name_of(fqn)
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
            if self._optimizer is None or held.view is None or not isinstance(held.shard, Trained):
                return None
            return self._optimizer.gradients.get(held.shard.resident.shard, held.view)
        return held.along(state)

    def _overwrite(self, held: Held, state: str, value: Tensor) -> bool:
        if state == GRADIENTS:
            if self._optimizer is None or held.view is None or not isinstance(held.shard, Trained):
                return False
            self._optimizer.gradients.set(held.shard.resident.shard, held.view, value)
            return True
        with held.shard.opened(write=True):
            target = self._part(held, state)
            if target is not None:
                target.copy_(value)
            return target is not None

    def _has_gradient(self, fqn: str) -> bool:
        return self._optimizer is not None and self._optimizer.used().get(fqn, False)

    def _describe(self, fqn: str, state: str) -> dict[str, Any] | None:
        """What a rank that holds a part says of the state, for those that hold none."""
        own: dict[str, Any] | None = None
        for held in self._parts(fqn):
            along = held.along(state)
            if state in (PARAMETERS, GRADIENTS) and (state == PARAMETERS or held.view is not None):
                own = {"dtype": str(held.dtype).removeprefix("torch.")}
            elif along is not None:
                own = {"dtype": str(along.dtype).removeprefix("torch.")}
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


def _holdings(units: Sequence[Unit], optimizer: ShardedOptimizer | None, collectives: Collectives) -> Iterator[Held]:
    if optimizer is not None:
        for resident in optimizer.residents():
            shard, owner = Trained(optimizer, resident), collectives.owner(resident.shard.number)
            for view in resident.views:
                state = optimizer.state.get(view.value, {})
                yield Held(
                    view.named, owner, shard, view.parameter_start, view.start, view.numel, view.value.dtype,
                    state, view,
                )  # fmt: skip
    last: list[Frozen] = []
    for unit in units:
        for bucket in unit.buckets if not unit.trainable else ():
            slot = bucket.own_rest
            frozen = Frozen(slot, bucket.storages, last)
            for piece in bucket.layout.shard_pieces(bucket.own_shard):
                yield Held(
                    unit.named[piece.index],
                    collectives.rank,
                    frozen,
                    piece.parameter_start,
                    piece.start,
                    piece.numel,
                    slot.dtype,
                    {},
                )
