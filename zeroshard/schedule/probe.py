"""Owns backwards that belong to no step: their gradients are looked at and forgotten."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zeroshard.schedule.schedule import Run, Schedule
from zeroshard.schedule.unit import Unit

Take = Callable[[Unit, int, Tensor], None]
"""Gets this rank's unreduced gradient of parameter `index` of a unit, as autograd made it."""


class Probe:
    """A stand-in for the schedule that unshards units as it does, passes gradients to `take`, and reduces nothing."""

    def __init__(self, schedule: Schedule, take: Take) -> None:
        self.units = schedule.units
        self._schedule = schedule
        self._take = take
        self.closed: list[Unit] = []
        """Units whose backward is over."""

    def begin_forward(self) -> None:
        """Forward to the schedule."""
        self._schedule.begin_forward()

    def unshard(self, units: Run, *, backward: bool) -> None:
        """Forward to the schedule."""
        self._schedule.unshard(units, backward=backward)

    def reshard_after_forward(self, units: Run, *, backward_follows: bool) -> None:
        """Forward to the schedule."""
        self._schedule.reshard_after_forward(units, backward_follows=backward_follows)

    def add_gradient(self, unit: Unit, index: int, gradient: Tensor) -> None:
        """Pass the gradient to `take`."""
        self._take(unit, index, gradient)

    def close(self, unit: Unit) -> None:
        """Record that the unit is closed. No reduction waits for its missing gradients."""
        self.closed.append(unit)

    def end_backward(self, *, leaves_graph: bool = False) -> None:
        """Reshard all units, except those that a graph made by this backward may read."""
        for unit in self.units:
            unit.is_held = unit.is_held and leaves_graph
        self._schedule.give_back()

    def break_off(self) -> None:
        """End a backward that raised. It did not belong to a step."""
        self._schedule.give_back()
