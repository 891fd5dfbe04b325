"""Owns the order in which buckets are reduced, and how many reductions travel at once. Called by schedule.

[Note: order]
Collectives of one kind must start in the same order on every rank. Gradients become complete in an order that may differ (a rank
that skips a parameter), so reductions follow one fixed order of buckets: a complete bucket waits for those before it, and what is
incomplete when the backward ends is reduced then, with zeros for what is missing. The fixed order is the one in which rank 0
completed its buckets in the first backward.

Under sharded parameters a rank waits for all-gathers inside its backward. A rank must not wait there while another waits for one
of its reductions, so a unit whose backward is over is closed, with zeros for what is missing, before the next unit is waited for.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.gradients.gradient_bucket import GradientBucket, Holds


class Reductions:
    """The reductions of one model.

    Args:
        buckets: those of all trainable units, in the order of registration.
        limit_numel: elements of buckets that may be under way while the next gradients are made, or one bucket; 0 waits for each at
            once.
        overlap: gathers run behind the computation. Off: each is waited for where it starts.
    """

    def __init__(
        self, buckets: Sequence[GradientBucket], collectives: Collectives, limit_numel: int, *, overlap: bool
    ) -> None:
        self._collectives, self._limit, self._overlap = collectives, limit_numel, overlap
        self._in_flight: deque[GradientBucket] = deque()
        self._in_flight_numel = 0
        self.is_last_microbatch = True
        self.set_buckets(buckets)

    def set_buckets(self, buckets: Sequence[GradientBucket]) -> None:
        """Between steps: these are the model's buckets from now on. Their order is agreed upon anew."""
        self._set_order(buckets[::-1])  # a first guess, see [Note: order]
        self._completed: dict[GradientBucket, None] = {}
        self._is_agreed = False

    def _set_order(self, order: Sequence[GradientBucket]) -> None:
        self._order = list(order)
        self._position = {bucket: position for position, bucket in enumerate(order)}
        self._next = 0

    # ------------------------------------------------------------------ one microbatch

    def start_ready(self, buckets: Sequence[GradientBucket]) -> None:
        """These may have become complete: start to reduce what is, and has its turn."""
        if not self._is_agreed:
            self._completed.update(dict.fromkeys(bucket for bucket in buckets if bucket.is_ready))
        while self._next < len(self._order) and self._order[self._next].is_ready:
            self._reduce(self._order[self._next])
            self._next += 1

    def close(self, buckets: Sequence[GradientBucket]) -> None:
        """Their unit's backward is over on every rank that has come this far: what it did not give counts as zeros."""
        closed = [bucket for bucket in buckets if self._position[bucket] >= self._next]
        for bucket in closed:
            bucket.close()
        if closed:
            self.start_ready(buckets)

    def end_microbatch(self) -> None:
        """All of this microbatch's gradients are here: reduce the rest, in the fixed order."""
        for bucket in self._order[self._next :]:
            self._reduce(bucket)
        for bucket in self._order:
            if bucket.has_unreduced:  # a second gradient, after the bucket's turn
                self._reduce(bucket)
        self._next = 0

    def _reduce(self, bucket: GradientBucket) -> None:
        if not bucket.reduce_gradients(self.is_last_microbatch):
            return
        self._in_flight.append(bucket)
        self._in_flight_numel += bucket.layout.numel
        while self._in_flight_numel > self._limit and (len(self._in_flight) > 1 or not self._limit):
            self._land()

    def _land(self) -> None:
        bucket = self._in_flight[0]
        bucket.finish_reduction()  # which may fail where gradients rest on disk, and is then tried again
        self._take_off()
        bucket.start_gather()
        if not self._overlap:
            bucket.wait_gather()

    def _take_off(self) -> None:
        self._in_flight_numel -= self._in_flight.popleft().layout.numel

    # ------------------------------------------------------------------ one step

    def finish(self) -> None:
        """Block until every gradient that this rank updates with is the mean over ranks."""
        while self._in_flight:
            self._land()
        unreduced = [bucket.label for bucket in self._order if bucket.holds is Holds.LOCAL_SUM]
        if unreduced:
            raise UsageError(
                "a step or a gradient norm was asked for, but the last backward was not declared the last microbatch: "
                f"the gradients of {len(unreduced)} buckets (one is {unreduced[0]}) were summed on this rank and never "
                "reduced. Run the last backward of a step outside of `accumulate()`."
            )
        for bucket in self._order:
            bucket.wait_gather()
        self._agree_on_order()

    def _agree_on_order(self) -> None:
        if self._is_agreed:
            return
        rest = [bucket for bucket in self._order if bucket not in self._completed]
        numbers = struct.pack(f"<{len(self._order)}I", *[bucket.number for bucket in [*self._completed, *rest]])
        first = self._collectives.exchange(numbers, "the order of buckets")[0]
        by_number = {bucket.number: bucket for bucket in self._order}
        self._set_order([by_number[number] for number in struct.unpack(f"<{len(self._order)}I", first)])
        self._completed, self._is_agreed = {}, True

    def forget(self) -> None:
        """zero_grad(), or a backward that broke off: nothing of this step is wanted any longer, nor what went wrong with it."""
        for bucket in self._order:
            bucket.forget()
        self._in_flight.clear()
        self._in_flight_numel, self._next = 0, 0
