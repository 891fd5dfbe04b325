"""Owns the lookup of model states by parameter name: the complete state, or the spans that this rank holds.

    states = sharded.states
    states.get("head.weight")                  the complete master weights, on every rank
    states.get("head.weight", "exp_avg")       a complete optimizer state
    states.set("head.weight", "exp_avg", x)    gives every rank its part
    states.local("head.weight", "gradients")   the ranges that this rank holds

`ModelStates` explains the names.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.layout import Span
from zeroshard.core.named_parameter import NamedParameter, name_of
from zeroshard.core.placement import Placement
from zeroshard.core.resident import Resident, ShardView, runs_along
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.storage.base import Slot
from zeroshard.core.storage.buffers import memory_of
from zeroshard.core.storage.storages import Storages
from zeroshard.core.transport.base import Collectives
from zeroshard.core.travelling import Travelling
from zeroshard.core.unit import Unit, refuse_undecided
from zeroshard.errors import UsageError

PARAMETERS = "parameters"
GRADIENTS = "gradients"
MISSING: Any = object()
"""Stands for a state that a parameter does not have."""


@dataclass(frozen=True)
class Range:
    """A contiguous part of a flattened parameter, or of one of its states: `tensor`, [numel], begins at element `start`."""

    start: int
    tensor: Tensor


class Trained:
    """A shard that this rank updates. Its values are in memory while it is open, or always if it `is_here`."""

    def __init__(self, step: ShardedStep, resident: Resident) -> None:
        self._step = step
        self.resident = resident
        self.is_here = not isinstance(resident, Travelling)

    def opened(self, *, write: bool = False, read: bool = True) -> AbstractContextManager[None]:
        """Bring the shard to memory. With `write`, changes inside are stored. Without `read`, all of it must be overwritten."""
        return self._step.sub_groups.opened(self.resident, write=write, read=read)

    def dtype_at_rest(self, state: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that holds exactly what rests of one of the optimizer's states, whose tensor has `dtype`."""
        return self.resident.dtype_to_save(state, dtype) if isinstance(self.resident, Travelling) else dtype


class Frozen:
    """A shard of parameters that are not trained."""

    def __init__(self, slot: Slot, storages: Storages, last: list[Frozen]) -> None:
        self._slot = slot
        self._last = last  # of the model's shards that rest elsewhere, the one that is in memory
        self._version_here = 0
        self.memory = slot.memory_in(storages.accelerator)
        if self.memory is None:
            self.memory = slot.memory_in(storages.host)
        self.is_here = self.memory is not None

    @contextmanager
    def opened(self, *, write: bool = False, read: bool = True) -> Iterator[None]:
        """Open the memory, as `Trained.opened` does."""
        self._slot.wait()
        if not self.is_here and (self.memory is None or self._version_here != self._slot.version):
            while self._last:
                self._last.pop().memory = None
            self._version_here = self._slot.version
            self.memory = torch.empty(self._slot.numel, dtype=self._slot.dtype)
            self._slot.read(self.memory).wait(self.memory.device)
            self._last.append(self)
        yield
        if write and not self.is_here:
            assert self.memory is not None
            self._slot.write(self.memory)
            self._slot.wait()
            self._version_here = self._slot.version


@dataclass(frozen=True)
class Held:
    """A span of one parameter that this rank keeps at rest.

    Attributes:
        is_own: whether this rank owns its shard.
        shard: its shard, which must be opened before `value` and `tensor` are used, unless it `is_here`.
        offset: its start in the shard.
        dtype: the dtype of `value`.
        state: all values that the optimizer keeps for it, by name.
        view: the tensor that the optimizer updates; None if the parameter is not trained.
    """

    named: NamedParameter
    span: Span
    is_own: bool
    shard: Trained | Frozen
    offset: int
    dtype: torch.dtype
    state: Mapping[str, Any]
    view: ShardView | None = None

    @property
    def value(self) -> Tensor:
        """The master weights, [numel]; for a frozen parameter, the parameter itself."""
        if self.view is not None:
            return self.view.value.view(-1)
        assert isinstance(self.shard, Frozen) and self.shard.memory is not None
        return self.shard.memory[self.offset : self.offset + self.span.numel]

    @property
    def states(self) -> list[str]:
        """The names of states with one number per element: "parameters", and those of the optimizer."""
        return [PARAMETERS, *(name for name in self.state if self._runs_along(name))]

    @property
    def beside(self) -> dict[str, Any]:
        """The other values that the optimizer keeps, such as a step count."""
        return {name: value for name, value in self.state.items() if not self._runs_along(name)}

    def tensor(self, state: str) -> Tensor | None:
        """Return one of `states`, flattened, for these elements; None if there is no such state."""
        if state == PARAMETERS:
            return self.value
        if not self._runs_along(state):
            return None
        flat: Tensor = self.state[state].reshape(-1)
        return flat

    def _runs_along(self, name: str) -> bool:
        return self.view is not None and runs_along(self.state.get(name), name, self.view.value)


class ModelStates:
    """The model states by parameter name.

    A parameter's states are "parameters" (master weights; if it is frozen, its values), "gradients", and the optimizer's own, such
    as "exp_avg". "gradients" is the mean over ranks, between the last backward of a step and `zero_grad`.
    Read `sharded.states` again for each use. While states are parked, reading it raises UsageError. The methods raise UsageError
    for unknown parameters.
    """

    def __init__(self, units: Sequence[Unit], step: ShardedStep, collectives: Collectives) -> None:
        self._step = step
        self._collectives = collectives
        step.schedule.refuse_parked("a look at model states")
        self._unit_of: dict[str, tuple[Unit, int]] = {}
        refuse_undecided(units, "a look at model states")
        for unit in units:
            unit.settle_at_rest()
            if not unit.pins:  # an open read-only block reports writes at its end, and does not store them
                unit.write_back()
            for index, entry in enumerate(unit.named):
                for fqn in entry.fqns:
                    self._unit_of[fqn] = (unit, index)
        self._held: dict[str, list[Held]] = {}
        for held in _holdings(units, step):
            self._held.setdefault(held.named.fqn, []).append(held)

    def held(self) -> Iterator[Held]:
        """Yield all spans that this rank keeps, parameter by parameter."""
        for parts in self._held.values():
            yield from parts

    def names(self, fqn: str) -> list[str]:
        """Return "parameters", "gradients" if the parameter is trained, and the names of the optimizer's states on this rank."""
        unit, _ = self._find(fqn)
        names = [PARAMETERS]
        if unit.trainable:
            names.append(GRADIENTS)
        for held in self._parts(fqn):
            names += held.state
        return list(dict.fromkeys(names))

    def optimizer_names(self) -> list[str]:
        """Return the names of all optimizer states on any rank. Every rank must call it."""
        own = list(dict.fromkeys(name for held in self.held() for name in held.state))
        everyone = self._collectives.exchange_json(own, "the names of the optimizer's states")
        return sorted({name for names in everyone for name in names})

    def local(self, fqn: str, state: str = PARAMETERS) -> list[Range]:
        """Return this rank's ranges of a state; an empty list if it has no part of the state. It does not run a collective.

        The ranges are live memory, except for 16-bit gradients and for states that are not stored where the optimizer steps,
        such as states on disk: these are copies. Ranges count the elements of the flattened parameter; for a DTensor, those of
        its flattened local tensor. For gradients, first call `clip_grad_norm_`, or `get` of any gradient, on every rank.

        Raises:
            UsageError: `state` is "gradients", there are none, and the memory for them is freed.
        """
        found = []
        for held in self._parts(fqn):
            with held.shard.opened():
                tensor = self._tensor(held, state)
                if tensor is not None and not held.shard.is_here:
                    tensor = tensor.clone()
            if tensor is not None:
                found.append(Range(held.span.start, tensor))
        return found

    def set_local(self, fqn: str, state: str, ranges: Sequence[Range]) -> None:
        """Overwrite ranges that this rank holds. Every rank must call it, with its own ranges.

        Raises:
            UsageError: this rank does not hold one of the ranges, the parameter does not have this state, or there is no
                gradient yet.
        """
        unit, index = self._find(fqn)
        mine = {(held.span.start, held.span.stop): held for held in self._parts(fqn)}
        if state == GRADIENTS:
            # A reduction in flight must not overwrite the new values: `used` waits for it.
            if not self._step.used().get(unit.named[index].fqn, False):
                raise UsageError(
                    f"{fqn} has no gradient to set: set it between the last backward of a step and zero_grad()."
                )
            self._step.forget_norms()  # also on ranks without a part of it, so that all compute the norm again
        for part in ranges:
            stop = part.start + part.tensor.numel()
            held = mine.get((part.start, stop))
            if held is None or not self._overwrite(held, state, part.tensor.reshape(-1)):
                raise UsageError(
                    f"rank {self._collectives.rank} holds no range [{part.start}, {stop}) of {state} of {fqn}. "
                    f"Choose one of {list(mine)}."
                )
        if state == PARAMETERS:
            unit.load_masters([index])

    def get(self, fqn: str, state: str = PARAMETERS) -> Tensor | None:
        """Gather a complete state, in the parameter's shape, on every rank; None if there is none. Every rank must call it.

        A state without one number for each element (a step count) is returned as a new tensor, on torch's default device.
        """
        value = self.whole(fqn, state)
        if value is MISSING:
            return None
        if isinstance(value, Tensor):
            return value
        if isinstance(value, int | float):
            return torch.tensor(value)
        raise UsageError(f"{state} of {fqn} is {value!r}, not numbers. Read it in optimizer.state.values().")

    def whole(self, fqn: str, state: str) -> Any:
        """Return a state as `get` does, but MISSING instead of None. Every rank must call it.

        Values other than tensors are returned unchanged.
        """
        unit, index = self._find(fqn)
        entry = unit.named[index]
        is_empty = not entry.parameter.numel()  # no rank holds a part of it
        is_missing = state == GRADIENTS and not self._step.used().get(entry.fqn, False)
        if is_empty and not is_missing:
            is_missing = state not in (PARAMETERS, GRADIENTS, *self.optimizer_names())
        if is_missing:
            return MISSING
        if is_empty:
            return torch.zeros(entry.placement.shape, dtype=unit.master_dtype)
        described = self._describe(fqn, state)
        if described is None:
            return MISSING
        if described["dtype"] is None:
            return described["value"]
        dtype = getattr(torch, described["dtype"].removeprefix("torch."))
        if "value" in described:
            return torch.tensor(described["value"], dtype=dtype)
        whole = torch.zeros(entry.shape.numel(), dtype=dtype, device=entry.parameter.device)
        for held in self._parts(fqn):
            with held.shard.opened():
                tensor = self._tensor(held, state)
                if tensor is not None:
                    whole[held.span.within(0)].copy_(tensor)
        for shard, start, stop in unit.layout.owners(index):
            unit.collectives.broadcast(whole[start:stop], unit.collectives.owner(shard))
        return _of_all(whole.view(entry.shape), entry.placement, unit.others)

    def set(self, fqn: str, state: str, value: Tensor) -> None:
        """Set a state from a complete tensor, of which each rank takes its part. Every rank must call it, with the same values.

        Raises:
            UsageError: the shape differs, the parameter does not have this state, there is no gradient yet, or ranks
                that divide the model got different values.
        """
        unit, index = self._find(fqn)
        placement = unit.named[index].placement
        if value.shape != placement.shape:
            raise UsageError(
                f"{state} of {fqn} has shape {placement.shape}, not {tuple(value.shape)}. Pass a tensor of that shape."
            )
        if unit.others.world_size > 1:
            own = zlib.crc32(memory_of(value.detach().cpu().contiguous().view(-1)))
            if len(set(unit.others.exchange_json(own, f"values of {fqn}"))) > 1:
                raise UsageError(
                    f"states.set got different values of {state} of {fqn} on the {unit.others.world_size} ranks that divide the "
                    "model: give each of them the same whole tensor."
                )
        flat = placement.part(value.detach()).reshape(-1)
        if state not in (PARAMETERS, GRADIENTS) and flat.numel():
            described = self._describe(fqn, state)  # ranks without a part of the parameter raise the error, too
            if described is None or "value" in described:
                names = [PARAMETERS, GRADIENTS, *self.optimizer_names()]
                raise UsageError(f"{fqn} has no state {state!r} to set. Choose one of {', '.join(names)}.")
        spans = [held.span for held in self._parts(fqn)]
        self.set_local(fqn, state, [Range(span.start, flat[span.within(0)]) for span in spans])

    def restore(self, fqn: str, values: Mapping[str, Any]) -> None:
        """Set a parameter's master weights and optimizer states, if any, from results of `whole`. Every rank must call it."""
        master = values[PARAMETERS]
        assert master is not None
        unit, index = self._find(fqn)
        placement = unit.named[index].placement
        own = placement.part(master.detach()).reshape(-1)
        for held in self._parts(fqn):
            self._overwrite(held, PARAMETERS, own[held.span.within(0)])
        unit.load_masters(())  # the user sees no change of the values
        on_device = self._step.groups.counting_on_device()
        for held in self._parts(fqn):
            if held.view is None:
                continue
            like = held.view.value
            state = self._step.inner.state[like]
            with held.shard.opened(write=True):
                for name, whole in values.items():
                    if name == PARAMETERS or whole is MISSING:
                        continue
                    if not isinstance(whole, Tensor):
                        state[name] = whole
                    elif name != "step" and whole.shape == master.shape:
                        part = placement.part(whole).reshape(-1)[held.span.within(0)]
                        state[name] = part.reshape(like.shape).to(like.device, copy=True)
                    else:
                        moves = whole.ndim > 0 or id(like) in on_device
                        state[name] = whole.to(like.device if moves else "cpu", copy=True)

    def _find(self, fqn: str) -> tuple[Unit, int]:
        fqn = name_of(fqn)
        if fqn not in self._unit_of:
            raise UsageError(
                f"the model has no parameter {fqn!r}. Use names such as {next(iter(self._unit_of), 'none')}."
            )
        return self._unit_of[fqn]

    def _parts(self, fqn: str) -> list[Held]:
        unit, index = self._find(fqn)
        return self._held.get(unit.named[index].fqn, [])

    def _tensor(self, held: Held, state: str) -> Tensor | None:
        """Return a state's tensor as `Held.tensor` does, including gradients."""
        if state != GRADIENTS:
            return held.tensor(state)
        if held.view is None or self._step.is_dropped(held.view):
            return None
        return self._step.gradients.get(held.view)

    def _overwrite(self, held: Held, state: str, value: Tensor) -> bool:
        """Write a state's new values. Return whether the state exists."""
        if state == GRADIENTS:
            if held.view is None or self._step.is_dropped(held.view):
                return False
            self._step.gradients.set(held.view, value)
            return True
        # An all-gather across hosts may still be reading this shard, or writing to its block of rows.
        self._find(held.named.fqn)[0].settle_at_rest()
        with held.shard.opened(write=True):
            target = held.tensor(state)
            if target is None:
                return False
            target.copy_(value)
            return True

    def _describe(self, fqn: str, state: str) -> dict[str, Any] | None:
        """Return the description of a state, which the ranks with a part of it send to the others. Every rank must call it."""
        own: dict[str, Any] | None = None
        for held in self._parts(fqn):
            if state == PARAMETERS or (state == GRADIENTS and held.view is not None):
                own = {"dtype": str(held.dtype)}
            elif state in held.state:
                value = held.state[state]
                own = {"dtype": None, "value": value}
                if isinstance(value, Tensor):
                    own = {"dtype": str(value.dtype)}
                    if state not in held.states:
                        own["value"] = value.tolist()
        unit, _ = self._find(fqn)
        everyone = unit.collectives.exchange_json(own, f"the description of {state} of {fqn}")
        return next((one for one in everyone if one is not None), None)


def _of_all(local: Tensor, placement: Placement, others: Collectives) -> Tensor:
    """Gather a whole tensor from the ranks of another dimension. Every rank must call it."""
    if placement.is_whole:
        return local
    whole = local.new_empty(placement.shape)
    for rank in range(others.world_size):
        there = Placement.chunk(placement.shape, placement.dim, rank, others.world_size)
        part = local.contiguous() if rank == others.rank else local.new_empty(there.local_shape)
        others.broadcast(part.view(-1), rank)
        there.part(whole).copy_(part)
    return whole


def _holdings(units: Sequence[Unit], step: ShardedStep) -> Iterator[Held]:
    for resident in step.residents:
        shard = Trained(step, resident)
        is_own = resident.shard.number == resident.unit.collectives.shard
        for view in resident.views:
            span = Span(view.named.fqn, view.parameter_start, view.parameter_start + view.numel)
            state = step.inner.state.get(view.value, {})
            yield Held(view.named, span, is_own, shard, view.start, view.value.dtype, state, view)
    last: list[Frozen] = []
    for unit in units:
        if unit.trainable:
            continue
        for bucket in unit.buckets:
            slot = bucket.rests[bucket.own_shard]
            frozen = Frozen(slot, bucket.storages, last)
            for piece in bucket.layout.shard_pieces(bucket.own_shard):
                named = unit.named[piece.index]
                span = Span(named.fqn, piece.parameter_start, piece.parameter_start + piece.numel)
                yield Held(named, span, True, frozen, piece.start, slot.dtype, {})
