"""Owns the order in which buckets are reduced, and the number of reductions in flight.

[Note: order]
Collectives of one kind must start in the same order on every rank. Gradients may become complete in a different order on each rank
(one may skip a parameter), so reductions follow one fixed order of buckets. A complete bucket waits for those before it. Buckets
that are incomplete when the backward ends are reduced then, with zeros for missing gradients. The first step uses the reverse order
of registration. Later steps use the order in which rank 0 completed its buckets in the first one.

Buckets that the backend launches at once are a group: the buckets of a unit are reduced when the last of them is complete.

Where several units are sharded, a rank starts all-gathers inside its backward and waits for them. A rank must not wait there while
another waits for one of its reductions. So a unit whose backward is over is closed, with zeros for missing gradients, before the
wait for the next unit. No reduction starts before that (`in_turn`): ranks differ in the time of a unit's last gradient, but close
it at the same point. The root unit is closed last: a head that one rank does not use must not keep that rank's other
buckets waiting. So all ranks start gathers and reductions in one order. Backends need this if their kernels wait for
their turn on the device.

Reductions are finished in the order in which they started. A rank that finishes one waits for the others to start it. With
`within`, the first call of `finish` also starts the part between hosts, which must have one order on all ranks.

[Note: room]
Gradients that rest in CPU memory are copied there while the backward continues. If the accelerator has room, the computation waits
for no copy. Scratch of two units may wait for copies, and the sum of a step's microbatches stays on the accelerator until the last.
Each step checks once, when its first reduction starts: activations have reached their peak by then.
"""

from __future__ import annotations

import struct
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

from zeroshard.core.context import FIRST_BATCH_NBYTES, Context
from zeroshard.core.gradient_bucket import GradientBucket, Holds
from zeroshard.errors import UsageError

Group = tuple[GradientBucket, ...]
"""The buckets that are reduced at once."""


_ALONE = nullcontext()


class Reductions:
    """The reductions of one model.

    Args:
        units: the gradients' buckets of each unit (none for a frozen one), in the order of registration.
        limit_numel: the maximum number of elements in flight while the next gradients are computed; one `Group` is
            always allowed. 0: wait for each reduction immediately.
        overlap: whether gathers overlap with computation. If not, each blocks immediately.
        in_turn: whether a unit's reductions start only when it is closed, since a backward gathers several units.
    """

    def __init__(
        self,
        units: Sequence[Sequence[GradientBucket]],
        context: Context,
        limit_numel: int,
        *,
        overlap: bool,
        in_turn: bool,
    ) -> None:
        self._collectives = context.collectives
        self._accelerator = context.storages.accelerator
        self._pool = context.pool
        self._live = context.live
        self._kept_sums = False
        """The present step's, or the last step's, `Step.keeps_sums`."""
        self._limit = limit_numel
        self._overlap = overlap
        self._in_turn = in_turn
        self._in_flight: deque[Group] = deque()
        self._in_flight_numel = 0
        self.is_last_microbatch = True
        self.set_units(units)

    def set_units(self, units: Sequence[Sequence[GradientBucket]]) -> None:
        """Replace the model's buckets. The next `finish` makes all ranks use one order of these buckets."""
        order = list[Group]()  # a first guess; see [Note: order]
        for unit in reversed(units):
            order += unit[0].collectives.launches(unit[::-1]) if unit else ()
        self._set_order([group for group in order if group])
        self._gathers_means = any(bucket.gathers_mean for bucket in self._buckets())
        self._completed: dict[Group, None] | None = {}
        """The groups in the order in which this rank completed them; None once the ranks agree on an order."""

    def _set_order(self, order: Sequence[Group]) -> None:
        self._order = list(order)
        self._position = {bucket: position for position, group in enumerate(order) for bucket in group}
        """The position of each bucket's group, by bucket."""
        self._next = 0

    # ------------------------------------------------------------------ one microbatch

    def start_ready(self, buckets: Sequence[GradientBucket]) -> None:
        """Start to reduce complete groups, in the fixed order (see [Note: order])."""
        if self._completed is not None:
            groups = [self._order[self._position[bucket]] for bucket in buckets]
            self._completed.update(dict.fromkeys(filter(self._may_start, groups)))
        while self._next < len(self._order) and self._may_start(self._order[self._next]):
            self._reduce(self._order[self._next])
            self._next += 1

    def _may_start(self, group: Group) -> bool:
        if self._in_turn:
            return all(bucket.microbatch.is_closed for bucket in group)
        return all(bucket.microbatch.is_closed or bucket.is_complete for bucket in group)

    def close(self, buckets: Sequence[GradientBucket]) -> None:
        """Close a unit's buckets when its backward ended, at the same point on every rank: missing gradients count as zeros."""
        # Buckets before `_next` are on their way: what they receive now is reduced at the end of the microbatch.
        closed = [bucket for bucket in buckets if self._position[bucket] >= self._next]
        for bucket in closed:
            bucket.microbatch.is_closed = True
        if closed:
            self.start_ready(buckets)

    def on_any_rank(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Return, for each flag, whether it is set on any rank, if ranks must close units at the same point; otherwise, `flags`.

        Every rank must call it.
        """
        if not self._in_turn:
            return flags
        return [*map(bool, self._collectives.agree(bytes(flags), "the graphs of earlier forwards").some)]

    def end_microbatch(self) -> None:
        """Start to reduce the rest of this microbatch's gradients in the fixed order, after all have arrived."""
        for group in self._order[self._next :]:
            self._reduce(group)
        for bucket in self._buckets():
            if bucket.microbatch.whole is not None:  # a second gradient, after the bucket's turn
                self._reduce((bucket,))
        self._next = 0

    def _together(self, group: Group) -> AbstractContextManager[None]:
        """Return a context in which a group's operations begin: one of them needs no launch of several."""
        return group[0].collectives.together() if len(group) > 1 else _ALONE

    def _buckets(self) -> Iterable[GradientBucket]:
        return chain.from_iterable(self._order)

    def _look_for_room(self) -> None:
        """Decide how much of the accelerator's memory this step uses for speed. See [Note: room]."""
        offloaded = sum(bucket.offloaded_nbytes for bucket in self._buckets())
        numel = sum(bucket.layout.numel for bucket in self._buckets())
        if not offloaded:
            self._live.step.keeps_sums = False
            return
        # The peak includes the last step's memory already.
        two_units = -(-offloaded * min(self._limit, numel) // numel)
        more = max(two_units - self._pool.spare_nbytes, 0)
        self._pool.spare_nbytes = two_units if self._accelerator.has_room(more) else 0
        sums = 0 if self._kept_sums else offloaded
        self._kept_sums = not self.is_last_microbatch and self._accelerator.has_room(more + sums)
        self._live.step.keeps_sums = self._kept_sums

    def finish_up_to(self, buckets: Iterable[GradientBucket]) -> None:
        """Finish the reductions of these buckets that are in flight, and those that started earlier. See [Note: order]."""
        left = {bucket for bucket in buckets if bucket.flight is not None}
        if not left:
            return
        for group in self._in_flight:
            if not left:
                return
            for bucket in group:
                bucket.finish_reduction()
            left.difference_update(group)

    def _reduce(self, group: Group) -> None:
        self.finish_up_to(group)  # of the previous microbatch, if no gradient has arrived since then
        step = self._live.step
        if step.keeps_sums is None:
            self._look_for_room()
        keeps_sums = bool(step.keeps_sums)
        with self._together(group):
            started = tuple([one for one in group if one.reduce_gradients(self.is_last_microbatch, keeps_sums)])
        if not started:
            return
        self._in_flight.append(started)
        self._in_flight_numel += _numel(started)
        # If nothing may be in flight, this waits for the last group, too. Otherwise one group may exceed the limit.
        while self._in_flight_numel > self._limit and (len(self._in_flight) > 1 or not self._limit):
            self._land()

    def _land(self) -> None:
        group = self._in_flight[0]
        for bucket in group:
            bucket.finish_reduction()  # which may fail if gradients rest on disk, and is then tried again
        self._in_flight_numel -= _numel(self._in_flight.popleft())
        if not self._gathers_means:
            return
        with self._together(group):
            for bucket in group:
                bucket.start_gather()
        if not self._overlap:
            for bucket in group:
                # no test needs this wait: without overlap it only comes earlier than the one in `finish`.
                bucket.wait_gather()

    # ------------------------------------------------------------------ one step

    def land(self) -> None:
        """Block until the reductions that were started have ended. A backward may call it, since it exchanges no control messages.

        If the optimizer is unsharded, it also starts the all-gathers of the means.
        """
        while self._in_flight:
            self._land()

    def finish(self) -> None:
        """Block until every gradient that this rank's update uses is the mean over ranks. Every rank must call it."""
        self.land()
        unreduced = [bucket.label for bucket in self._buckets() if bucket.holds is Holds.LOCAL_SUM]
        if unreduced:
            raise UsageError(
                "a step or a gradient norm was asked for, but the last backward was not declared the last microbatch: "
                f"the gradients of {len(unreduced)} buckets (one is {unreduced[0]}) were summed on this rank and never "
                "reduced. Run the last backward of a step outside of `accumulate()`."
            )
        for bucket in self._buckets():
            bucket.write_sum()  # if no microbatch was declared the last
            if self._gathers_means:
                bucket.wait_gather()
        if self._completed is None:
            return
        # Agree, once, on the order in which rank 0 completed its buckets.
        rest = [group for group in self._order if group not in self._completed]
        numbers = struct.pack(f"<{len(self._order)}I", *[group[0].number for group in [*self._completed, *rest]])
        # The order's bits that are set on any rank are rank 0's: the others set none.
        own = numbers if self._collectives.rank == 0 else bytes(len(numbers))
        batch = self._live.first_batch or bytes(FIRST_BATCH_NBYTES)
        agreed = self._collectives.agree(own + batch, "the order of buckets")
        by_number = {group[0].number: group for group in self._order}
        first = agreed.some[: len(numbers)]
        self._set_order([by_number[number] for number in struct.unpack(f"<{len(self._order)}I", first)])
        self._completed = None
        self._live.first_batch = bytes(FIRST_BATCH_NBYTES)  # told once, even if units change
        is_same = agreed.every[len(numbers) :] == agreed.some[len(numbers) :]
        if self._collectives.world_size > 1 and is_same and any(batch) and self._collectives.rank == 0:
            warnings.warn(
                f"the first batch is the same on all {self._collectives.world_size} ranks, so their gradients are the same, too. "
                "Give each rank its own part of the data: by torch's DistributedSampler, or by a seed that depends on the rank.",
                stacklevel=2,
            )

    def forget(self) -> None:
        """Drop this step's gradients and errors, at `zero_grad()` or after a backward that was aborted."""
        for bucket in self._buckets():
            bucket.forget()
        self._live.step.keeps_sums = None
        self._in_flight.clear()
        self._in_flight_numel = 0
        self._next = 0


def _numel(group: Group) -> int:
    return sum(bucket.layout.numel for bucket in group)
