"""Owns the order of things in a step: which unit is brought together when, how long it is kept, what is legal now. Called by hooks.

All-gathers follow the order in which modules run, which is the same on every rank: the last forward tells what comes next in this
one, and this one tells the backward's. The order of reductions is another matter, see gradients/reductions.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.gradients.gradient_bucket import GradientBucket
from zeroshard.gradients.reductions import Reductions
from zeroshard.parameters.context import Context
from zeroshard.parameters.hidden_writes import follow_hidden_writes
from zeroshard.parameters.shown import forget_grad, grad_of
from zeroshard.policy import Policy
from zeroshard.schedule.make_units import frozen_names
from zeroshard.schedule.states import Move, State, StepState, after
from zeroshard.schedule.unit import Unit
from zeroshard.schedule.users_gradients import gradients_of_users, refuse_frozen, refuse_replaced

UNITS_IN_FLIGHT = 2
"""Reductions that may be under way while the next gradients are made, in units, of the size of the largest but one; and one bucket
if it alone is more. Each holds pool buffers."""

USED_AT_ONCE = 3
"""Units that are whole at once, where each is given back after its use: the root, the one that runs, the next."""

PREFETCHED = 4
"""Modules whose shards may be on their way from disk to CPU memory; how many are depends on the buffers that there are."""

Run = tuple[Unit, ...]
"""The units of one module: they are used together."""


class _Order:
    """Modules' units in the order in which they ran."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._position: dict[Run, int] = {}
        self._numels = [0]
        """Elements used before each position."""

    def add(self, run: Run) -> None:
        if run not in self._position:
            self._position[run] = len(self.runs)
            self.runs.append(run)
            self._numels.append(self._numels[-1] + sum(unit.layout.numel for unit in run))

    def after(self, run: Run, *, reverse: bool = False) -> Iterator[Run]:
        """What comes after it; nothing where it is not known."""
        position = self._position.get(run)
        if position is None:
            return iter(())
        steps = range(position - 1, -1, -1) if reverse else range(position + 1, len(self.runs))
        return (self.runs[step] for step in steps)

    def numel_after(self, run: Run) -> float:
        """Elements that are used after it; infinite where it is not known."""
        position = self._position.get(run)
        return math.inf if position is None else self._numels[-1] - self._numels[position + 1]


class Schedule:
    """Drives the units of one model.

    Args:
        units: in the order of registration.
        overlap: collectives run behind the computation. Off: each is waited for where it starts. Same bits.
    """

    def __init__(self, units: Sequence[Unit], context: Context, *, overlap: bool) -> None:
        self.units = list(units)
        self.state = StepState.CLEAN
        self.frozen = frozen_names(units)
        """Parameters that took no gradient when that was last looked at."""
        self.gradients_taken = 0
        self.optimized: set[int] = set()
        """`id`s of the parameters that the optimizer lists, frozen ones among them."""
        self.parked: frozenset[str] = frozenset()
        """Model states that are away until `reload_states`."""
        self._policy: Policy = context.policy
        self._accelerator = context.storages.accelerator
        self._live, self._overlap = context.live, overlap
        self._collectives: Collectives = context.collectives
        numels = sorted((unit.layout.numel for unit in self.units if unit.trainable), reverse=True) or [0]
        in_flight = UNITS_IN_FLIGHT if self._collectives.travels else 1
        limit = in_flight * numels[len(numels) > 1] if overlap else 0  # a root with its embeddings is like no other
        self.reductions = Reductions(
            self._gradient_buckets(), self._collectives, limit, overlap=overlap,
            in_turn=sum(unit.sharded_at_rest for unit in self.units) > 1,
        )  # fmt: skip
        self._kept: list[Unit] = []  # after their forward, for their backward
        self._leaving: Unit | None = None
        self._backward_ended = False
        self.backwards_ended = 0
        """Since the model was sharded."""
        self._last, self._present = _Order(), _Order()
        self._park_what_was_live()

    def _park_what_was_live(self) -> None:
        """Memory that a unit gives back waits for the next one: as much as this policy lets live at once."""
        policy = self._policy
        units = [(unit.layout.numel, unit.flat.tensor.dtype.itemsize) for unit in self.units if unit.sharded_at_rest]
        numels, itemsize = (
            sorted((numel for numel, _ in units), reverse=True),
            max((size for _, size in units), default=0),
        )
        limit = self._live_limit
        if policy.reshard_after_forward:
            ahead = (policy.prefetch_numel or 0) + policy.max_reuse_numel // 2
            limit = min(sum(numels[:USED_AT_ONCE]) + ahead, limit)
        self._accelerator.park_at_most(int(min(sum(numels), limit)) * itemsize)

    def _gradient_buckets(self) -> list[list[GradientBucket]]:
        return [unit.gradients for unit in self.units]

    def replace(self, unit: Unit, by: Sequence[Unit]) -> None:
        """Between steps: other units hold the parameters of `unit` from now on."""
        position = self.units.index(unit)
        self.units[position : position + 1] = by
        self._last, self._present = _Order(), _Order()
        self._park_what_was_live()
        self.reductions.set_units(self._gradient_buckets())

    @property
    def device(self) -> torch.device:
        """What computes."""
        return self._accelerator.device

    def _move(self, move: Move) -> None:
        self.state = after(self.state, move)

    @property
    def awaits_step(self) -> bool:
        """Gradients have arrived that no step has used."""
        return self.state in (StepState.BACKWARD, StepState.GRADIENTS, StepState.BROKEN)

    @property
    def is_between_steps(self) -> bool:
        """No gradient has arrived since the last `zero_grad`."""
        return self.state is StepState.CLEAN

    # ------------------------------------------------------------------ parameters

    def begin_forward(self) -> None:
        """The root's forward starts, outside of a backward."""
        self._backward_ended = False
        for unit in self.units:
            if not unit.trainable:
                unit.appearance.refuse_unfrozen(self.optimized)
        if self._present.runs:
            self._last, self._present = self._present, _Order()

    def unshard(self, units: Run, *, backward: bool) -> None:
        """The units of one module are about to be used: wait for them, with the next module's on their way."""
        self._make_room(units)
        for unit in units:
            unit.start_unshard(to_compute=True)
        if self._overlap:
            for unit in self._next_after(units, backward):
                if self._has_room(unit):
                    unit.start_unshard(to_compute=True)
            if self._policy.uses_disk:
                for unit in chain.from_iterable(islice(self._after(units, backward), PREFETCHED)):
                    unit.prefetch()
        for unit in units:
            unit.unshard(to_compute=True)
        if not backward:
            self._present.add(units)

    def _after(self, units: Run, backward: bool) -> Iterator[Run]:
        """Who comes after: the last forward told the forward's order, this one tells the backward's."""
        return self._present.after(units, reverse=True) if backward else self._last.after(units)

    def _next_after(self, units: Run, backward: bool) -> Iterator[Unit]:
        """Who is brought together now, for later."""
        later = self._after(units, backward)
        if not backward and not self._policy.reshard_after_forward:
            # What the forward keeps may as well come all at once: the first that runs brings the others.
            return chain.from_iterable(islice(later, 1) if self._present.runs else later)
        if self._policy.prefetch_numel is None:
            return chain.from_iterable(islice(later, 1))
        return self._within(later, self._policy.prefetch_numel)

    def _within(self, later: Iterator[Run], limit: int) -> Iterator[Unit]:
        numel = 0
        for following in later:
            if numel >= limit:
                return
            numel += sum(unit.layout.numel for unit in following)
            yield from following

    def reshard_after_forward(self, units: Run, *, backward_follows: bool) -> None:
        """These units were used by a forward. The last to run are kept: the backward begins with them."""
        if backward_follows and self._is_reused_soon(units) and self._live.numel <= self._live_limit:
            self._kept += [unit for unit in units if unit not in self._kept]
            return
        for unit in units:
            unit.reshard()

    def _is_reused_soon(self, units: Run) -> bool:
        """Whether few elements are used between a unit's forward and its backward: those of all after it, twice."""
        if not self._policy.reshard_after_forward:
            return True
        return 2 * self._last.numel_after(units) <= self._policy.max_reuse_numel

    @property
    def _live_limit(self) -> float:
        return math.inf if self._policy.max_live_numel is None else self._policy.max_live_numel

    def _has_room(self, unit: Unit) -> bool:
        return unit.state is not State.SHARDED or self._live.numel + unit.layout.numel <= self._live_limit

    def _make_room(self, units: Run) -> None:
        """What is needed now comes before what was kept for later; of that, the first to have run is the last to be needed."""
        if not self._kept:
            return
        for unit in units:
            if unit in self._kept:
                self._kept.remove(unit)
        while self._kept and not all(self._has_room(unit) for unit in units):
            self._kept.pop(0).reshard()

    def hold(self, unit: Unit) -> None:
        """A graph that outlives this backward may read the unit: it stays whole until a backward ends that leaves no graph."""
        unit.is_held = True

    def give_back(self) -> None:
        """A backward is over: no unit is needed any longer."""
        self._kept.clear()
        for unit in self.units:
            unit.expect_gradients()
            unit.reshard()

    def settle(self) -> None:
        """Wait for every parameter that is still arriving."""
        for unit in self.units:
            unit.settle()

    # ------------------------------------------------------------------ gradients

    def add_gradient(self, unit: Unit, index: int, gradient: Tensor) -> None:
        """Take a gradient; start to reduce what is complete and has its turn."""
        self.refuse_parked("a backward")
        self._move(Move.GRADIENT)
        refuse_replaced(unit)
        unit.add_gradient(index, gradient)
        self.gradients_taken += 1
        self.reductions.start_ready(unit.gradients)

    def close(self, unit: Unit) -> None:
        """The unit's backward is over on every rank that has come this far: what it did not give counts as zeros."""
        if unit.gradients:
            self._move(Move.GRADIENT)
        self.reductions.close(unit.gradients)

    def end_backward(self, *, leaves_graph: bool = False) -> None:
        """All of this microbatch's gradients are here: reduce the rest, in the fixed order."""
        self._move(Move.GRADIENT)  # until the rest is on its way, this backward has not ended
        self.reductions.end_microbatch()
        self._move(Move.END_BACKWARD)
        self._backward_ended = True
        self.backwards_ended += 1
        for unit in self.units:
            unit.is_held = unit.is_held and leaves_graph
        self.give_back()
        for unit in self.units:
            unit.appearance.show_taken()

    def end_backward_once(self) -> None:
        """As `end_backward`, where torch did not say that the backward ended: the loss touched no parameter here."""
        if not self._backward_ended:
            self.end_backward()
        self._backward_ended = False

    def break_off(self) -> None:
        """A backward broke off with an exception. Where it had given no gradient, nothing is lost; else this step is."""
        self._move(Move.BREAK_OFF)
        if self.state is StepState.BROKEN:
            self.reductions.forget()
            for unit in self.units:
                unit.forget_gradients()
        for unit in self.units:
            unit.is_held = False
        self.give_back()

    def finish_gradients(self) -> None:
        """Block until every gradient that this rank updates with is the mean over ranks."""
        self.refuse_parked("a step, or a gradient norm,")
        self._move(Move.STEP)
        if self.asks_for_gradients():
            self._take_gradients_of_users()
        if self.state is StepState.CLEAN:
            self.end_backward()  # this rank's loss touched no parameter; the other ranks wait for its zeros
        self.reductions.finish()

    def asks_for_gradients(self) -> bool:
        """Whether the user has put something into a `parameter.grad` that was not taken yet.

        Raises:
            UsageError: or has put it, or None, where it would go unheard; or a backward broke off.
        """
        after(self.state, Move.STEP)
        for unit in self.units:
            refuse_replaced(unit)
            refuse_frozen(unit, self.optimized)
        return any(gradients_of_users(unit) for unit in self.units)

    def _take_gradients_of_users(self) -> None:
        """What the user has put into `parameter.grad` is this rank's gradient, as if a backward had made it."""
        after(self.state, Move.GRADIENT)  # refused with `grad` as it is
        given = [(unit, index, parameter) for unit in self.units for index, parameter in gradients_of_users(unit)]
        for unit, index, _ in given:
            refuse_replaced(unit, {index} & unit.used)
        for unit, index, parameter in given:
            gradient = grad_of(parameter)
            assert gradient is not None
            forget_grad(parameter)
            self.add_gradient(unit, index, gradient.detach())
        self.end_backward()

    # ------------------------------------------------------------------ step

    def begin_step(self) -> None:
        """The optimizer is about to update parameters: none is arriving, none is held."""
        self.refuse_parked("optimizer.step()")
        for unit in self.units:
            unit.refuse_step()
        follow_hidden_writes(list(chain.from_iterable(unit.prepare_step() for unit in self.units)))
        for unit in self.units:
            unit.begin_step()
        self._collectives.wait_readers()

    def refuse_parked(self, what: str) -> None:
        """Raise where model states that `what` needs are away."""
        if self.parked:
            raise UsageError(f"{what} while {', '.join(sorted(self.parked))} are parked: call reload_states() first.")

    def in_order(self) -> list[Unit]:
        """The units in the order in which the next forward will use them."""
        return list(dict.fromkeys([*chain.from_iterable(self._present.runs), *self.units]))

    def sync_parameters(self, unit: Unit) -> None:
        """The optimizer has updated this rank's part of a unit: bring it up to date."""
        unit.sync_parameters()
        if not self._overlap:
            unit.offload()
            self.settle()
        elif self._leaving is not None:  # the one before: its all-gather had this one's time
            self._leave()
        self._leaving = unit

    def _leave(self) -> None:
        assert self._leaving is not None
        if not (self._collectives.arrives_by_itself or self._leaving.sharded_at_rest):  # behind the next forward
            self._leaving.settle()
        self._leaving.offload()
        self._leaving = None

    def end_step(self) -> None:
        """Every unit was brought up to date."""
        if self._leaving is not None:
            self._leave()
        self._move(Move.STEPPED)
        for unit in self.in_order()[:PREFETCHED]:
            unit.prefetch()

    def forget_gradients(self) -> None:
        """zero_grad(): a new step begins."""
        self.reductions.forget()
        for unit in self.units:
            unit.is_held = False
            unit.forget_gradients()
            for entry in unit.named:
                if unit.trainable or id(entry.parameter) in self.optimized:
                    forget_grad(entry.parameter)
        self._move(Move.ZERO_GRAD)
