"""Owns who wrote last to a unit's parameters: the optimizer, or the user, on this rank or on another.

The optimizer writes to shards, and the user to unsharded parameters. Whatever the user wrote goes to the shards, and to master
weights, before the optimizer steps and before the unsharded values leave. Where ranks wrote different values, those of each
element's owner count.

    trace of a write           found by
    a version counter          `Appearance.take_written`, at no cost
    another tensor as `.data`  `Appearance.take_new_data`, by its address
    none (through `.data`)     `ParameterBucket.take_hidden_writes`, which compares values; only after the user read `.data`
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.parameters.appearance import Appearance
from zeroshard.parameters.context import Context
from zeroshard.parameters.parameter_bucket import InCpuMemory, ParameterBucket, ShardedAway
from zeroshard.storage.buffers import FlatBuffer


class Writes:
    """The writes to one unit's parameters. Its methods need unsharded parameters, except where they say otherwise.

    Args:
        away: the place of parameters that are not unsharded; None if they never leave.
        is_cut: the parameters are divided over the ranks of another dimension, instead of the same on all of these.

    Attributes:
        found: the parameters that the user wrote since `take_owners`, by index.
    """

    def __init__(
        self, appearance: Appearance, flat: FlatBuffer, buckets: Sequence[ParameterBucket],
        away: ShardedAway | InCpuMemory | None, context: Context, *, is_cut: bool, trainable: bool,
    ) -> None:  # fmt: skip
        self._appearance = appearance
        self._flat = flat
        self._buckets = buckets
        self._cpu = away if isinstance(away, InCpuMemory) else None
        self._is_cut = is_cut
        self._trainable = trainable
        self._others = context.others
        self._live = context.live
        self._sharded_at_rest = context.policy.parameters.sharded
        self._owner_gathers = context.policy.optimizer.sharded and context.others.world_size == 1
        """Each step gathers the owners' values over all ranks that have these parameters."""
        self._masters_wait = False
        """Parameters were written while master weights were parked."""
        self.found: set[int] = set()

    def find(self, *, owners_follow: bool) -> None:
        """Add the user's writes on this rank to `found`, and copy them to where the parameters rest.

        Args:
            owners_follow: every rank asks, so that all agree on what was written. A sharded optimizer looks for writes through
                `.data` later, once a step: its owner's values are gathered after the update in any case.
        """
        new = self._appearance.take_written()
        if new and not owners_follow:  # else the owners' values come first: a master weight would lose digits
            self._take_rows()
        # What is whole on several ranks of another dimension must be found while these can still agree on it.
        is_found_later = owners_follow and self._owner_gathers
        if not new and not is_found_later and self._may_be_hidden and not self._live.parked:
            for bucket in self._buckets:
                if bucket.take_hidden_writes():
                    self.found |= {piece.index for piece in bucket.layout.pieces}
        self.found |= new

    @property
    def _may_be_hidden(self) -> bool:
        """Whether `data` was read, so that writes may leave no trace. Parameters of a user's own class cannot record reads."""
        return self._live.data_was_read or not self._appearance.tells_readers

    def _take_rows(self) -> None:
        """Copy unsharded values to the slots and the master weights. Parked master weights get them in `end_parking`."""
        for bucket in self._buckets:
            bucket.take_rows(masters=not self._live.parked)
        self._masters_wait |= bool(self._live.parked)

    def end_parking(self) -> None:
        """Update master weights that were parked while parameters were written. The parameters may be sharded."""
        if self._masters_wait:
            self._masters_wait = False
            for bucket in self._buckets:
                bucket.take_rests()

    def take_to_rest(self) -> None:
        """Copy what the user may have written to where the parameters rest."""
        if self._sharded_at_rest:
            if self._appearance.take_written():
                self._take_rows()
            return
        if self._trainable:
            self.find(owners_follow=False)
        self._appearance.take_new_data()
        if self._cpu is None:
            return
        for bucket in self._buckets:
            bucket.take_own_row()
        if not self._trainable:
            self._cpu.slot.write(self._flat.tensor)

    def take_owners(self) -> None:
        """Give all ranks the owner's value of each element, after the user wrote on any rank. Every rank must call it."""
        self._appearance.take_written()
        self.found.clear()
        self.outdate_cpu_copy()
        for bucket in self._buckets:
            bucket.take_owners_rows()
            self._take_first_replica(bucket)
            bucket.take_rows()
            bucket.take_owners_masters(None if self._is_cut else self._others)

    def take_from(self, source: int) -> None:
        """Give rank `source`'s values to all ranks. Every rank must call it."""
        self.outdate_cpu_copy()
        self._appearance.take_written()  # what was given as `.data` goes into the rows first
        for bucket in self._buckets:
            self._take_first_replica(bucket)
            bucket.take_parameters(source)

    def _take_first_replica(self, bucket: ParameterBucket) -> None:
        """Broadcast whole parameters over the other dimensions, from the first rank of these."""
        if not self._is_cut:
            self._others.broadcast(bucket.rows)

    def take_masters(self, *, regather: bool) -> None:
        """Update the parameters from master weights that were set. Every rank must call it.

        Args:
            regather: the unsharded parameters, too. Without it they may be sharded.
        """
        self.outdate_cpu_copy()
        for bucket in self._buckets:
            bucket.take_masters(regather=regather)

    def outdate_cpu_copy(self) -> None:
        """Record that what rests in CPU memory, if anything, is no longer current. The parameters may be sharded."""
        if self._cpu is not None:
            self._cpu.is_current = False

    def take_since(self, versions: Sequence[int]) -> set[int]:
        """Return the parameters written since `versions`. If sharded at rest, return all and undo the writes.

        Every rank must call it.
        """
        replaced = self._appearance.take_new_data()
        if replaced and not self._sharded_at_rest:
            self.found |= replaced
            self._take_rows()
        changed = [bucket.differs_from_rest() for bucket in self._buckets]  # every rank gets the same answers
        now = self._appearance.versions()
        written = replaced | {index for index, version in enumerate(now) if version != versions[index]}
        if self._sharded_at_rest:
            self._appearance.take_written()
        for bucket, is_changed in zip(self._buckets, changed, strict=True):
            if is_changed:
                bucket.unshard()
                bucket.wait_unsharded()
        return set(range(len(versions))) if any(changed) else written
