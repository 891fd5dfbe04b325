"""Owns the order of things in a step: which unit is brought together when, which bucket is reduced when. Called by hooks.

[Note: order]
Collectives of one kind must start in the same order on every rank. All-gathers follow the order in which modules run,
which is the same everywhere. Gradients become complete in an order that may differ (a rank that skips a parameter), so
reductions follow one fixed order of buckets: a complete bucket waits for those before it, and what is incomplete when the
backward ends is reduced then, with zeros for what is missing. The fixed order is the one in which rank 0 completed its
buckets in the first backward.

Under sharded parameters a rank waits for all-gathers inside its backward. A rank must not wait there while another waits for one
of its reductions, so a unit whose backward is over is closed, with zeros for what is missing, before the next unit is waited for.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from itertools import chain, islice

from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import StorageError, UsageError
from zeroshard.parameters.bucket import Bucket
from zeroshard.policy import Policy
from zeroshard.schedule.unit import State, Unit

UNITS_IN_FLIGHT = 2
"""Reductions that may be under way while the next gradients are made, in units, the largest one's size. Each holds pool buffers."""

PREFETCHED = 4
"""Modules whose shards may be on their way from disk to CPU memory; how many are depends on the buffers that there are."""


class Schedule:
    """Drives the units of one model.

    Args:
        units: in the order of registration.
        policy: tells how far ahead units are brought together, and how long they are kept.
        overlap: collectives run behind the computation. Off: each is waited for where it starts. Same bits.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives, policy: Policy, *, overlap: bool) -> None:
        self.units = list(units)
        self.is_last_microbatch = True
        self.gradients_taken = 0
        self._collectives = collectives
        self._overlap = overlap
        self._policy = policy
        self._kept: list[Unit] = []  # after their forward, for their backward
        self._next = 0
        self._completed: list[Bucket]
        self._guess_order()
        self._in_flight: deque[Bucket] = deque()
        largest = max((unit.layout.numel for unit in self.units), default=0)
        self._in_flight_limit = UNITS_IN_FLIGHT * largest if overlap else 0
        self._awaiting_step = False
        self._stepped = False
        self.parked: frozenset[str] = frozenset()
        """Model states that are away until `reload_states`."""
        self._leaving: Unit | None = None
        self._backward_ended = False
        # Units in the order in which their modules ran: in the last forward, and in this one.
        self._recorded: list[Sequence[Unit]] = []
        self._recording: list[Sequence[Unit]] = []

    def _guess_order(self) -> None:
        buckets = [bucket for unit in self.units if unit.trainable for bucket in unit.buckets]
        self._order = buckets[::-1]  # a first guess, see [Note: order]
        self._order_is_agreed, self._completed = False, []

    def replace(self, unit: Unit, by: Sequence[Unit]) -> None:
        """Between steps: other units hold the parameters of `unit` from now on."""
        position = self.units.index(unit)
        self.units[position : position + 1] = by
        self._recorded, self._recording = [], []
        self._guess_order()

    @property
    def awaits_step(self) -> bool:
        """Gradients have arrived that no step has used."""
        return self._awaiting_step

    @property
    def is_between_steps(self) -> bool:
        """No gradient has arrived since the last `zero_grad`."""
        return not self._awaiting_step and not self._stepped

    # ------------------------------------------------------------------ parameters

    def begin_forward(self) -> None:
        """The root's forward starts, outside of a backward."""
        self._backward_ended = False
        if self._recording:
            self._recorded, self._recording = self._recording, []

    def unshard(self, units: Sequence[Unit], *, backward: bool) -> None:
        """The units of one module are about to be used: wait for them, with the next module's on their way."""
        self._make_room(units)
        for unit in units:
            unit.start_unshard()
        if self._overlap:
            for unit in self._next_after(units, backward):
                if self._has_room(unit):
                    unit.start_unshard()
            for unit in chain.from_iterable(islice(self._after(units, backward), PREFETCHED)):
                unit.prefetch()
        for unit in units:
            unit.unshard()
        if not backward and units not in self._recording:
            self._recording.append(units)

    def _after(self, units: Sequence[Unit], backward: bool) -> Sequence[Sequence[Unit]]:
        """Who comes after: the last forward told the forward's order, this one tells the backward's."""
        order = self._recording[::-1] if backward else self._recorded
        return order[order.index(units) + 1 :] if units in order else ()

    def _next_after(self, units: Sequence[Unit], backward: bool) -> Sequence[Unit]:
        """Who is brought together now, for later."""
        later = self._after(units, backward)
        if not backward and not self._policy.reshard_after_forward:
            return list(chain.from_iterable(later))  # what the forward keeps may as well come all at once
        if self._policy.prefetch_numel is None:
            return list(chain.from_iterable(later[:1]))
        found: list[Unit] = []
        for following in later:
            if sum(unit.layout.numel for unit in found) >= self._policy.prefetch_numel:
                break
            found += following
        return found

    def reshard_after_forward(self, units: Sequence[Unit], *, backward_follows: bool) -> None:
        """These units were used by a forward. The last to run are kept: the backward begins with them."""
        if backward_follows and self._is_reused_soon(units) and self._live_numel() <= self._live_limit:
            self._kept += [unit for unit in units if unit not in self._kept]
            return
        for unit in units:
            unit.reshard()

    def _is_reused_soon(self, units: Sequence[Unit]) -> bool:
        """Whether few elements are used between a unit's forward and its backward: those of all after it, twice."""
        if not self._policy.reshard_after_forward:
            return True
        if units not in self._recorded:
            return False
        after = chain.from_iterable(self._recorded[self._recorded.index(units) + 1 :])
        return 2 * sum(unit.layout.numel for unit in after) <= self._policy.max_reuse_numel

    @property
    def _live_limit(self) -> float:
        return math.inf if self._policy.max_live_numel is None else self._policy.max_live_numel

    def _live_numel(self) -> int:
        """Elements that are unsharded now and will be given back."""
        return sum(u.layout.numel for u in self.units if u.sharded_at_rest and u.state is not State.SHARDED)

    def _has_room(self, unit: Unit) -> bool:
        return unit.state is not State.SHARDED or self._live_numel() + unit.layout.numel <= self._live_limit

    def _make_room(self, units: Sequence[Unit]) -> None:
        """What is needed now comes before what was kept for later; of that, the first to have run is the last to be needed."""
        for unit in units:
            if unit in self._kept:
                self._kept.remove(unit)
        while self._kept and not all(self._has_room(unit) for unit in units):
            self._kept.pop(0).reshard()

    def settle(self) -> None:
        """Wait for every parameter that is still arriving."""
        for unit in self.units:
            if not unit.sharded_at_rest and unit.state is State.ARRIVING:
                unit.unshard()

    # ------------------------------------------------------------------ gradients

    def add_gradient(self, unit: Unit, index: int, gradient: Tensor) -> None:
        """Take a gradient; start to reduce what is complete and has its turn."""
        if self._stepped:
            raise UsageError(
                "a backward began after optimizer.step() without optimizer.zero_grad(): gradients of two steps cannot "
                "be summed, since those of the first are already averaged over ranks. Call zero_grad() after each step."
            )
        self.refuse_parked("a backward")
        unit.add_gradient(index, gradient)
        self.gradients_taken += 1
        self._awaiting_step = True
        self._reduce_ready(unit)

    def close(self, unit: Unit) -> None:
        """The unit's backward is over on every rank that has come this far: what it did not give counts as zeros."""
        closed = (
            [bucket for bucket in unit.buckets if bucket not in self._order[: self._next]] if unit.trainable else []
        )
        for bucket in closed:
            bucket.close()
        if closed:
            self._reduce_ready(unit)

    def _reduce_ready(self, unit: Unit) -> None:
        if not self._order_is_agreed:
            self._completed += [b for b in unit.buckets if b.is_ready and b not in self._completed]
        while self._next < len(self._order) and self._order[self._next].is_ready:
            self._reduce(self._order[self._next])
            self._next += 1

    def end_backward(self) -> None:
        """All of this microbatch's gradients are here: reduce the rest, in the fixed order."""
        for bucket in self._order[self._next :]:
            self._reduce(bucket)
        for bucket in self._order:
            if bucket.has_unreduced:  # a second gradient, after the bucket's turn
                self._reduce(bucket)
        self._next = 0
        self._awaiting_step = self._backward_ended = True
        self._kept.clear()
        for unit in self.units:
            unit.expect_gradients()
            unit.reshard()

    def end_backward_once(self) -> None:
        """As `end_backward`, where torch did not say that the backward ended: the loss touched no parameter here."""
        if not self._backward_ended:
            self.end_backward()
        self._backward_ended = False

    def abandon_backward(self) -> None:
        """A backward broke off with an exception: what it left behind is forgotten, with the gradients of this step."""
        self._drop_in_flight()
        for unit in self.units:
            unit.abandon_backward()
        self._next = 0
        self._awaiting_step = False
        self._kept.clear()

    def _reduce(self, bucket: Bucket) -> None:
        if not bucket.reduce_gradients(self.is_last_microbatch):
            return
        self._in_flight.append(bucket)
        while sum(bucket.layout.numel for bucket in self._in_flight) > self._in_flight_limit:
            self._land()

    def _land(self) -> None:
        bucket = self._in_flight[0]
        bucket.finish_reduction()  # which may fail where gradients rest on disk, and is then tried again
        self._in_flight.popleft()
        bucket.start_gradient_gather()
        if not self._overlap:
            bucket.wait_gradient_gather()

    def _drop_in_flight(self) -> None:
        """What is on its way is not wanted any longer; nor is what went wrong with it."""
        while self._in_flight:
            try:
                self._land()
            except StorageError:
                self._in_flight.popleft().abandon_microbatch()

    def finish_gradients(self) -> None:
        """Block until every gradient that this rank updates with is the mean over ranks."""
        self.refuse_parked("a step, or a gradient norm,")
        if not self._awaiting_step and not self._stepped:
            self.end_backward()  # this rank's loss touched no parameter; the other ranks wait for its zeros
        while self._in_flight:
            self._land()
        unreduced = [bucket.label for bucket in self._order if bucket.holds_local_sum]
        if unreduced:
            raise UsageError(
                "a step or a gradient norm was asked for, but the last backward was not declared the last microbatch: "
                f"the gradients of {len(unreduced)} buckets (one is {unreduced[0]}) were summed on this rank and never "
                "reduced. Run the last backward of a step outside of `accumulate()`."
            )
        for bucket in self._order:
            bucket.wait_gradient_gather()
        self._agree_on_order()

    def _agree_on_order(self) -> None:
        if self._order_is_agreed:
            return
        rest = [bucket for bucket in self._order if bucket not in self._completed]
        numbers = struct.pack(f"<{len(self._order)}I", *[bucket.number for bucket in self._completed + rest])
        first = self._collectives.exchange(numbers, "the order of buckets")[0]
        by_number = {bucket.number: bucket for bucket in self._order}
        self._order = [by_number[number] for number in struct.unpack(f"<{len(self._order)}I", first)]
        self._order_is_agreed, self._completed = True, []

    # ------------------------------------------------------------------ step

    def begin_step(self) -> None:
        """The optimizer is about to update parameters: none is arriving, none is held."""
        self.refuse_parked("optimizer.step()")
        for unit in self.units:
            unit.refuse_step()
        for unit in self.units:
            unit.prepare_step()

    def refuse_parked(self, what: str) -> None:
        """Raise where model states that `what` needs are away."""
        if self.parked:
            raise UsageError(f"{what} while {', '.join(sorted(self.parked))} are parked: call reload_states() first.")

    def in_order(self) -> list[Unit]:
        """The units in the order in which the next forward will use them."""
        return list(dict.fromkeys([*chain.from_iterable(self._recording), *self.units]))

    def sync_parameters(self, unit: Unit) -> None:
        """The optimizer has updated this rank's part of a unit: bring it up to date."""
        unit.sync_parameters()
        if not self._overlap:
            unit.offload()
            self.settle()
        elif self._leaving is not None:  # the one before: its all-gather had this one's time
            self._leaving.offload()
        self._leaving = unit

    def end_step(self) -> None:
        """Every unit was brought up to date."""
        if self._leaving is not None:
            self._leaving.offload()
            self._leaving = None
        self._awaiting_step, self._stepped = False, True
        for unit in self.in_order()[:PREFETCHED]:
            unit.prefetch()

    def forget_gradients(self) -> None:
        """zero_grad(): a new step begins."""
        self._drop_in_flight()
        for unit in self.units:
            unit.forget_gradients()
        self._awaiting_step = self._stepped = False
