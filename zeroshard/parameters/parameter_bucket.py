"""The bytes of parameters: the shard at rest on this rank, and the copies from it to the unsharded rows and back.

Which tensors exist, for a bucket of n elements on one of W ranks (S = n / W):

    rows       [W, S]  the unsharded parameters; storage belongs to the unit's flat buffer
    resting    [B * S] where they are sharded at rest, the block of rows that rests on this rank: its own row, or, where each host
                       holds the whole (`Residency.per_host`), a row for each of the B hosts, of which one is its own to update

and, for each shard that this rank updates, two slots of [S], each in the storage that the policy names: what rests, and the
master weights. They are one slot where the dtype allows, and where the policy keeps only master weights (`rests_as_masters`):
then these are rounded on their way to the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor

from zeroshard.collectives.base import CHUNK_NUMEL, Collectives, Work
from zeroshard.errors import StorageError
from zeroshard.parameters.at_rest import make_rests
from zeroshard.parameters.context import BucketSpec, Context, Live
from zeroshard.storage.base import Slot
from zeroshard.storage.buffers import FlatBuffer
from zeroshard.storage.transfers import LANDED, Transfer


class ParameterBucket:
    """See the module's docstring.

    Args:
        rows: [W, S] of the unit's flat buffer.
        whole: [n], the bucket's initial content in the master dtype, the same on all ranks.
        whole_at_rest: of the unit, in CPU memory, where its unsharded parameters rest between steps.
    """

    def __init__(
        self, spec: BucketSpec, rows: Tensor, whole: Tensor, whole_at_rest: Slot | None, context: Context
    ) -> None:
        self.number = spec.number
        self.label = spec.label
        self.layout = spec.layout
        self.trainable = spec.trainable
        self.rows = rows
        self.storages = context.storages
        self._policy = context.policy
        self._collectives = context.collectives
        self._pool = context.pool
        self._accelerator = context.storages.accelerator
        at_rest = make_rests(spec, rows, whole, whole_at_rest, context)
        self._holders = at_rest.holders
        self._replicas = at_rest.replicas
        self._blocks = at_rest.blocks
        self._own_block = at_rest.own_block
        self._resting = at_rest.block
        self._rows_are_at_rest = at_rest.are_rows
        self._held = at_rest.held
        self.rests = at_rest.rests
        self.masters = at_rest.masters
        # On their way to the rows: this rank's part from where it rests, and the other ranks' parts.
        self._reloading: Transfer | None = None
        self._gathering: Work | None = None
        self._spreading: Work | None = None
        """The other hosts' rows of the block, on their way to where it rests."""

    # ------------------------------------------------------------------ together

    def unshard(self, make_room: Callable[[], None] | None = None) -> None:
        """Start to all-gather the parameters for their next use.

        Args:
            make_room: gives the rows their storage when they need it, which may be as late as in `wait_unsharded`. Default: they
                have it.
        """
        if self._resting is not None and self._gathering is None:
            self._bring("all-gather of", make_room)

    def sync(self) -> None:
        """Start to send this rank's updated shard to the ranks that hold a copy of it."""
        if self._resting is None and self._policy.optimizer.sharded:
            self._bring("all-gather of updated")
        self._spread("updated")

    def _bring(self, what: str, make_room: Callable[[], None] | None = None) -> None:
        self.settle()

        def prepare() -> None:
            if make_room is not None:
                make_room()
            self.reload()

        own: Tensor | None = None
        if self._resting is not None and self._resting.dtype == self.rows.dtype:  # else it is rounded into its row
            own = self._resting.memory_in(self._accelerator)
        self._gathering = self._holders.all_gather(self._blocks, self.number, f"{what} {self.label}", own, prepare)

    def _spread(self, what: str) -> None:
        """Start to exchange changed rows of the block with the ranks of other hosts that hold the same block."""
        if self._resting is None or self._replicas is None:
            return
        self.settle()
        label = f"all-gather across hosts of {what} {self.label}"
        with self._resting.borrowed(self._accelerator, self._pool, write=True) as block:
            rows = block.view(self._replicas.world_size, -1)
            spreading = self._replicas.all_gather(rows, self.number, label)
            if self._resting.memory_in(self._accelerator) is None:
                spreading.wait()  # scratch, which goes on to where it rests
            else:
                self._spreading = spreading

    def settle(self) -> None:
        """Block until updates of other hosts have arrived in the block at rest."""
        if self._spreading is not None:
            self._spreading.wait()  # which raises again where it did before
            self._spreading = None

    def reload(self) -> None:
        """Set this rank's row to the values at rest, in whichever memory these are."""
        if not self._rows_are_at_rest:
            self.start_reload()
            self._finish_reload()

    def start_reload(self) -> None:
        """Start to copy this rank's part from its slot at rest to its row."""
        if self._reloading is None:
            self.settle()
            self._reloading = (self._resting or self.own_rest).read(self._own_block)

    def _finish_reload(self) -> None:
        if self._reloading is not None:
            reloading = self._reloading
            self._reloading = None
            reloading.wait(self.rows.device)

    def abandon_unshard(self) -> None:
        """Abandon a failed gather of the unit: afterwards no transfer is in flight."""
        with suppress(StorageError):
            self._finish_reload()
        if self._gathering is not None:
            self._gathering.abandon()
        self._reloading = self._gathering = None

    def prefetch(self) -> None:
        """Start to read the shard at rest, which is needed soon."""
        if self._resting is not None:
            self._resting.prefetch()

    def wait_unsharded(self) -> None:
        """Block until what `unshard` or `sync` started has arrived."""
        if self._gathering is not None:
            self._gathering.wait()  # which raises again where it did before
            self._gathering = None

    @property
    def gathering(self) -> Work | None:
        """The all-gather of the parameters that is in flight."""
        return self._gathering

    # ------------------------------------------------------------------ who owns a written value

    def take_rows(self, *, masters: bool = True) -> None:
        """Copy unsharded parameters that were written on this rank to the slots and, with `masters`, to the master weights."""
        self.settle()
        if not self._rows_are_at_rest:
            for rank, rest in self._held.items():
                if rest.dtype == self.rows.dtype:
                    rest.write(self.rows[rank]).wait(self.rows.device)
                else:
                    self._take_row(rest, self.rows[rank])
        if masters:
            for rank, master in self.masters.items():
                if master is not self.rests[rank]:
                    self._take_row(master, self.rows[rank])

    def take_rests(self) -> None:
        """Copy the parameters at rest here to the master weights."""
        for rank, master in self.masters.items():
            if master is not self.rests[rank]:
                with self.rests[rank].borrowed(self._accelerator, self._pool) as row:
                    self._take_row(master, row)

    def _take_row(self, master: Slot, new: Tensor) -> None:
        """Write new values to a master weight, which keeps its digits wherever its rounded value equals the new one."""
        with master.borrowed(self._accelerator, self._pool, write=True) as old:
            torch.where(new == old.to(new.dtype), old, new.to(old.dtype), out=old)

    def take_hidden_writes(self) -> bool:
        """Compare the parameters with separate master weights, and update these where they differ. Return whether any did.

        This finds writes that no version counter shows. It reads both, and an accelerator ends its work first.
        """
        found = False
        for rank, master in self.masters.items():
            if master is self.rests[rank]:
                continue
            with master.borrowed(self._accelerator, self._pool) as values:
                is_same = _shows(self.rows[rank], values)
            if not is_same:
                self._take_row(master, self.rows[rank])
                found = True
        return found

    def take_own_row(self) -> None:
        """Save unsharded parameters that are their own master weights, so that the user's writes persist when they leave."""
        for rank, master in self.masters.items():
            if master is self.rests[rank]:
                master.write(self.rows[rank])

    def take_parameters(self, source: int) -> None:
        """Broadcast rank `source`'s unsharded parameters to all ranks, and store them at rest and in the master weights."""
        self._collectives.broadcast(self.rows, source)
        self.take_rows()

    def take_owners_rows(self) -> None:
        """Give every rank the owner's value of each element, after writes to unsharded parameters on any ranks.

        Every rank must call it.
        """
        self._collectives.all_gather(self.rows, self.number, f"all-gather of written {self.label}").wait()

    def take_owners_masters(self, replicas: Collectives | None) -> None:
        """Take each master weight beside the parameters from the rank that owns it, where several ranks update it.

        Another rank may have taken a written row into its own masters already, and so have lost their digits. Every rank must
        call it.

        Args:
            replicas: the ranks of other dimensions, where these hold the same parameters.
        """
        if not self.has_copies:
            return
        for shard, master in self.masters.items():
            with master.borrowed(self._accelerator, self._pool, write=True) as values:
                if not self._policy.optimizer.sharded:
                    self._collectives.broadcast(values, self._collectives.owner(shard))
                if replicas is not None:
                    replicas.broadcast(values)

    def take_masters(self, *, regather: bool) -> None:
        """Copy master weights that were set to the parameters at rest and, with `regather`, to the unsharded ones."""
        for rank, master in self.masters.items():
            if master is not self.rests[rank]:
                with master.borrowed(self._accelerator, self._pool) as values:
                    # no test can miss this wait: `Slot.write` asks for it. What rests beside master weights is of another
                    # dtype, so a cast copy is sent, and nothing reads the scratch that is released next.
                    self.rests[rank].write(values).wait(values.device)
        self._spread("set")
        if regather:
            self._bring("all-gather of set")
            self.wait_unsharded()

    def differs_from_rest(self) -> bool:
        """Return whether unsharded parameters differ from those at rest on any rank. If sharded, every rank must call it."""
        if self._resting is None:
            return False
        self.settle()
        with self._resting.borrowed(self._accelerator, self._pool) as at_rest:
            if at_rest.dtype == self.rows.dtype:
                same = torch.equal(self._own_block.view(torch.uint8), at_rest.view(torch.uint8))
            else:  # a zero that was written keeps its master's digits, and so its master's sign
                same = torch.equal(self._own_block, at_rest.to(self.rows.dtype)) or _shows(self._own_block, at_rest)
        return any(data != b"\1" for data in self._collectives.exchange(bytes([same]), f"changes of {self.label}"))

    # ------------------------------------------------------------------ what lives

    @property
    def own_rest(self) -> Slot:
        """Return this rank's shard of the parameters at rest."""
        return self.rests[self.own_shard]

    @property
    def own_shard(self) -> int:
        """The number of this rank's shard."""
        return self._collectives.shard

    @property
    def is_sharded_at_rest(self) -> bool:
        """Whether this rank keeps only a part of the parameters at rest."""
        return self._resting is not None

    @property
    def has_copies(self) -> bool:
        """Whether the master weights are tensors separate from the parameters at rest."""
        return any(master is not self.rests[rank] for rank, master in self.masters.items())

    def tensors(self, kind: str) -> list[Tensor]:
        """Return the tensors at rest, "parameters" or "master", that are in the accelerator's memory."""
        if kind == "parameters":
            whole = [] if self.is_sharded_at_rest else [self.rows]
            return whole + self._in_memory(self.rests.values())
        return self._in_memory(self.masters.values())

    def _in_memory(self, slots: Iterable[Slot]) -> list[Tensor]:
        found = [slot.memory_in(self._accelerator) for slot in slots]
        return [memory for memory in found if memory is not None]


def _shows(row: Tensor, master: Tensor) -> bool:
    """Return whether a row equals its master weights, rounded to its dtype. NaN equals a NaN of the same bits."""
    parts = zip(row.split(CHUNK_NUMEL), master.split(CHUNK_NUMEL), strict=True)
    return all(torch.equal(shown.view(torch.int16), kept.to(row.dtype).view(torch.int16)) for shown, kept in parts)


class Away(ABC):
    """The way of parameters into the flat buffer and out of it."""

    @abstractmethod
    def start(self) -> None:
        """Start to bring the parameters into the flat buffer."""

    def land(self) -> None:
        """Block until the transfers of `start` have arrived, except all-gathers, which the buckets wait for."""
        return

    @abstractmethod
    def leave(self, *, changed: bool) -> None:
        """Copy the parameters to their place at rest if they `changed` since `start`, and free the storage."""


@final
class ShardedAway(Away):
    """The way of parameters that are sharded between uses."""

    def __init__(
        self, flat: FlatBuffer, buckets: Sequence[ParameterBucket], live: Live, collectives: Collectives
    ) -> None:
        self._flat = flat
        self._buckets = buckets
        self._live = live
        self._collectives = collectives
        live.numel += flat.tensor.numel()

    def start(self) -> None:
        try:
            with self._collectives.together():
                for bucket in self._buckets:
                    bucket.unshard(self._make_room)
        except BaseException:
            for bucket in self._buckets:
                bucket.abandon_unshard()
            raise
        self._live.numel += self._flat.tensor.numel()

    def _make_room(self) -> None:
        if self._flat.nbytes:  # an earlier bucket's all-gather has asked
            return
        self._flat.allocate()
        for bucket in self._buckets:
            bucket.start_reload()

    def leave(self, *, changed: bool) -> None:
        assert not changed  # each bucket took its own row before
        self._flat.free()
        self.dismiss()

    def dismiss(self) -> None:
        """Stop counting the unsharded memory as live."""
        self._live.numel -= self._flat.tensor.numel()


@final
class InCpuMemory(Away):
    """The way of parameters that are whole in CPU memory between steps. A read copies them back without other ranks.

    Attributes:
        slot: where they rest.
        is_current: what rests there is what the parameters were when the step ended.
    """

    def __init__(self, flat: FlatBuffer, slot: Slot) -> None:
        self._flat = flat
        self.slot = slot
        self.is_current = False
        self._reloading: Transfer = LANDED

    def start(self) -> None:
        self._flat.allocate()
        self._reloading = self.slot.read(self._flat.tensor)

    def land(self) -> None:
        self._reloading.wait(self._flat.tensor.device)
        self._reloading = LANDED

    def leave(self, *, changed: bool) -> None:
        if changed:
            self.slot.write(self._flat.tensor)
            self.is_current = True
        self.slot.wait(self._flat.tensor.device)  # the next user of the memory comes after what is copied from it
        self._flat.free()
