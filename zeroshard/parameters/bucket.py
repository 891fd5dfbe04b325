"""Owns one bucket: the segment of a flat buffer that is communicated at once. The reader of the policy at run time.

Called by unit (parameters), schedule (gradients) and the sharded optimizer (shards). Under every policy it answers the
same five questions: `unshard`, `reshard`, `reduce_gradients`, `optimizer_shards`, `sync_parameters`.

Which tensors exist, for a bucket of n elements on one of W ranks (S = n / W):

    rows       [W, S]  the unsharded parameters; storage belongs to the unit's flat buffer
    resting    [S]     this rank's shard of the parameters, where they are sharded at rest
    gradient   [W, S]  where gradients are not sharded: this rank's sum between microbatches, then the mean

and, for each shard that this rank updates, three slots of [S], each in the storage that the policy names: `rest`, the
parameters; `master`, what the optimizer updates, the same slot where the dtype allows; `gradient`, the mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Pending, PendingReduction
from zeroshard.errors import StorageError
from zeroshard.gradients.norm import sum_of_squares
from zeroshard.layout.layout import BucketLayout, Piece
from zeroshard.policy import DTypes, Policy
from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.buffer_pool import BufferPool
from zeroshard.storage.storages import Storages
from zeroshard.storage.transfers import Transfer


@dataclass(eq=False)
class Shard:
    """One rank's part of a bucket, as the optimizer sees it: slots of [shard_numel].

    Attributes:
        rest: the parameters at rest, in the dtype of the forward.
        master: what the optimizer updates; `rest` itself where the dtype is the same.
        gradient: the mean over ranks.
        step: where the optimizer steps.
        home: where its states rest.
        is_shown: the master weights are what the user sees and may write to.
        squares: the sum of squares of the gradient, where that left the accelerator and was not changed since.
    """

    rank: int
    pieces: tuple[Piece, ...]
    rest: Slot
    master: Slot
    gradient: Slot
    step: Storage
    home: Storage
    is_shown: bool
    squares: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.master.numel


@dataclass(frozen=True)
class Context:
    """What all buckets of a model share."""

    policy: Policy
    collectives: Collectives
    pool: BufferPool
    storages: Storages
    bucket_numel: int
    whole_parameters: bool = False
    """No parameter is cut: the optimizer looks at whole tensors."""


class Bucket:
    """See the module's docstring.

    Args:
        whole: the bucket's initial content in the master dtype, the same on all ranks.
        whole_at_rest: of the unit, in CPU memory, where its unsharded parameters rest between steps.
    """

    def __init__(
        self, number: int, label: str, layout: BucketLayout, rows: Tensor, whole: Tensor, whole_at_rest: Slot | None,
        dtypes: DTypes, trainable: bool, context: Context,
    ) -> None:  # fmt: skip
        self.number, self.label, self.layout, self.trainable = number, label, layout, trainable
        self._dtypes, self._policy = dtypes, context.policy
        self._collectives, self._pool = context.collectives, context.pool
        self._rows, self.storages = rows, context.storages
        self._accelerator = context.storages.accelerator
        rank, world_size = self._collectives.rank, self._collectives.world_size
        whole = whole.view(world_size, layout.shard_numel)
        rows.copy_(whole)
        self._own_row = rows[rank]
        self._resting: Slot | None = None
        if self._policy.parameters.sharded:
            self._resting = self.storages.parameter_slot(self._policy, label, layout.shard_numel, dtypes.param)
            self._resting.write(self._own_row)
            self._resting.wait()
        self._rows_are_at_rest = self._resting is None and whole_at_rest is None
        self._rests = self._make_rests(whole_at_rest)
        self._reloading: Transfer | None = None
        self._gathering: Pending | None = None
        if not trainable:
            return
        self._gradient: Tensor | None = None
        if not self._policy.gradients.sharded:
            self._gradient = torch.zeros(rows.shape, dtype=dtypes.accumulate, device=rows.device)
        self._shards = self._make_shards(whole)
        self._own = next(shard for shard in self._shards if shard.rank == rank)
        # Within one microbatch:
        self._missing = self._everything = frozenset(piece.index for piece in layout.pieces)
        self._is_closed = False
        self._unreduced: Tensor | None = None
        self._borrowed: list[Tensor] = []
        self._reduction: PendingReduction | None = None
        # Within one step:
        self._has_local_sum: set[int] = set()
        self._has_mean = False
        self._gathering_gradient: Pending | None = None

    # ------------------------------------------------------------------ parameters

    def operation(self, name: str) -> AbstractContextManager[None]:
        """Waits for other ranks inside belong to `name`."""
        return self._collectives.operation(name)

    def unshard(self) -> None:
        """The parameters are about to be used: start to bring them together. The rows have storage."""
        if self._resting is not None and self._gathering is None:
            self._reload()
            self._gathering = self._collectives.all_gather(self._rows, self.number, f"all-gather of {self.label}")

    def _reload(self) -> None:
        """This rank's row is what rests, wherever that is."""
        if not self._rows_are_at_rest:
            self.start_reload()
            self._finish_reload()

    def start_reload(self) -> None:
        """Start to bring this rank's part from where it rests to its row."""
        if self._reloading is None:
            self._reloading = self._rests[self.rank].read(self._own_row)

    def _finish_reload(self) -> None:
        if self._reloading is not None:
            reloading, self._reloading = self._reloading, None
            reloading.wait(self._rows.device)

    def abandon_unshard(self) -> None:
        """The unit could not be brought together: nothing is on its way any longer."""
        with suppress(StorageError):
            self._finish_reload()
        self._reloading = self._gathering = None

    def take_own_row(self) -> None:
        """The unsharded parameters leave: where they are the master weights, what the user did to them stays."""
        for shard in self._shards if self.trainable else ():
            if shard.master is shard.rest:
                shard.rest.write(self._rows[shard.rank])

    def prefetch(self) -> None:
        """The shard at rest is needed soon."""
        if self._resting is not None:
            self._resting.prefetch()

    def wait_unsharded(self) -> None:
        """Block until what `unshard` or `sync_parameters` started has arrived."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            pending.wait()

    @property
    def is_gathering(self) -> bool:
        """An all-gather of the parameters is in flight."""
        return self._gathering is not None

    def sync_parameters(self) -> None:
        """The optimizer has updated what rests on this rank: bring the parameters up to date."""
        if self._resting is None and self._policy.optimizer.sharded:
            self._reload()
            self._gathering = self._collectives.all_gather(
                self._rows, self.number, f"all-gather of updated {self.label}"
            )

    def take_parameters(self, source: int) -> None:
        """The unsharded parameters were changed on rank `source`: make its values everybody's, at rest and in the masters.

        A master keeps its digits where the value in the parameter's own dtype is what it was.
        """
        self._collectives.broadcast(self._rows, source)
        for rank, rest in self._rests.items() if not self._rows_are_at_rest else ():
            rest.write(self._rows[rank]).wait(self._rows.device)
        for shard in self._shards if self.trainable else ():
            if shard.master is not shard.rest:
                new = self._rows[shard.rank]
                with shard.master.borrowed(self._accelerator, self._pool, write=True) as master:
                    torch.where(new == master.to(new.dtype), master, new.to(master.dtype), out=master)

    def take_masters(self, *, regather: bool) -> None:
        """The master weights were set: what rests follows, and, where the parameters are unsharded now, they do."""
        for shard in self._shards if self.trainable else ():
            if shard.master is not shard.rest:
                with shard.master.borrowed(self._accelerator, self._pool) as master:
                    shard.rest.write(master).wait(master.device)
        if not regather:
            return
        self._reload()
        self._gathering = self._collectives.all_gather(self._rows, self.number, f"all-gather of set {self.label}")
        self.wait_unsharded()

    @property
    def own_rest(self) -> Slot:
        """This rank's shard of the parameters at rest."""
        return self._rests[self.rank]

    @property
    def rank(self) -> int:
        """Whose shards these are."""
        return self._collectives.rank

    def differs_from_rest(self) -> bool:
        """Whether unsharded parameters are no longer what rests, on any rank. Where they are sharded, every rank must ask."""
        if self._resting is None:
            return False
        with self._resting.borrowed(self._accelerator, self._pool) as at_rest:
            same = torch.equal(self._own_row.view(torch.uint8), at_rest.view(torch.uint8))
        return any(data != b"\1" for data in self._collectives.exchange(bytes([same]), f"changes of {self.label}"))

    # ------------------------------------------------------------------ gradients

    @property
    def is_ready(self) -> bool:
        """Every parameter of the bucket has its gradient of this microbatch, or will have none."""
        return not self._missing or self._is_closed

    def close(self) -> None:
        """No further gradient is expected in this microbatch: what is missing counts as zeros."""
        self._is_closed = True

    def add_gradient(self, piece: Piece, gradient: Tensor) -> None:
        """Take this rank's gradient of one parameter, flattened, in this microbatch."""
        self.finish_reduction()  # a second gradient of one step may find its predecessor's buffers still busy
        part = gradient[piece.parameter_start : piece.parameter_start + piece.numel]
        if self._sums_before_reducing:
            assert self._gradient is not None
            target = self._gradient.view(-1)[piece.start : piece.start + piece.numel]
            first = piece.index not in self._has_local_sum
            self._has_local_sum.add(piece.index)
        else:
            if self._unreduced is None and piece.numel == self.layout.numel and part.dtype == self._dtypes.reduce:
                self._unreduced = part  # the bucket lies inside one gradient: reduced from there, no copy
                self._missing = frozenset()
                return
            if self._unreduced is None:
                self._unreduced = self._borrow(self.layout.numel)
                for start, stop in self.layout.padding:
                    self._unreduced[start:stop].zero_()
            elif not self._borrowed:  # a second gradient of one microbatch: autograd's own tensor is not ours to add to
                whole = self._borrow(self.layout.numel)
                whole.copy_(self._unreduced)
                self._unreduced = whole
            target = self._unreduced[piece.start : piece.start + piece.numel]
            first = piece.index in self._missing
        target.copy_(part) if first else target.add_(part)
        self._missing = self._missing - {piece.index}

    @property
    def _sums_before_reducing(self) -> bool:
        """Gradients are summed over microbatches first and over ranks once; what comes after that, like sharded ones."""
        return not self._policy.gradients.sharded and not self._has_mean

    def reduce_gradients(self, is_last_microbatch: bool) -> bool:
        """Every gradient of the microbatch is here (a missing one counts as zeros): start the reduction.

        Returns whether one was started: unsharded gradients wait for the last microbatch.
        """
        self._is_closed = False
        if self._sums_before_reducing:
            self._missing = self._everything
            if not is_last_microbatch:
                return False
            assert self._gradient is not None
            self._zero(self._gradient.view(-1), self._everything - self._has_local_sum)
            rows = self._gradient
            if rows.dtype != self._dtypes.reduce:
                rows = self._borrow(self.layout.numel).view_as(self._rows).copy_(rows)
        else:
            if self._unreduced is None:
                self._unreduced = self._borrow(self.layout.numel).zero_()
            elif self._missing:
                self._zero(self._unreduced, self._missing)
            self._missing = self._everything
            rows = self._unreduced.view_as(self._rows)
        if self._collectives.predivide_factor != 1.0:  # into scratch: the rows may be autograd's own tensor
            divided = self._borrow(self.layout.numel).view_as(rows)
            rows = torch.div(rows, self._collectives.predivide_factor, out=divided)
        workspace = self._borrow(self._collectives.workspace_numel(rows))
        self._reduction = self._collectives.reduce_scatter(
            rows, workspace, self.number, f"reduce-scatter of gradients of {self.label}"
        )
        return True

    def finish_reduction(self) -> None:
        """Block until the mean over ranks, if any is on its way, is in this rank's shard; scratch goes back to the pool."""
        if self._reduction is None:
            return
        self.wait_gradient_gather()  # it still reads the shard that is about to change
        slot = self._own.gradient
        with slot.borrowed(self._accelerator, self._pool, read=self._has_mean, write=True) as own:
            self._reduction.finish(own, accumulate=self._has_mean)
            if slot.memory_in(self._accelerator) is None:
                self._own.squares = sum_of_squares(own)  # while it is here
        self._reduction, self._unreduced, self._has_mean = None, None, True
        self._return_scratch()

    def start_gradient_gather(self) -> None:
        """Where the optimizer is unsharded, every rank needs every row of the mean."""
        if not self._policy.optimizer.sharded:
            assert self._gradient is not None
            self.wait_gradient_gather()
            label = f"all-gather of gradients of {self.label}"
            self._gathering_gradient = self._collectives.all_gather(self._gradient, self.number, label)

    def wait_gradient_gather(self) -> None:
        """Block until what `start_gradient_gather` started has arrived."""
        if self._gathering_gradient is not None:
            pending, self._gathering_gradient = self._gathering_gradient, None
            pending.wait()

    def abandon_microbatch(self) -> None:
        """A backward broke off: forget what arrived of it."""
        if self._reduction is not None:  # its transfers still write to the scratch
            self._reduction.finish(self._borrow(self.layout.shard_numel, self._dtypes.accumulate), accumulate=False)
            self._reduction = None
        self._missing, self._unreduced, self._is_closed = self._everything, None, False
        self._return_scratch()

    def forget_gradients(self) -> None:
        """A new step begins."""
        self.wait_gradient_gather()  # it would write into the next step's sums
        self._has_local_sum.clear()
        self._has_mean = False

    @property
    def has_unreduced(self) -> bool:
        """A gradient arrived in this microbatch that no reduction has taken yet."""
        return self._unreduced is not None and self._reduction is None

    @property
    def holds_local_sum(self) -> bool:
        """Microbatches were summed on this rank and never reduced."""
        return bool(self._has_local_sum) and not self._has_mean

    def _borrow(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        scratch = self._pool.acquire(numel, dtype or self._dtypes.reduce)
        self._borrowed.append(scratch)
        return scratch

    def _return_scratch(self) -> None:
        for scratch in self._borrowed:
            self._pool.release(scratch)
        self._borrowed.clear()

    def _zero(self, flat: Tensor, indices: frozenset[int]) -> None:
        for piece in self.layout.pieces:
            if piece.index in indices:
                flat[piece.start : piece.start + piece.numel].zero_()

    # ------------------------------------------------------------------ optimizer

    def optimizer_shards(self) -> tuple[Shard, ...]:
        """The ranges that this rank updates: its own, or all of them where the optimizer is unsharded."""
        return self._shards

    def _make_rests(self, whole_at_rest: Slot | None) -> dict[int, Slot]:
        """By rank, where the shards rest that this rank updates or holds."""
        if self._resting is not None:
            return {self.rank: self._resting}
        ranks = [self.rank] if self._policy.optimizer.sharded else range(self.layout.world_size)
        if whole_at_rest is not None:
            host = self.storages.host
            memory = whole_at_rest.memory_in(host)
            assert memory is not None
            rows = memory[self.layout.start : self.layout.stop].view_as(self._rows)
            return {rank: host.around(self.label, rows[rank], whole_at_rest) for rank in ranks}
        return {rank: self._accelerator.around(self.label, self._rows[rank]) for rank in ranks}

    def _make_shards(self, whole: Tensor) -> tuple[Shard, ...]:
        numel, dtypes, policy = self.layout.shard_numel, self._dtypes, self._policy
        step, home = self.storages.step(policy), self.storages.optimizer(policy)
        shards = []
        for rank, rest in self._rests.items():
            master = rest
            # In fp32 the shard at rest is the master: a second copy of the weights would be waste.
            if dtypes.master != dtypes.param:
                master = home.slot(f"master weights of {self.label}", numel, dtypes.master)
                master.write(whole[rank])
                master.wait()
            if self._gradient is None:
                label = f"gradients of {self.label}"
                gradient = self.storages.gradients(policy).slot(label, numel, dtypes.accumulate)
            else:
                gradient = self._accelerator.around(f"gradients of {self.label}", self._gradient[rank])
            is_shown = master is rest and self._resting is None
            shards.append(Shard(rank, self.layout.shard_pieces(rank), rest, master, gradient, step, home, is_shown))
        return tuple(shards)

    # ------------------------------------------------------------------ what lives

    def tensors(self, kind: str) -> list[Tensor]:
        """The tensors at rest of one kind of model state, as far as they are the accelerator's memory."""
        if kind == "parameters":
            return [self._rows, *self._in_memory(self._rests.values())]
        if not self.trainable:
            return []
        return self._in_memory(shard.gradient if kind == "gradients" else shard.master for shard in self._shards)

    @property
    def updates_parameters_in_place(self) -> bool:
        """The master weights are the parameters at rest themselves."""
        return self._dtypes.master == self._dtypes.param

    def _in_memory(self, slots: Iterable[Slot]) -> list[Tensor]:
        found = [slot.memory_in(self._accelerator) for slot in slots]
        return [memory for memory in found if memory is not None]
