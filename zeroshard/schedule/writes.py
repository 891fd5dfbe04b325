"""Owns the record of the last writer to a unit's parameters: the optimizer, or the user, on this rank or on another.

The optimizer writes to shards, and the user to unsharded parameters. The user's values go to the shards, and to master
weights, before the optimizer steps and before the unsharded values leave. Where ranks wrote different values, the
values of each element's owner count.

    trace of a write           found by
    a version counter          `Appearance.collect_written`, at no cost
    another tensor as `.data`  `Appearance.adopt_new_data`, by its address, shape and strides
    none (through `.data`)     `ParameterBucket.save_hidden_writes`, which compares values; only if the user may have read `.data`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroshard.parameters.appearance import Appearance
from zeroshard.parameters.context import Context
from zeroshard.parameters.parameter_bucket import InCpuMemory, ParameterBucket
from zeroshard.storage.buffers import FlatBuffer


@dataclass(eq=False)
class Writes:
    """The writes to one unit's parameters. Its methods need unsharded parameters, unless their docstrings say otherwise.

    Attributes:
        cpu: the place of parameters that rest whole in CPU memory; None if they do not.
        is_cut: whether the parameters are divided over the ranks of `context.others`, see `Unit`.
        found: the parameters that the user has written to since the last call of `spread_owners_values`, by index.
        masters_wait: whether parameters were written while master weights were parked.
    """

    appearance: Appearance
    flat: FlatBuffer
    buckets: Sequence[ParameterBucket]
    cpu: InCpuMemory | None
    context: Context
    is_cut: bool
    trainable: bool
    found: set[int] = field(default_factory=set)
    masters_wait: bool = False

    def look(self, *, scans: bool) -> bool:
        """Add the user's writes on this rank to `found`. Return whether any left a trace.

        Args:
            scans: whether to compare values if no write left a trace, and the user may have read `data`. (A parameter of a
                user's own class does not record such reads.)
        """
        new = self.appearance.collect_written()
        may_be_hidden = self.context.live.data_was_read or not self.appearance.tells_readers
        if scans and not new and may_be_hidden and not self.context.live.parked:
            for bucket in self.buckets:
                if bucket.save_hidden_writes():
                    self.found |= {piece.index for piece in bucket.layout.pieces}
        self.found |= new
        if self.found:
            self.outdate_cpu_copy()
        return bool(new)

    def save_traced(self) -> None:
        """Copy values whose writes left a trace to the parameters' place at rest, and to the master weights."""
        if self.look(scans=False):
            self._save_rows()

    def _save_rows(self) -> None:
        """Copy unsharded values to the slots and the master weights. Parked master weights get them in `end_parking`."""
        for bucket in self.buckets:
            bucket.save_rows(masters=not self.context.live.parked)
        self.masters_wait |= bool(self.context.live.parked)

    def end_parking(self) -> None:
        """Update master weights that were parked while parameters were written. The parameters may be sharded."""
        if self.masters_wait:
            self.masters_wait = False
            for bucket in self.buckets:
                bucket.masters_from_rests()

    def write_back(self) -> None:
        """Copy values that the user may have written: to the parameters' place at rest, and to the master weights."""
        if self.context.policy.parameters.sharded:
            if self.appearance.collect_written():
                self._save_rows()
            return
        if self.trainable and self.look(scans=True):
            self._save_rows()
        self.appearance.adopt_new_data()
        if self.cpu is None:
            return
        for bucket in self.buckets:
            # Parameters that are their own master weights are stored, so that the user's writes persist when the buffer is freed.
            for shard, master in bucket.masters.items():
                if master is bucket.rests[shard]:
                    master.write(bucket.rows[shard])
        if not self.trainable:
            self.cpu.slot.write(self.flat.tensor)

    def spread_owners_values(self) -> None:
        """Give all ranks the owner's value of each element, after the user wrote on any rank. Every rank must call it."""
        self.appearance.collect_written()
        self.found.clear()
        self.outdate_cpu_copy()
        for bucket in self.buckets:
            label = f"all-gather of written {bucket.label}"
            self.context.collectives.all_gather(bucket.rows, bucket.number, label).wait()
            self._broadcast_first_replica(bucket)
            bucket.save_rows()
            bucket.broadcast_masters(None if self.is_cut else self.context.others)

    def broadcast_from(self, source: int) -> None:
        """Give rank `source`'s values to all ranks. Every rank must call it."""
        self.outdate_cpu_copy()
        self.appearance.collect_written()  # tensors that were assigned as `.data` are copied into the rows first
        for bucket in self.buckets:
            self._broadcast_first_replica(bucket)
            self.context.collectives.broadcast(bucket.rows, source)
            bucket.save_rows()

    def _broadcast_first_replica(self, bucket: ParameterBucket) -> None:
        """Broadcast whole parameters over the other dimensions, from the first rank of these."""
        if not self.is_cut:
            self.context.others.broadcast(bucket.rows)

    def load_masters(self, *, regather: bool) -> None:
        """Update the parameters from master weights that were set. Every rank must call it.

        Args:
            regather: whether to update the unsharded parameters, too. If not, the parameters may be sharded.
        """
        self.outdate_cpu_copy()
        for bucket in self.buckets:
            bucket.load_masters(regather=regather)

    def outdate_cpu_copy(self) -> None:
        """Record that the values in CPU memory, if there are any, are no longer current. The parameters may be sharded."""
        if self.cpu is not None:
            self.cpu.is_current = False

    def written_since(self, versions: Sequence[int]) -> set[int]:
        """Return the parameters that were written to since `versions`, by index. Every rank must call it.

        If parameters are sharded at rest, and values of a bucket changed on any rank, return all of the unit's parameters, and
        restore the bucket's values.
        """
        replaced = self.appearance.adopt_new_data()
        if replaced and not self.context.policy.parameters.sharded:
            self.found |= replaced
            self._save_rows()
        changed = [bucket.differs_from_rest() for bucket in self.buckets]  # every rank gets the same answers
        now = self.appearance.versions()
        written = replaced | {index for index, version in enumerate(now) if version != versions[index]}
        if self.context.policy.parameters.sharded:
            self.appearance.collect_written()
        for bucket, is_changed in zip(self.buckets, changed, strict=True):
            if is_changed:
                bucket.unshard()
                bucket.wait_unsharded()
        return set(range(len(versions))) if any(changed) else written
