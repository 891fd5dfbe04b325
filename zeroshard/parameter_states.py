"""Owns `parameter_states`: what zeroshard keeps of one of the user's parameters, found by the parameter itself. Called by users.

states = zeroshard.parameter_states(model.head.weight)
states.is_sharded, states.is_here
states.get(), states.get("gradients"), states.get("exp_avg")     the whole, on every rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.born import BornSharded, Shard, is_shown, shard_of
from zeroshard.errors import UsageError
from zeroshard.schedule.states import State
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import GRADIENTS, PARAMETERS, ModelStates, Range
from zeroshard.unsharded import Home, home_of, unsharded


class ParameterStates(ABC):
    """What zeroshard keeps of one parameter. Made by `parameter_states`; made anew, since the model may be sharded anew.

    States are called "parameters" (master weights), "gradients" (their mean over ranks, between the last backward of a step and
    `zero_grad`), and as the optimizer calls its own: "exp_avg".

    Attributes:
        fqn: its first name in the model; of one that was born sharded, and is in no sharded model so far, "".
        number: in the order in which parameters were cut or sharded, the same on every rank.
        is_trained: a step updates it.
        is_sharded: at rest this rank has its part alone.
    """

    fqn: str
    number: int
    is_trained: bool
    is_sharded: bool

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Its values are whole, and on this rank, now."""

    @property
    @abstractmethod
    def is_arriving(self) -> bool:
        """They are on their way."""

    @abstractmethod
    def names(self) -> list[str]:
        """The states that there are, as far as this rank can tell."""

    @abstractmethod
    def get(self, state: str = PARAMETERS) -> Tensor | None:
        """The whole of a state, on every rank; None where there is none. Every rank must call it."""

    @abstractmethod
    def set(self, value: Tensor, state: str = PARAMETERS) -> None:
        """Give every rank its part of a whole. Every rank must call it, with the same values.

        Raises:
            UsageError: there is no such state, or it has another shape.
        """

    @abstractmethod
    def local(self, state: str = PARAMETERS) -> list[Range]:
        """The ranges of the flattened state that this rank holds, see `ModelStates.local`. Runs no collective."""

    @abstractmethod
    def set_local(self, ranges: Sequence[Range], state: str = PARAMETERS) -> None:
        """Overwrite ranges that this rank holds. Every rank must call it, with its own."""

    def own_gradient(self) -> Tensor | None:
        """This rank's sum of gradients so far, where nothing has reduced it yet: a copy. Runs no collective.

        None where there is none, or where it is no longer this rank's alone: `get("gradients")` has it.
        """
        return None

    def flat(self, state: str = PARAMETERS) -> Tensor | None:
        """This rank's elements of a state, 1-D, range by range: a copy. Empty where it holds none; None: no such state."""
        parts = [part.tensor.view(-1) for part in self.local(state)]
        if not parts:
            return None if self.local() else torch.empty(0)
        return torch.cat(parts)

    def set_flat(self, value: Tensor, state: str = PARAMETERS) -> None:
        """Overwrite what `flat` gives. Every rank must call it, with its own.

        Raises:
            UsageError: there is no such state, or it has another number of elements.
        """
        ranges = self.local(state)
        held = sum(part.tensor.numel() for part in ranges)
        if value.numel() != held or (not ranges and self.local()):
            raise UsageError(
                f"this rank holds {held} elements of {state} of {self.fqn or 'the parameter'}, not {value.numel()}."
            )
        values = value.reshape(-1).split([part.tensor.numel() for part in ranges])
        self.set_local([Range(part.start, new) for part, new in zip(ranges, values, strict=True)], state)


def parameter_states(parameter: Tensor) -> ParameterStates:
    """What zeroshard keeps of a parameter of a model that was sharded, or that was born sharded.

    Raises:
        UsageError: it is neither.
    """
    home = home_of(parameter)
    if home is not None:
        unit = home.unit()
        if unit is not None:
            return _InUnit(home, unit)
    if isinstance(parameter, nn.Parameter) and (isinstance(parameter, BornSharded) or is_shown(parameter)):
        return _Born(parameter)
    raise UsageError(
        f"this {type(parameter).__name__} of shape {tuple(parameter.shape)} is a parameter of no model that zeroshard holds: call "
        "shard() or initialize() first, and give the model's own parameter, not a copy."
    )


class _InUnit(ParameterStates):
    def __init__(self, home: Home, unit: Unit) -> None:
        self._unit, self._optimizer, self._index = unit, home.optimizer, home.index
        self.fqn, self.number = unit.named[home.index].fqn, home.number
        self.is_trained, self.is_sharded = unit.trainable, unit.sharded_at_rest

    @property
    def _states(self) -> ModelStates:
        optimizer = self._optimizer()
        if optimizer is None:
            raise UsageError(f"the optimizer of {self.fqn} is gone: keep what shard() or initialize() returned.")
        return ModelStates([self._unit], optimizer, self._unit.collectives)

    @property
    def is_here(self) -> bool:
        return self._unit.state is State.UNSHARDED

    @property
    def is_arriving(self) -> bool:
        return self._unit.state is State.ARRIVING

    def names(self) -> list[str]:
        return self._states.names(self.fqn)

    def get(self, state: str = PARAMETERS) -> Tensor | None:
        return self._states.get(self.fqn, state)

    def set(self, value: Tensor, state: str = PARAMETERS) -> None:
        self._states.set(self.fqn, state, value)

    def own_gradient(self) -> Tensor | None:
        entry = self._unit.named[self._index]
        sums = [bucket.local_sum(self._index) for bucket in self._unit.gradients]
        parts = [part for part in sums if part is not None]
        if sum(part.numel() for part in parts) != entry.shape.numel() or not parts:
            return None
        return torch.cat(parts).view(entry.shape)

    def local(self, state: str = PARAMETERS) -> list[Range]:
        return self._states.local(self.fqn, state)

    def set_local(self, ranges: Sequence[Range], state: str = PARAMETERS) -> None:
        self._states.set_local(self.fqn, state, ranges)


class _Born(ParameterStates):
    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._shard: Shard = shard_of[parameter]
        self.fqn, self.number, self.is_trained, self.is_sharded = "", self._shard.number, False, True

    @property
    def is_here(self) -> bool:
        return self._shard.shows > 0

    @property
    def is_arriving(self) -> bool:
        return False

    def names(self) -> list[str]:
        return [PARAMETERS]

    def get(self, state: str = PARAMETERS) -> Tensor | None:
        return self._shard.whole().clone() if state == PARAMETERS else None

    def set(self, value: Tensor, state: str = PARAMETERS) -> None:
        self._refuse(state)
        if value.shape != self._parameter.shape:
            raise UsageError(f"the parameter has shape {tuple(self._parameter.shape)}, not {tuple(value.shape)}.")
        with unsharded(self._parameter, modifier_rank=0):
            self._parameter.data.copy_(value)

    def local(self, state: str = PARAMETERS) -> list[Range]:
        start, stop = self._shard.range
        own = self._shard.own[: stop - start]
        return [Range(start, own)] if state == PARAMETERS and own.numel() else []

    def set_local(self, ranges: Sequence[Range], state: str = PARAMETERS) -> None:
        self._refuse(state)
        mine = {(part.start, part.tensor.numel()): part.tensor for part in self.local()}
        for part in ranges:
            target = mine.get((part.start, part.tensor.numel()))
            if target is None or self.is_here:
                raise UsageError(
                    f"this rank's part of the parameter is {[(s, s + n) for s, n in mine]}, "
                    f"not [{part.start}, {part.start + part.tensor.numel()}); and it is set outside of unsharded()."
                )
            target.copy_(part.tensor.reshape(-1))

    def _refuse(self, state: str) -> None:
        if state != PARAMETERS:
            what = "gradients" if state == GRADIENTS else f"state {state!r}"
            raise UsageError(
                f"a parameter that is in no sharded model so far has no {what}: call shard() or initialize() first."
            )
