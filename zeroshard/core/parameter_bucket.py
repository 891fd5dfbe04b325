"""Owns the bytes of parameters: the shard at rest on this rank, and the copies from it to the unsharded rows and back.

The tensors of a bucket of n elements on one of W ranks (S = n / W):

    rows       [W, S]  the unsharded parameters, a view of the unit's flat buffer
    block      [B * S] the rows that rest on this rank, if parameters are sharded at rest: its own row (B = 1). With
                       `Residency.per_host`, a row for each of the B hosts, of which this rank updates one

Each shard that this rank updates also has two slots of [S], in the storages that the policy names: the stored
parameters, and the master weights. Both are one slot if their dtypes are equal, or if parameters rest as master weights
(`Policy.keeps_masters_only`). These are then rounded on their way to the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from zeroshard.core.context import Context
from zeroshard.core.layout import BucketLayout
from zeroshard.core.storage.base import MemoryStorage, Slot, Storage
from zeroshard.core.storage.buffers import FlatBuffer
from zeroshard.core.storage.transfers import LANDED, Transfer
from zeroshard.core.transport.base import CHUNK_NUMEL, Collectives, Work
from zeroshard.errors import StorageError
from zeroshard.policy import DTypes
from zeroshard.torch_private import labelled


class ParameterBucket:
    """The parameters of one bucket (see the module's docstring).

    Args:
        number: the bucket's number in the model, the same on every rank.
        label: for errors and tables.
        rows: [W, S] of the unit's flat buffer.
        whole: [n], the bucket's initial content in the master dtype, the same on all ranks.
        whole_at_rest: the unit's slot in CPU memory, where its unsharded parameters rest.

    Attributes:
        block: the slot of the block at rest; None where the parameters are not sharded at rest.
        rests: the slots of the shards that this rank updates, by number.
        masters: the slots of their master weights; the same slot where one serves as both.
        copies: the slots in `masters` that are separate from the stored parameters' slots.
        gathering: the all-gather of the parameters that is in flight.
    """

    def __init__(
        self, number: int, label: str, layout: BucketLayout, dtypes: DTypes, rows: Tensor, whole: Tensor,
        whole_at_rest: Slot | None, context: Context, *, trainable: bool,
    ) -> None:  # fmt: skip
        self.number = number
        self.label = label
        self._label_of_wait = f"wait for all-gather of {label}"
        self.layout = layout
        self.rows = rows
        self.storages = context.storages
        self._policy = context.policy
        self._collectives = context.collectives
        self._pool = context.pool
        self._accelerator = context.storages.accelerator
        self.own_shard = self._collectives.shard
        # The parameters at rest are cut over the holders. The replicas hold the same block, and each updates a row of it.
        self._holders = self._collectives.inside if self._policy.parameters.per_host else self._collectives
        self._replicas = None if self._holders is self._collectives else self._collectives.across
        self._blocks = rows.view(self._holders.world_size, -1)
        self._own_block = self._blocks[self._holders.shard]
        whole = whole.view(rows.shape)
        rows.copy_(whole)
        block: Slot | None = None
        if trainable and dtypes.master != dtypes.param and self._policy.keeps_masters_only:
            block = self._new_master(whole[self.own_shard], dtypes.master)
        elif self._policy.parameters.sharded:
            block = self.storages.parameter_slot(self._policy, label, self._own_block.numel(), dtypes.param)
            block.write(self._own_block)
            block.wait()
        self.block = block
        self._rests_in_rows = block is None and whole_at_rest is None
        self.rests = self._make_rests(whole_at_rest)
        self.masters: dict[int, Slot] = {}
        if trainable:
            for shard, rest in self.rests.items():
                # In fp32 the shard at rest is the master: a second copy of the weights would waste memory.
                is_master = rest.dtype == dtypes.master
                self.masters[shard] = rest if is_master else self._new_master(whole[shard], dtypes.master)
        self.copies = {shard: master for shard, master in self.masters.items() if master is not self.rests[shard]}
        self._reloading: Transfer | None = None
        """The copy, in flight, of this rank's part from its slot at rest to its rows."""
        self.gathering: Work | None = None
        self._spreading: Work | None = None
        """The all-gather of the rows of the block that other hosts have updated."""

    def _new_master(self, values: Tensor, dtype: torch.dtype) -> Slot:
        home = self.storages.optimizer(self._policy)
        master = home.slot(f"master weights of {self.label}", self.layout.shard_numel, dtype)
        master.write(values)
        # no test needs this wait: it bounds memory, and orders nothing. Every reader of the slot waits for the write,
        # which keeps its source. Without this wait the whole values of many units would be alive at start-up.
        master.wait()
        return master

    def _make_rests(self, whole_at_rest: Slot | None) -> dict[int, Slot]:
        if self.block is not None:
            if self._replicas is None:
                return {self.own_shard: self.block}
            place: MemoryStorage = self._accelerator
            if self.block.memory_in(place) is None:
                place = self.storages.host
            memory = self.block.memory_in(place)
            assert memory is not None
            hosts = self._replicas.world_size
            own = memory.view(hosts, -1)[self.own_shard - self._holders.shard * hosts]
            return {self.own_shard: place.around(self.label, own, self.block)}
        shards = [self.own_shard] if self._policy.optimizer.sharded else range(len(self.rows))
        if whole_at_rest is None:
            return {shard: self._accelerator.around(self.label, self.rows[shard]) for shard in shards}
        host = self.storages.host
        memory = whole_at_rest.memory_in(host)
        assert memory is not None
        at_rest = memory[self.layout.start : self.layout.stop].view_as(self.rows)
        return {shard: host.around(self.label, at_rest[shard], whole_at_rest) for shard in shards}

    def unshard(self) -> None:
        """Start to all-gather the parameters into the rows, which have memory, for their next use."""
        if self.block is not None and self.gathering is None:
            self._bring("all-gather of")

    def sync(self) -> None:
        """Start to send this rank's updated shard to the ranks that hold a copy of it."""
        if self.block is None and self._policy.optimizer.sharded:
            self._bring("all-gather of updated")
        self._spread("updated")

    def _bring(self, what: str) -> None:
        self.settle()
        if not self._rests_in_rows:
            self.start_reload()
            self._finish_reload()
        label = f"{what} {self.label}"
        with labelled(label):
            self.gathering = self._holders.all_gather(self._blocks, self.number, label)

    def _spread(self, what: str) -> None:
        """Start to exchange changed rows of the block with the ranks of other hosts that hold the same block."""
        if self.block is None or self._replicas is None:
            return
        self.settle()
        label = f"all-gather across hosts of {what} {self.label}"
        with self.block.borrowed(self._accelerator, self._pool, write=True) as block:
            spreading = self._replicas.all_gather(block.view(self._replicas.world_size, -1), self.number, label)
            if self.block.memory_in(self._accelerator) is None:
                spreading.wait()  # the block is scratch, whose content is then written to its place
            else:
                self._spreading = spreading

    def settle(self) -> None:
        """Block until updates of other hosts have arrived in the block at rest, if any are in flight."""
        if self._spreading is not None:
            self._spreading.wait()  # a wait that failed raises its error again
            self._spreading = None

    def start_reload(self) -> None:
        """Start to copy this rank's part from its slot at rest to its rows."""
        if self._reloading is None:
            self.settle()
            self._reloading = (self.block or self.rests[self.own_shard]).read(self._own_block)

    def _finish_reload(self) -> None:
        if self._reloading is not None:
            reloading = self._reloading
            self._reloading = None
            reloading.wait(self.rows.device)

    def abandon_unshard(self) -> None:
        """Abandon a failed gather of the unit: afterwards no transfer is in flight."""
        with suppress(StorageError):
            self._finish_reload()
        if self.gathering is not None:
            self.gathering.abandon()
        self._reloading = self.gathering = None

    def wait_unsharded(self) -> None:
        if self.gathering is not None:
            with labelled(self._label_of_wait):
                self.gathering.wait()  # a wait that failed raises its error again
            self.gathering = None

    # ------------------------------------------------------------------ the user's writes

    def save_rows(self, *, masters: bool = True) -> None:
        """Copy this rank's rows of the unsharded parameters to their slots and, with `masters`, to the master weights."""
        self.settle()
        if self.block is not None:
            self._save_at_rest(self.block, self._own_block)
        if not self._rests_in_rows:
            for rank, rest in self.rests.items():
                if rest is not self.block:  # a part of the block is saved again, so that its slot has a new version
                    self._save_at_rest(rest, self.rows[rank])
        if masters:
            for rank, master in self.copies.items():
                self._save_row(master, self.rows[rank])

    def _save_at_rest(self, rest: Slot, new: Tensor) -> None:
        if rest.dtype == new.dtype:
            rest.write(new).wait(new.device)
        else:
            self._save_row(rest, new)

    def masters_from_rests(self) -> None:
        """Copy this rank's stored parameters to the master weights."""
        for rank, master in self.copies.items():
            with self.rests[rank].borrowed(self._accelerator, self._pool) as row:
                self._save_row(master, row)

    def _save_row(self, master: Slot, new: Tensor) -> None:
        """Write new values to master weights. A weight keeps its digits if its rounded value equals the new value."""
        with master.borrowed(self._accelerator, self._pool, write=True) as old:
            torch.where(new == old.to(new.dtype), old, new.to(old.dtype), out=old)

    def save_hidden_writes(self) -> bool:
        """Compare the parameters with separate master weights and update these where they differ. Return whether any did.

        This finds writes that no version counter shows. The comparison reads both, so the host waits for an accelerator.
        """
        found = False
        for rank, master in self.copies.items():
            with master.borrowed(self._accelerator, self._pool) as values:
                is_same = _shows(self.rows[rank], values)
            if not is_same:
                self._save_row(master, self.rows[rank])
                found = True
        return found

    def broadcast_masters(self, replicas: Collectives | None) -> None:
        """Copy separate master weights from the ranks that own them to all ranks that update them.

        A write to a row on another rank may have rounded that rank's master weights. Every rank must call it. `replicas` are the
        ranks of another mesh dimension, if they hold the same parameters.
        """
        for shard, master in self.copies.items():
            with master.borrowed(self._accelerator, self._pool, write=True) as values:
                if not self._policy.optimizer.sharded:
                    self._collectives.broadcast(values, self._collectives.owner(shard))
                if replicas is not None:
                    replicas.broadcast(values)

    def load_masters(self, *, regather: bool) -> None:
        """Copy newly set master weights to the parameters at rest and, with `regather`, to the unsharded parameters."""
        for rank, master in self.copies.items():
            with master.borrowed(self._accelerator, self._pool) as values:
                # no test needs this wait: `Slot.write` asks for it. Parameters with separate master weights have
                # another dtype, so a cast copy is sent, and nothing reads the scratch that is released next.
                self.rests[rank].write(values).wait(values.device)
        self._spread("set")
        if regather:
            self._bring("all-gather of set")
            self.wait_unsharded()

    # ------------------------------------------------------------------ live memory

    def tensors(self, kind: str) -> list[Tensor]:
        """Return the tensors at rest, "parameters" or "master", that are in the accelerator's memory."""
        if kind == "master":
            return memories_in(self._accelerator, self.masters.values())
        found = memories_in(self._accelerator, self.rests.values())
        if self.block is None:
            found.insert(0, self.rows)
        return found


def memories_in(storage: Storage, slots: Iterable[Slot]) -> list[Tensor]:
    """Return the memory of those slots that lie in the memory of `storage`."""
    found = [slot.memory_in(storage) for slot in slots]
    return [memory for memory in found if memory is not None]


def _shows(row: Tensor, master: Tensor) -> bool:
    """Return whether a row equals its master weights, rounded to the row's dtype. A NaN equals a NaN with the same bits."""
    parts = zip(row.split(CHUNK_NUMEL), master.split(CHUNK_NUMEL), strict=True)
    return all(torch.equal(shown.view(torch.int16), kept.to(row.dtype).view(torch.int16)) for shown, kept in parts)


class InCpuMemory:
    """The place, in CPU memory, of parameters that rest whole. A read copies them back without other ranks.

    Attributes:
        slot: their slot.
        is_current: whether the slot has the parameters' present values.
    """

    def __init__(self, flat: FlatBuffer, slot: Slot) -> None:
        self._flat = flat
        self.slot = slot
        self.is_current = False
        self._reloading: Transfer = LANDED

    def start(self) -> None:
        """Start to copy the parameters into the flat buffer, which has memory."""
        self._reloading = self.slot.read(self._flat.tensor)

    def land(self) -> None:
        """Wait until the parameters are in the flat buffer."""
        self._reloading.wait(self._flat.tensor.device)
        self._reloading = LANDED

    def keep(self) -> None:
        """Copy the parameters to their place, unless it has them. The flat buffer may be freed afterwards."""
        if not self.is_current:
            self.slot.write(self._flat.tensor)
        self.slot.wait(self._flat.tensor.device)  # the next use of the memory comes after the copy from it
        self.is_current = True
