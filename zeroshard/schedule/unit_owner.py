"""Owns what happens when the user touches a parameter of a unit: a read, its `grad`, a copy of it. See parameters/classes.py."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.parameters.classes import Owner
from zeroshard.parameters.context import Live
from zeroshard.schedule.unit import Unit


class UnitOwner(Owner):
    """The owner of a unit's parameters."""

    def __init__(self, unit: Unit, live: Live) -> None:
        self._unit = unit
        self._live = live
        self._index_of = {id(entry.parameter): index for index, entry in enumerate(unit.named)}

    def before_read(self, parameter: Tensor, what: str) -> None:
        """Make the values current if that needs no other rank. Otherwise raise an error that names the parameter."""
        unit = self._unit
        if not unit.sharded_at_rest and not unit.is_parked:
            unit.unshard()
            return
        fqn = unit.named[self._index_of[id(parameter)]].fqn
        if unit.is_parked:
            raise UsageError(f"{fqn} is parked by offload_states(): call reload_states() before it is used.")
        raise UsageError(
            f"{fqn} is sharded at rest, and `{what}` needs its values while its module does not run. Read or write inside "
            "`with zeroshard.unsharded(module):` on every rank (to write, with modifier_rank=0). For files: sharded.save, export."
        )

    def taken_gradient(self, parameter: Tensor) -> str | None:
        """Return the parameter's fqn, if it got a gradient in this step that the user has not replaced since."""
        unit = self._unit
        index = self._index_of.get(id(parameter))
        if index is None or index not in unit.used or index in unit.replaced_gradients:
            return None
        return unit.named[index].fqn

    def local_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's sum over the microbatches so far, if it was not reduced yet. Writes to it take effect."""
        unit = self._unit
        index = self._index_of.get(id(parameter))
        if not parameter.numel():
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if index is None:
            return None
        for bucket in unit.gradients:
            whole = bucket.local_sum(index)
            entry = unit.named[index]
            if whole is not None and whole.numel() == entry.shape.numel():
                return entry.as_parameter(whole.view(entry.shape)) if whole.dtype == parameter.dtype else None
        return None

    def gradient_operation(self, parameter: Tensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on the mean gradient. Every rank must run it."""
        return self._live.gradient_operation((self._unit, self._index_of[id(parameter)]), name, args, kwargs)

    def replace_gradient(self, parameter: Tensor) -> None:
        """Record that the user set `grad`, to a tensor or None, of a parameter whose gradient was taken in this step."""
        unit = self._unit
        index = self._index_of.get(id(parameter))
        if index is None or index not in unit.used:
            return
        unit.replaced_gradients.add(index)
        if unit.replaced_gradients >= unit.used:
            self._live.drop_gradients()

    def deep_copy(self, parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy with the true values. Sharded parameters are copied by whole units, and every rank must call it."""
        unit = self._unit
        if id(parameter) not in self._index_of:  # a copy of a copy
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        if unit.is_parked:
            self.before_read(parameter, "deepcopy")
        with unit.collectives.operation("deepcopy"):
            unit.unshard()
        ours = [entry for entry in unit.named if unit.appearance.is_own(entry)]  # others copy themselves
        new = [entry for entry in ours if id(entry.parameter) not in memo]  # ordinary ones may have been copied
        for entry in new:
            memo[id(entry.parameter)] = nn.Parameter(entry.parameter.detach().clone(), entry.parameter.requires_grad)
        unit.reshard()
        for entry in new:
            memo[id(entry.parameter)].__dict__.update(copy.deepcopy(entry.parameter.__dict__, memo))
        copied = memo[id(parameter)]
        assert isinstance(copied, nn.Parameter)
        return copied
