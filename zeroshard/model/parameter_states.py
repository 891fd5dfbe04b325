"""Owns `parameter_states`: the model states of one of the user's parameters, found by the parameter itself.

states = zeroshard.parameter_states(model.head.weight)
states.is_sharded, states.is_here
states.get(), states.get("gradients"), states.get("exp_avg")     the complete states, on every rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeroshard.core.model_states import GRADIENTS, PARAMETERS, ModelStates, Range
from zeroshard.core.unit import Unit, UnitState
from zeroshard.errors import UsageError
from zeroshard.model.born import BornShard, BornSharded, is_shown, shard_of
from zeroshard.model.unsharded import Home, home_of, unsharded


class ParameterStates:
    """The model states of one parameter, as `parameter_states` returns them.

    The states are "parameters" (master weights), "gradients", and the optimizer's states under its own names, such as
    "exp_avg". "gradients" is the mean over ranks, between the last backward of a step and `zero_grad`. After you shard
    the model again, call `parameter_states` again.

    Attributes:
        fqn: the parameter's first name in the model; "" if it was created under `sharded_init` and its model is not
            sharded yet.
        number: its number in the order in which parameters were sharded or, under `sharded_init`, created. It is the
            same on every rank.
        is_trained: whether a step updates it.
        is_sharded: whether this rank stores only its part at rest.
    """

    fqn: str
    number: int
    is_trained: bool
    is_sharded: bool

    def __init__(self, home: Home, unit: Unit) -> None:
        self._unit = unit
        self._index = home.index
        self._step = home.step
        self.fqn = unit.named[home.index].fqn
        self.number = home.number
        self.is_trained = unit.trainable
        self.is_sharded = unit.sharded_at_rest

    @property
    def _states(self) -> ModelStates:
        step = self._step()
        assert step is not None, "the units of a model keep it"
        return ModelStates([self._unit], step, self._unit.collectives)

    @property
    def is_here(self) -> bool:
        """Whether the parameter shows its complete and current values now. Values that rest in CPU memory do not count."""
        return self._unit.state is UnitState.UNSHARDED

    @property
    def is_arriving(self) -> bool:
        """Whether an all-gather of the parameter, or its copy from CPU memory, is under way."""
        return self._unit.is_arriving

    def names(self) -> list[str]:
        """Return "parameters", "gradients" if the parameter is trained, and the names of the optimizer's states on this rank."""
        return self._states.names(self.fqn)

    def get(self, state: str = PARAMETERS) -> Tensor | None:
        """Return a complete state, in the parameter's shape or as one number; None if there is none. Every rank must call it."""
        return self._states.get(self.fqn, state)

    def set(self, value: Tensor, state: str = PARAMETERS) -> None:
        """Set a state from a complete tensor. Every rank must call it, with the same values.

        Raises:
            UsageError: the parameter does not have this state, or no gradient yet, or `value` has a different shape.
        """
        self._states.set(self.fqn, state, value)

    def local(self, state: str = PARAMETERS) -> list[Range]:
        """Return this rank's ranges of the flattened state, without a collective; see `ModelStates.local`."""
        return self._states.local(self.fqn, state)

    def set_local(self, ranges: Sequence[Range], state: str = PARAMETERS) -> None:
        """Overwrite ranges that this rank holds. Every rank must call it, with its own values.

        Raises:
            UsageError: this rank does not hold one of the ranges, or the parameter does not have this state.
        """
        self._states.set_local(self.fqn, state, ranges)

    def own_gradient(self) -> Tensor | None:
        """Return a copy of this rank's sum of gradients, without a collective, if the sum has not been reduced yet.

        The copy has the parameter's local shape. If there is no unreduced sum, return None: after the reduction,
        `get("gradients")` returns the mean.
        """
        shape = self._unit.named[self._index].shape
        sums = [bucket.local_sum(self._index) for bucket in self._unit.gradients]
        parts = [part for part in sums if part is not None]
        if not parts or sum(part.numel() for part in parts) != shape.numel():
            return None
        return torch.cat(parts).view(shape)

    def flat(self, state: str = PARAMETERS) -> Tensor | None:
        """Return a copy of this rank's elements of a state, 1-D, range by range.

        The result is empty if this rank does not hold elements of it, and None if the parameter does not have this
        state.
        """
        parts = [part.tensor.view(-1) for part in self.local(state)]
        if not parts:
            return None if self.local() else torch.empty(0)
        return torch.cat(parts)

    def set_flat(self, value: Tensor, state: str = PARAMETERS) -> None:
        """Overwrite the elements that `flat` returns. Every rank must call it, with its own values.

        Raises:
            UsageError: the parameter does not have this state, or `value` has a different number of elements.
        """
        # Of a gradient, the ranges are the parameter's, and the memory may not be there before `set_local` waits for it.
        ranges = self.local(PARAMETERS if state == GRADIENTS else state)
        sizes = [part.tensor.numel() for part in ranges]
        if value.numel() != sum(sizes) or (not ranges and self.local()):
            raise UsageError(
                f"this rank holds {sum(sizes)} elements of {state} of {self.fqn or 'the parameter'}, not "
                f"{value.numel()}. Pass as many as `flat` returns."
            )
        values = value.reshape(-1).split(sizes)
        self.set_local([Range(part.start, new) for part, new in zip(ranges, values, strict=True)], state)


def parameter_states(parameter: Tensor) -> ParameterStates:
    """Find the model states of a parameter of a sharded model, or of one created under `sharded_init`.

    Raises:
        UsageError: the tensor is neither.
    """
    home = home_of(parameter)
    if home is not None:
        unit = home.unit()
        if unit is not None:
            return ParameterStates(home, unit)
    if isinstance(parameter, nn.Parameter) and (isinstance(parameter, BornSharded) or is_shown(parameter)):
        return _Born(parameter)
    raise UsageError(
        f"this {type(parameter).__name__} of shape {tuple(parameter.shape)} is not in any sharded model. "
        "Call shard() or initialize() first, and pass the model's own parameter, not a copy."
    )


class _Born(ParameterStates):
    """The states of a parameter that was created sharded and is not in a unit yet: only its values."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._shard: BornShard = shard_of[parameter]
        self.fqn = ""
        self.number = self._shard.number
        self.is_trained = False
        self.is_sharded = True

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
            raise UsageError(
                f"the parameter has shape {tuple(self._parameter.shape)}, not {tuple(value.shape)}. Pass a tensor of "
                "its shape."
            )
        with unsharded(self._parameter, modifier_rank=0):
            self._parameter.data.copy_(value)

    def own_gradient(self) -> Tensor | None:
        return None

    def local(self, state: str = PARAMETERS) -> list[Range]:
        start, stop = self._shard.range
        if state != PARAMETERS or start == stop:
            return []
        return [Range(start, self._shard.own[: stop - start])]

    def set_local(self, ranges: Sequence[Range], state: str = PARAMETERS) -> None:
        self._refuse(state)
        mine = {(part.start, part.start + part.tensor.numel()): part.tensor for part in self.local()}
        for part in ranges:
            stop = part.start + part.tensor.numel()
            target = mine.get((part.start, stop))
            if target is None or self.is_here:
                raise UsageError(
                    f"this rank's part of the parameter is {list(mine)}, not [{part.start}, {stop}), or the parameter is "
                    "unsharded now. Pass the values of that part, outside of unsharded()."
                )
            target.copy_(part.tensor.reshape(-1))

    def _refuse(self, state: str) -> None:
        if state != PARAMETERS:
            what = "gradients" if state == GRADIENTS else f"state {state!r}"
            raise UsageError(
                f"a parameter that is in no sharded model has no {what}. Call shard() or initialize() first."
            )
