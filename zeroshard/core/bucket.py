"""Owns one bucket: the segment of a flat buffer that is communicated at once. The reader of the policy at run time.

Called by unit (parameters), schedule (gradients) and the sharded optimizer (shards). Under every policy it answers the
same five questions: `unshard`, `reshard`, `reduce_gradients`, `optimizer_shards`, `sync_parameters`.

Which tensors exist, for a bucket of n elements on one of W ranks (S = n / W):

    rows       [W, S]  the unsharded parameters; storage belongs to the unit's flat buffer
    resting    [1, S]  this rank's shard of the parameters, where they are sharded at rest
    master     [W, S] or [1, S]  what the optimizer updates: the rows (or resting) themselves where the dtype allows
    gradient   [W, S] or [1, S]  reduced (or, unsharded and between microbatches, this rank's sum)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.core.buffer_pool import BufferPool
from zeroshard.core.collectives import Collectives, Pending, PendingReduction
from zeroshard.core.layout import BucketLayout, Piece
from zeroshard.policy import DTypes, Policy


@dataclass(frozen=True)
class Shard:
    """One rank's part of a bucket, as the optimizer sees it: `master` and `gradient` are [shard_numel]."""

    rank: int
    pieces: tuple[Piece, ...]
    master: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Context:
    """What all buckets of a model share."""

    policy: Policy
    collectives: Collectives
    pool: BufferPool
    bucket_numel: int
    whole_parameters: bool = False
    """No parameter is cut: the optimizer looks at whole tensors."""


class Bucket:
    """See the module's docstring. `whole` is the bucket's initial content in the master dtype, the same on all ranks."""

    def __init__(
        self, number: int, label: str, layout: BucketLayout, rows: Tensor, whole: Tensor, dtypes: DTypes,
        trainable: bool, context: Context,
    ) -> None:  # fmt: skip
        self.number, self.label, self.layout, self.trainable = number, label, layout, trainable
        self._dtypes, self._policy = dtypes, context.policy
        self._collectives, self._pool = context.collectives, context.pool
        self._rows = rows
        rank, world_size = self._collectives.rank, self._collectives.world_size
        whole = whole.view(world_size, layout.shard_numel)
        rows.copy_(whole)
        self._own = slice(rank, rank + 1)
        self._updated = self._own if self._policy.optimizer.sharded else slice(0, world_size)
        self._resting = rows[self._own].clone() if self._policy.parameters.sharded else None
        self._gathering: Pending | None = None
        if not trainable:
            return
        at_rest = self._resting if self._resting is not None else rows[self._updated]
        # In fp32 the shard at rest is the master: a second copy of the weights would be waste.
        self._master = at_rest if dtypes.master == dtypes.param else whole[self._updated].to(dtypes.master, copy=True)
        kept = 1 if self._policy.gradients.sharded else world_size
        self._gradient = torch.zeros(kept, layout.shard_numel, dtype=dtypes.accumulate, device=rows.device)
        self._shards = self._make_shards()
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

    def unshard(self) -> None:
        """The parameters are about to be used: start to bring them together. The rows have storage."""
        if self._resting is not None and self._gathering is None:
            self._rows[self._own].copy_(self._resting)
            self._gathering = self._collectives.all_gather(self._rows, self.number, f"all-gather of {self.label}")

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
        """The optimizer has updated the master shards: bring the parameters up to date."""
        self._write_masters_back()
        if self._resting is None and self._policy.optimizer.sharded:
            self._gathering = self._collectives.all_gather(
                self._rows, self.number, f"all-gather of updated {self.label}"
            )

    def _write_masters_back(self) -> None:
        target = self._resting if self._resting is not None else self._rows[self._updated]
        if target.data_ptr() != self._master.data_ptr():
            target.copy_(self._master)

    def take_parameters(self, source: int) -> None:
        """The unsharded parameters were changed on rank `source`: make its values everybody's, at rest and in the masters.

        A master keeps its digits where the value in the parameter's own dtype is what it was.
        """
        self._collectives.broadcast(self._rows, source)
        if self._resting is not None:
            self._resting.copy_(self._rows[self._own])
        if not self.trainable:
            return
        new = self._rows[self._updated]
        if self._master.dtype != new.dtype:
            torch.where(new == self._master.to(new.dtype), self._master, new.to(self._master.dtype), out=self._master)
        elif self._master.data_ptr() != new.data_ptr() and self._master is not self._resting:
            self._master.copy_(new)

    def take_masters(self, *, regather: bool) -> None:
        """The master weights were set: what rests follows, and, where the parameters are unsharded now, they do."""
        if self.trainable:
            self._write_masters_back()
        if not regather:
            return
        if self._resting is not None:
            self._rows[self._own].copy_(self._resting)
        self._gathering = self._collectives.all_gather(self._rows, self.number, f"all-gather of set {self.label}")
        self.wait_unsharded()

    def own_parameters(self) -> Iterator[tuple[Piece, Tensor]]:
        """This rank's shard of the parameters at rest, [numel] for each parameter in it."""
        own = self._rows[self._own] if self._resting is None else self._resting
        for piece in self.layout.shard_pieces(self.rank):
            yield piece, own[0, piece.start : piece.start + piece.numel]

    @property
    def rank(self) -> int:
        """Whose shards these are."""
        return self._collectives.rank

    def differs_from_rest(self) -> bool:
        """Whether unsharded parameters are no longer what rests, on any rank. Where they are sharded, every rank must ask."""
        if self._resting is None:
            return False
        same = torch.equal(self._rows[self._own].view(torch.uint8), self._resting.view(torch.uint8))
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
        self._reduction.finish(self._own_gradient, accumulate=self._has_mean)
        self._reduction, self._unreduced, self._has_mean = None, None, True
        self._return_scratch()

    def start_gradient_gather(self) -> None:
        """Where the optimizer is unsharded, every rank needs every row of the mean."""
        if not self._policy.optimizer.sharded:
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

    @property
    def _own_gradient(self) -> Tensor:
        return self._gradient[0 if self._policy.gradients.sharded else self._collectives.rank]

    def _borrow(self, numel: int) -> Tensor:
        scratch = self._pool.acquire(numel, self._dtypes.reduce)
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

    def _make_shards(self) -> tuple[Shard, ...]:
        ranks = range(self._collectives.world_size)[self._updated]
        first_gradient = self._collectives.rank if self._policy.gradients.sharded else 0
        return tuple(
            Shard(rank, self.layout.shard_pieces(rank), self._master[i], self._gradient[rank - first_gradient])
            for i, rank in enumerate(ranks)
        )

    # ------------------------------------------------------------------ what lives

    def tensors(self, kind: str) -> list[Tensor]:
        """The tensors at rest of one kind of model state."""
        if kind == "parameters":
            return [self._rows] if self._resting is None else [self._rows, self._resting]
        if not self.trainable:
            return []
        return [self._gradient] if kind == "gradients" else [self._master]
