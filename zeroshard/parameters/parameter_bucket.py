"""Owns the parameters of one bucket: what rests on this rank, and the way from there to the unsharded rows and back.

Called by unit. Which tensors exist, for a bucket of n elements on one of W ranks (S = n / W):

    rows       [W, S]  the unsharded parameters; storage belongs to the unit's flat buffer
    resting    [B * S] where they are sharded at rest, the block of rows that rests on this rank: its own row, or, where each host
                       holds the whole (`Residency.per_host`), a row for each of the B hosts, of which one is its own to update

and, for each shard that this rank updates, two slots of [S], each in the storage that the policy names: what rests, and the
master weights, which are the same slot where the dtype allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor

from zeroshard.collectives.base import Pending
from zeroshard.collectives.reduction import CHUNK_NUMEL
from zeroshard.errors import StorageError
from zeroshard.parameters.context import BucketSpec, Context
from zeroshard.storage.base import Slot
from zeroshard.storage.transfers import Transfer


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
        self.number, self.label, self.layout, self.trainable = spec.number, spec.label, spec.layout, spec.trainable
        self.rows, self.storages = rows, context.storages
        self._dtypes, self._policy, self._collectives, self._pool = (
            spec.dtypes,
            context.policy,
            context.collectives,
            context.pool,
        )
        self._accelerator = context.storages.accelerator
        whole = whole.view(rows.shape)
        rows.copy_(whole)
        collectives = context.collectives
        self._holders = collectives.inside if self._policy.parameters.per_host else collectives
        """Those over whose ranks the parameters are cut at rest."""
        self._replicas = None if self._holders is collectives else collectives.across
        """Those over the ranks that hold the same block, each of which updates a row of it."""
        self._blocks = rows.view(self._holders.world_size, -1)
        self._own_block = self._blocks[self._holders.shard]
        self._resting: Slot | None = None
        if self._policy.parameters.sharded:
            self._resting = self.storages.parameter_slot(
                self._policy, self.label, self._own_block.numel(), self._dtypes.param
            )
            self._resting.write(self._own_block)
            self._resting.wait()
        self._rows_are_at_rest = self._resting is None and whole_at_rest is None
        self._held = self._make_rests(whole_at_rest)
        """By number, where the shards rest that this rank updates or holds."""
        updated = [self.own_shard] if self._policy.optimizer.sharded else self._held
        self.rests = {shard: self._held[shard] for shard in updated}
        """Of these, those that it updates."""
        self.masters = {
            rank: self._make_master(rest, whole[rank]) for rank, rest in self.rests.items() if self.trainable
        }
        # On their way to the rows: this rank's part from where it rests, and the other ranks' parts.
        self._reloading: Transfer | None = None
        self._gathering: Pending | None = None
        self.is_rounded = False
        """What the rows show, or will, has lost digits on its way: it is to be computed with, and never becomes what rests."""
        self._spreading: Pending | None = None
        """The other hosts' rows of the block, on their way to where it rests."""

    def _make_rests(self, whole_at_rest: Slot | None) -> dict[int, Slot]:
        if self._resting is not None:
            return self._make_parts(self._resting)
        ranks = [self.own_shard] if self._policy.optimizer.sharded else range(self.layout.world_size)
        if whole_at_rest is not None:
            host = self.storages.host
            memory = whole_at_rest.memory_in(host)
            assert memory is not None
            rows = memory[self.layout.start : self.layout.stop].view_as(self.rows)
            return {rank: host.around(self.label, rows[rank], whole_at_rest) for rank in ranks}
        return {rank: self._accelerator.around(self.label, self.rows[rank]) for rank in ranks}

    def _make_parts(self, resting: Slot) -> dict[int, Slot]:
        if self._replicas is None:
            return {self.own_shard: resting}
        place = next(one for one in (self._accelerator, self.storages.host) if resting.memory_in(one) is not None)
        block = resting.memory_in(place)
        assert block is not None
        rows = block.view(-1, self.layout.shard_numel)
        first = self._holders.shard * len(rows)
        return {first + number: place.around(self.label, row, resting) for number, row in enumerate(rows)}

    def _make_master(self, rest: Slot, values: Tensor) -> Slot:
        # In fp32 the shard at rest is the master: a second copy of the weights would be waste.
        if self.updates_parameters_in_place:
            return rest
        home = self.storages.optimizer(self._policy)
        master = home.slot(f"master weights of {self.label}", self.layout.shard_numel, self._dtypes.master)
        master.write(values)
        master.wait()
        return master

    # ------------------------------------------------------------------ together

    def unshard(self, *, is_late: bool = False, to_compute: bool = False) -> None:
        """The parameters are about to be used: start to bring them together. The rows have storage.

        Args:
            is_late: they have none until they are waited for, and `reload` is called then.
            to_compute: they may be rounded on their way.
        """
        if self._resting is not None and self._gathering is None:
            self._bring("all-gather of", reload=not is_late, to_compute=to_compute)

    def unround(self) -> None:
        """Rows that were brought rounded become what rests. Every rank must call it."""
        if self.is_rounded:
            self._bring("all-gather of")
            self.wait_unsharded()

    def round(self) -> None:
        """The end of `unround`: rows are as they are computed with. It takes no other rank."""
        if self._resting is not None and self._holders.rounds_parameters and not self.is_rounded:
            self._holders.round_to_compute(self._blocks)
            self.is_rounded = True

    def sync(self) -> None:
        """The optimizer has updated what rests on this rank: bring what the others hold of it up to date."""
        if self._resting is None and self._policy.optimizer.sharded:
            self._bring("all-gather of updated")
        self._spread("updated")

    def _bring(self, what: str, *, reload: bool = True, to_compute: bool = False) -> None:
        self.settle()
        if reload:
            self.reload()
        resting = self._resting.memory_in(self._accelerator) if self._resting is not None else None
        gather = self._holders.gather_to_compute if to_compute else self._holders.all_gather
        self.is_rounded = to_compute and self._holders.rounds_parameters
        self._gathering = gather(self._blocks, self.number, f"{what} {self.label}", resting)

    def _spread(self, what: str) -> None:
        """This rank's row of the block was changed: start to bring it to the ranks of other hosts that hold it, and theirs here."""
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
        """Block until what other hosts have updated has arrived where it rests."""
        if self._spreading is not None:
            self._spreading.wait()  # which raises again where it did before
            self._spreading = None

    @property
    def can_be_read_at_rest(self) -> bool:
        """The other ranks read this rank's part where it rests: its row is filled for this rank alone, by `reload`."""
        in_memory = self._resting is not None and self._resting.memory_in(self._accelerator) is not None
        return in_memory and self._holders.reads_in_place and not self._holders.sends

    def reload(self) -> None:
        """This rank's row is what rests, wherever that is."""
        if not self._rows_are_at_rest:
            self.start_reload()
            self._finish_reload()

    def start_reload(self) -> None:
        """Start to bring this rank's part from where it rests to its row."""
        if self._reloading is None:
            self.settle()
            self._reloading = (self._resting or self.own_rest).read(self._own_block)

    def _finish_reload(self) -> None:
        if self._reloading is not None:
            reloading, self._reloading = self._reloading, None
            reloading.wait(self.rows.device)

    def abandon_unshard(self) -> None:
        """The unit could not be brought together: nothing is on its way any longer."""
        with suppress(StorageError):
            self._finish_reload()
        if self._gathering is not None:
            self._gathering.abandon()
        self._reloading = self._gathering = None

    def prefetch(self) -> None:
        """The shard at rest is needed soon."""
        if self._resting is not None:
            self._resting.prefetch()

    def wait_unsharded(self) -> None:
        """Block until what `unshard` or `sync` started has arrived."""
        if self._gathering is not None:
            self._gathering.wait()  # which raises again where it did before
            self._gathering = None

    @property
    def is_gathering(self) -> bool:
        """An all-gather of the parameters is in flight."""
        return self._gathering is not None

    # ------------------------------------------------------------------ who owns a written value

    def take_rows(self, *, masters: bool = True) -> None:
        """The unsharded parameters were written to on this rank: what rests here, and the `masters`, follow."""
        self.settle()
        for rank, rest in self._held.items() if not self._rows_are_at_rest else ():
            rest.write(self.rows[rank]).wait(self.rows.device)
        for rank, master in self.masters.items() if masters else ():
            if master is not self.rests[rank]:
                self._take_row(master, self.rows[rank])

    def take_rests(self) -> None:
        """The master weights follow what rests here."""
        for rank, master in self.masters.items():
            if master is not self.rests[rank]:
                with self.rests[rank].borrowed(self._accelerator, self._pool) as row:
                    self._take_row(master, row)

    def _take_row(self, master: Slot, new: Tensor) -> None:
        """A master keeps its digits where the value in the parameter's own dtype is what it was."""
        with master.borrowed(self._accelerator, self._pool, write=True) as old:
            torch.where(new == old.to(new.dtype), old, new.to(old.dtype), out=old)

    def take_hidden_writes(self) -> bool:
        """Master weights follow what was written through `.data`, of which nothing tells but the values. Returns whether any
        was found.

        An accelerator is not asked, since that would stop it (see hidden_writes.py); nor are masters that rest elsewhere
        brought for it.
        """
        found = False
        for rank, master in self.masters.items() if self._accelerator.answers_at_once else ():
            memory = self._memory_beside(rank, master)
            if memory is not None and not _shows(self.rows[rank], memory):
                self._take_row(master, self.rows[rank])
                found = True
        return found

    def masters_shown(self) -> Iterator[tuple[Tensor, AbstractContextManager[Tensor]]]:
        """On an accelerator: each row [S] that shows master weights which lie there, and these [S], to be written to."""
        for rank, master in self.masters.items() if not self._accelerator.answers_at_once else ():
            if self._memory_beside(rank, master) is not None:
                yield self.rows[rank], master.borrowed(self._accelerator, self._pool, write=True)

    def _memory_beside(self, rank: int, master: Slot) -> Tensor | None:
        """Master weights that are a copy beside the parameters, and here."""
        return None if master is self.rests[rank] else master.memory_in(self._accelerator)

    def take_own_row(self) -> None:
        """The unsharded parameters leave: where they are the master weights, what the user did to them stays."""
        for rank, master in self.masters.items():
            if master is self.rests[rank]:
                master.write(self.rows[rank])

    def take_parameters(self, source: int) -> None:
        """The unsharded parameters were changed on rank `source`: make its values everybody's, at rest and in the masters."""
        self._collectives.broadcast(self.rows, source)
        self.take_rows()

    def take_owners_rows(self) -> None:
        """The unsharded parameters were changed, on some ranks or all: of each element, its owner's value becomes everybody's.

        Every rank must call it.
        """
        self._collectives.all_gather(self.rows, self.number, f"all-gather of written {self.label}").wait()

    def take_masters(self, *, regather: bool) -> None:
        """The master weights were set: what rests follows, and, where the parameters are unsharded now, they do."""
        for rank, master in self.masters.items():
            if master is not self.rests[rank]:
                with master.borrowed(self._accelerator, self._pool) as values:
                    self.rests[rank].write(values).wait(values.device)
        self._spread("set")
        if regather:
            self._bring("all-gather of set", to_compute=self.is_rounded)
            self.wait_unsharded()

    def differs_from_rest(self) -> bool:
        """Whether unsharded parameters are no longer what rests, on any rank. Where they are sharded, every rank must ask."""
        if self._resting is None:
            return False
        self.settle()
        with self._resting.borrowed(self._accelerator, self._pool) as at_rest:
            same = torch.equal(self._own_block.view(torch.uint8), at_rest.view(torch.uint8))
        return any(data != b"\1" for data in self._collectives.exchange(bytes([same]), f"changes of {self.label}"))

    # ------------------------------------------------------------------ what lives

    @property
    def own_rest(self) -> Slot:
        """This rank's shard of the parameters at rest."""
        return self.rests[self.own_shard]

    @property
    def own_shard(self) -> int:
        """The number of the shard that is this rank's."""
        return self._collectives.shard

    @property
    def is_sharded_at_rest(self) -> bool:
        """Only a part of the parameters rests here."""
        return self._resting is not None

    @property
    def updates_parameters_in_place(self) -> bool:
        """The master weights are the parameters at rest themselves."""
        return self._dtypes.master == self._dtypes.param

    def tensors(self, kind: str) -> list[Tensor]:
        """The tensors at rest, "parameters" or "master", as far as they are the accelerator's memory."""
        if kind == "parameters":
            whole = [] if self.is_sharded_at_rest else [self.rows]
            return whole + self._in_memory(self.rests.values())
        return self._in_memory(self.masters.values())

    def _in_memory(self, slots: Iterable[Slot]) -> list[Tensor]:
        found = [slot.memory_in(self._accelerator) for slot in slots]
        return [memory for memory in found if memory is not None]


def _shows(row: Tensor, master: Tensor) -> bool:
    """Whether a row is its master weights in its own dtype. NaN is what it is."""
    parts = zip(row.split(CHUNK_NUMEL), master.split(CHUNK_NUMEL), strict=True)
    return all(torch.equal(shown.view(torch.int16), kept.to(row.dtype).view(torch.int16)) for shown, kept in parts)
