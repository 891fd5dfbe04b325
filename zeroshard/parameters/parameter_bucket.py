"""The bytes of parameters: the shard at rest on this rank, and the copies from it to the unsharded rows and back.

Which tensors exist, for a bucket of n elements on one of W ranks (S = n / W):

    rows       [W, S]  the unsharded parameters; storage belongs to the unit's flat buffer
    resting    [B * S] where they are sharded at rest, the block of rows that rests on this rank: its own row, or, where each host
                       holds the whole (`Residency.per_host`), a row for each of the B hosts, of which one is its own to update

and, for each shard that this rank updates, two slots of [S], each in the storage that the policy names: the stored
parameters, and the master weights. They are one slot where the dtype allows, and where the policy keeps only master
weights (`rests_as_masters`): then these are rounded on their way to the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from zeroshard.collectives.base import CHUNK_NUMEL, Collectives, Work
from zeroshard.errors import StorageError
from zeroshard.parameters.at_rest import make_rests
from zeroshard.parameters.context import BucketSpec, Context
from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.buffers import FlatBuffer
from zeroshard.storage.transfers import LANDED, Transfer


class ParameterBucket:
    """The parameters of one bucket, see the module's docstring.

    Args:
        rows: [W, S] of the unit's flat buffer.
        whole: [n], the bucket's initial content in the master dtype, the same on all ranks.
        whole_at_rest: the unit's slot in CPU memory, where its unsharded parameters rest between steps.
    """

    def __init__(
        self, spec: BucketSpec, rows: Tensor, whole: Tensor, whole_at_rest: Slot | None, context: Context
    ) -> None:
        self.number = spec.number
        self.label = spec.label
        self.layout = spec.layout
        self.rows = rows
        self.storages = context.storages
        self._policy = context.policy
        self._collectives = context.collectives
        self._pool = context.pool
        self._accelerator = context.storages.accelerator
        self.at_rest = make_rests(spec, rows, whole, whole_at_rest, context)
        # On their way to the rows: this rank's part from its place, and the other ranks' parts.
        self._reloading: Transfer | None = None
        self.gathering: Work | None = None
        """The all-gather of the parameters that is in flight."""
        self._spreading: Work | None = None
        """The other hosts' rows of the block, on their way to its place."""

    def unshard(self, make_room: Callable[[], None] | None = None) -> None:
        """Start to all-gather the parameters for their next use.

        Args:
            make_room: gives the rows their storage when they need it, which may be as late as in `wait_unsharded`. Default: they
                have it.
        """
        if self.at_rest.block is not None and self.gathering is None:
            self._bring("all-gather of", make_room)

    def sync(self) -> None:
        """Start to send this rank's updated shard to the ranks that hold a copy of it."""
        if self.at_rest.block is None and self._policy.optimizer.sharded:
            self._bring("all-gather of updated")
        self._spread("updated")

    def _bring(self, what: str, make_room: Callable[[], None] | None = None) -> None:
        self.settle()

        def prepare() -> None:
            if make_room is not None:
                make_room()
            if not self.at_rest.are_rows:
                self.start_reload()
                self._finish_reload()

        rest = self.at_rest
        own: Tensor | None = None
        if rest.block is not None and rest.block.dtype == self.rows.dtype:  # else it is rounded into its row
            own = rest.block.memory_in(self._accelerator)
        self.gathering = rest.holders.all_gather(rest.blocks, self.number, f"{what} {self.label}", own, prepare)

    def _spread(self, what: str) -> None:
        """Start to exchange changed rows of the block with the ranks of other hosts that hold the same block."""
        resting, replicas = self.at_rest.block, self.at_rest.replicas
        if resting is None or replicas is None:
            return
        self.settle()
        label = f"all-gather across hosts of {what} {self.label}"
        with resting.borrowed(self._accelerator, self._pool, write=True) as block:
            spreading = replicas.all_gather(block.view(replicas.world_size, -1), self.number, label)
            if resting.memory_in(self._accelerator) is None:
                spreading.wait()  # scratch, which goes on to where it rests
            else:
                self._spreading = spreading

    def settle(self) -> None:
        """Block until updates of other hosts have arrived in the resting (sharded) block."""
        if self._spreading is not None:
            self._spreading.wait()  # which raises again where it did before
            self._spreading = None

    def start_reload(self) -> None:
        """Start to copy this rank's part from its slot at rest to its row."""
        if self._reloading is None:
            self.settle()
            self._reloading = (self.at_rest.block or self.own_rest).read(self.at_rest.own_block)

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

    def prefetch(self) -> None:
        if self.at_rest.block is not None:
            self.at_rest.block.prefetch()

    def wait_unsharded(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()  # which raises again where it did before
            self.gathering = None

    # ------------------------------------------------------------------ who owns a written value

    def save_rows(self, *, masters: bool = True) -> None:
        """Copy unsharded parameters that were written on this rank to the slots and, with `masters`, to the master weights."""
        self.settle()
        if not self.at_rest.are_rows:
            for rank, rest in self.at_rest.held.items():
                if rest.dtype == self.rows.dtype:
                    rest.write(self.rows[rank]).wait(self.rows.device)
                else:
                    self._save_row(rest, self.rows[rank])
        if masters:
            for rank, master in self.at_rest.copies.items():
                self._save_row(master, self.rows[rank])

    def masters_from_rests(self) -> None:
        """Copy this rank's stored parameters to the master weights."""
        for rank, master in self.at_rest.copies.items():
            with self.at_rest.rests[rank].borrowed(self._accelerator, self._pool) as row:
                self._save_row(master, row)

    def _save_row(self, master: Slot, new: Tensor) -> None:
        """Write new values to a master weight, which keeps its digits wherever its rounded value equals the new one."""
        with master.borrowed(self._accelerator, self._pool, write=True) as old:
            torch.where(new == old.to(new.dtype), old, new.to(old.dtype), out=old)

    def save_hidden_writes(self) -> bool:
        """Compare the parameters with separate master weights, and update these where they differ. Return whether any did.

        This finds writes that no version counter shows. It reads both, and an accelerator ends its work first.
        """
        found = False
        for rank, master in self.at_rest.copies.items():
            with master.borrowed(self._accelerator, self._pool) as values:
                is_same = _shows(self.rows[rank], values)
            if not is_same:
                self._save_row(master, self.rows[rank])
                found = True
        return found

    def save_own_row(self) -> None:
        """Save unsharded parameters that are their own master weights, so that the user's writes persist when they leave."""
        for rank, master in self.at_rest.masters.items():
            if master is self.at_rest.rests[rank]:
                master.write(self.rows[rank])

    def gather_rows(self) -> None:
        """Give every rank the owner's value of each element, after writes to unsharded parameters on any ranks.

        Every rank must call it.
        """
        self._collectives.all_gather(self.rows, self.number, f"all-gather of written {self.label}").wait()

    def broadcast_masters(self, replicas: Collectives | None) -> None:
        """Take each master weight beside the parameters from the rank that owns it, where several ranks update it.

        Another rank may have taken a written row into its own masters already, and so have lost their digits. Every rank must
        call it.

        Args:
            replicas: the ranks of other dimensions, where these hold the same parameters.
        """
        for shard, master in self.at_rest.copies.items():
            with master.borrowed(self._accelerator, self._pool, write=True) as values:
                if not self._policy.optimizer.sharded:
                    self._collectives.broadcast(values, self._collectives.owner(shard))
                if replicas is not None:
                    replicas.broadcast(values)

    def load_masters(self, *, regather: bool) -> None:
        """Copy master weights that were set to the parameters at rest and, with `regather`, to the unsharded ones."""
        for rank, master in self.at_rest.copies.items():
            with master.borrowed(self._accelerator, self._pool) as values:
                # no test can miss this wait: `Slot.write` asks for it. What rests beside master weights is of another
                # dtype, so a cast copy is sent, and nothing reads the scratch that is released next.
                self.at_rest.rests[rank].write(values).wait(values.device)
        self._spread("set")
        if regather:
            self._bring("all-gather of set")
            self.wait_unsharded()

    def differs_from_rest(self) -> bool:
        """Return whether unsharded parameters differ from those at rest on any rank. If sharded, every rank must call it."""
        resting, shown = self.at_rest.block, self.at_rest.own_block
        if resting is None:
            return False
        self.settle()
        with resting.borrowed(self._accelerator, self._pool) as values:
            if values.dtype == shown.dtype:
                same = torch.equal(shown.view(torch.uint8), values.view(torch.uint8))
            else:  # a zero that was written keeps its master's digits, and so its master's sign
                same = torch.equal(shown, values.to(shown.dtype)) or _shows(shown, values)
        return any(data != b"\1" for data in self._collectives.exchange(bytes([same]), f"changes of {self.label}"))

    # ------------------------------------------------------------------ what lives

    @property
    def own_rest(self) -> Slot:
        return self.at_rest.rests[self.own_shard]

    @property
    def own_shard(self) -> int:
        return self._collectives.shard

    def tensors(self, kind: str) -> list[Tensor]:
        """Return the tensors at rest, "parameters" or "master", that are in the accelerator's memory."""
        if kind == "master":
            return memories_in(self._accelerator, self.at_rest.masters.values())
        found = memories_in(self._accelerator, self.at_rest.rests.values())
        if self.at_rest.block is None:
            found.insert(0, self.rows)
        return found


def memories_in(storage: Storage, slots: Iterable[Slot]) -> list[Tensor]:
    """Return the memory of the slots that are in a storage's."""
    found = [slot.memory_in(storage) for slot in slots]
    return [memory for memory in found if memory is not None]


def _shows(row: Tensor, master: Tensor) -> bool:
    """Return whether a row equals its master weights, rounded to its dtype. NaN equals a NaN of the same bits."""
    parts = zip(row.split(CHUNK_NUMEL), master.split(CHUNK_NUMEL), strict=True)
    return all(torch.equal(shown.view(torch.int16), kept.to(row.dtype).view(torch.int16)) for shown, kept in parts)


class InCpuMemory:
    """The way of parameters that are whole in CPU memory between steps. A read copies them back without other ranks.

    Attributes:
        slot: their slot.
        is_current: whether the slot has the parameters' values from the end of the step.
    """

    def __init__(self, flat: FlatBuffer, slot: Slot) -> None:
        self._flat = flat
        self.slot = slot
        self.is_current = False
        self._reloading: Transfer = LANDED

    def start(self) -> None:
        """Start to copy the parameters into the flat buffer."""
        self._flat.allocate()
        self._reloading = self.slot.read(self._flat.tensor)

    def land(self) -> None:
        self._reloading.wait(self._flat.tensor.device)
        self._reloading = LANDED

    def leave(self, *, changed: bool) -> None:
        """Copy the parameters to their place if they `changed` since `start`, and free the flat buffer."""
        if changed:
            self.slot.write(self._flat.tensor)
            self.is_current = True
        self.slot.wait(self._flat.tensor.device)  # the next use of the memory comes after the copy from it
        self._flat.free()
