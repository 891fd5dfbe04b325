"""Owns the gradients of one bucket: gathered from autograd, summed over microbatches, reduced to the mean over ranks.

Called by unit (which hands it gradients) and reductions (which say when). For a bucket of n elements on one of W ranks (S = n / W)
there is, where gradients are not sharded, a tensor [W, S]: this rank's sum between microbatches, then the mean; where they are, the
mean [S] of this rank's shard alone. What one microbatch gives is gathered in scratch, or taken as autograd made it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroshard.collectives.base import Pending, PendingReduction
from zeroshard.gradients.norm import sum_of_squares
from zeroshard.gradients.shard import Places, Shard
from zeroshard.layout.layout import Piece
from zeroshard.parameters.context import BucketSpec, Context
from zeroshard.parameters.parameter_bucket import ParameterBucket
from zeroshard.storage.flat_buffer import FlatBuffer
from zeroshard.storage.transfers import Transfer


class Holds(enum.Enum):
    """What a bucket has of the present step's gradients."""

    NOTHING = "nothing"
    LOCAL_SUM = "this rank's sum"
    MEAN = "the mean"
    REDUCING = "a reduction in flight"
    ADDING = "the mean, and a reduction in flight that will be added to it"


MOVES = {
    ("add", Holds.NOTHING): Holds.LOCAL_SUM,
    ("add", Holds.LOCAL_SUM): Holds.LOCAL_SUM,
    ("reduce", Holds.NOTHING): Holds.REDUCING,
    ("reduce", Holds.LOCAL_SUM): Holds.REDUCING,
    ("reduce", Holds.MEAN): Holds.ADDING,
    ("land", Holds.REDUCING): Holds.MEAN,
    ("land", Holds.ADDING): Holds.MEAN,
    **{("forget", state): Holds.NOTHING for state in Holds},
}
"""What may happen to a bucket, and what it holds then. (Sums on this rank are for policies that do not shard gradients.)"""

IN_FLIGHT = (Holds.REDUCING, Holds.ADDING)


@dataclass
class _Microbatch:
    """What this rank gave in one microbatch.

    Attributes:
        missing: the parameters whose gradient has not come.
        is_closed: none will come any longer.
        whole: [n] in scratch; or a part of the tensor that autograd made, which is not ours to write to.
        is_scratch: it is scratch.
        arrived: gradients, each with its place, that are not there yet: where launches are dear, they go there together.
    """

    missing: frozenset[int]
    is_closed: bool = False
    whole: Tensor | None = None
    is_scratch: bool = False
    arrived: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Flight:
    """A reduction in flight: until it lands, its scratch is busy."""

    pending: PendingReduction
    scratch: list[Tensor] = field(default_factory=list)


class _Readers(Transfer):
    """Scratch is free when other ranks have read it."""

    def __init__(self, pending: PendingReduction) -> None:
        self._pending = pending

    def wait(self, device: torch.device) -> None:
        self._pending.wait_readers()

    @property
    def is_done(self) -> bool:
        return not self._pending.has_readers


class GradientBucket:
    """See the module's docstring.

    Args:
        parameters: the bucket's other half, of the same spec.
    """

    def __init__(self, spec: BucketSpec, parameters: ParameterBucket, context: Context) -> None:
        self.number, self.label, self.layout = spec.number, spec.label, spec.layout
        self._dtypes, self._policy = spec.dtypes, context.policy
        self._collectives, self._pool = context.collectives, context.pool
        self._accelerator = context.storages.accelerator
        self._shape = parameters.rows.shape
        self._rows: Tensor | None = None
        """[W, S], where gradients are not sharded."""
        if not self._policy.gradients.sharded:
            self._rows = self._make_rows(spec.dtypes.accumulate, parameters.rows.device)
        self.shards = self._make_shards(parameters, context)
        self._own = next(shard for shard in self.shards if shard.number == parameters.own_shard)
        self._everything = frozenset(piece.index for piece in self.layout.pieces)
        self.holds = Holds.NOTHING
        self._microbatch = _Microbatch(self._everything)
        self._summed: set[int] = set()
        """The parameters that are in this rank's sum."""
        self._scratch: list[Tensor] = []
        self._flight: _Flight | None = None
        self._read: PendingReduction | None = None
        """The last one of `_rows`, which other ranks may still read."""
        self._gathering: Pending | None = None

    def _make_rows(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._collectives.shareable(self._shape.numel(), dtype).view(self._shape)
        return torch.zeros(self._shape, dtype=dtype, device=device)

    def _make_shards(self, parameters: ParameterBucket, context: Context) -> tuple[Shard, ...]:
        """The ranges that this rank updates: its own, or all of them where the optimizer is unsharded."""
        policy, storages = context.policy, context.storages
        places, label = Places(storages.step(policy), storages.optimizer(policy)), f"gradients of {self.label}"
        shards = []
        for number, master in parameters.masters.items():
            if self._rows is None:
                gradient = storages.gradient_slot(policy, label, self.layout.shard_numel, self._dtypes.accumulate)
            else:
                gradient = self._accelerator.around(label, self._rows[number])
            rest = parameters.rests[number]
            is_shown = master is rest and not parameters.is_sharded_at_rest
            shards.append(Shard(number, self.layout.shard_pieces(number), rest, master, gradient, places, is_shown))
        return tuple(shards)

    def _move(self, event: str) -> None:
        assert (event, self.holds) in MOVES, f"{event} of {self.label}, which holds {self.holds.value}"
        self.holds = MOVES[event, self.holds]

    # ------------------------------------------------------------------ one microbatch

    @property
    def is_ready(self) -> bool:
        """Every parameter of the bucket has its gradient of this microbatch, or will have none."""
        return not self._microbatch.missing or self._microbatch.is_closed

    @property
    def is_closed(self) -> bool:
        """No further gradient is expected in this microbatch."""
        return self._microbatch.is_closed

    def close(self) -> None:
        """No further gradient is expected in this microbatch: what is missing counts as zeros."""
        self._microbatch.is_closed = True

    @property
    def has_unreduced(self) -> bool:
        """A gradient arrived in this microbatch that no reduction has taken yet."""
        return self._microbatch.whole is not None and self.holds not in IN_FLIGHT

    def add_gradient(self, piece: Piece, gradient: Tensor) -> None:
        """Take this rank's gradient of one parameter, flattened, in this microbatch."""
        self.finish_reduction()  # a second gradient of one step may find its predecessor's buffers still busy
        part = gradient[piece.parameter_start : piece.parameter_start + piece.numel]
        if self._sums_before_reducing:
            assert self._rows is not None
            self._wait_readers()
            target = self._rows.view(-1)[piece.start : piece.start + piece.numel]
            first = piece.index not in self._summed
            self._summed.add(piece.index)
            self._move("add")
        else:
            whole = self._room_for(piece, part)
            if whole is None:
                return
            target = whole[piece.start : piece.start + piece.numel]
            first = piece.index in self._microbatch.missing
        self._microbatch.missing -= {piece.index}
        if first and self._collectives.launches_together:
            self._microbatch.arrived.append((target, part))
            return
        self._take_arrived()
        target.copy_(part) if first else target.add_(part)

    def _take_arrived(self) -> None:
        """One launch brings what has arrived to where it belongs."""
        arrived, self._microbatch.arrived = self._microbatch.arrived, []
        if arrived:
            targets, parts = zip(*arrived, strict=True)
            torch._foreach_copy_(targets, parts)

    def local_sum(self, index: int) -> Tensor | None:
        """This rank's sum so far of one parameter's gradient, 1-D, where all of it is here and nothing was reduced yet."""
        piece = next((piece for piece in self.layout.pieces if piece.index == index), None)
        if piece is None or self.holds is not Holds.LOCAL_SUM or index not in self._summed:
            return None
        assert self._rows is not None
        self._take_arrived()
        return self._rows.view(-1)[piece.start : piece.start + piece.numel]

    def _room_for(self, piece: Piece, part: Tensor) -> Tensor | None:
        """Scratch for the microbatch's gradient; None where the bucket lies inside this one, and is reduced from there."""
        now = self._microbatch
        if now.whole is None:
            is_bucket = piece.numel == self.layout.numel and part.dtype == self._dtypes.reduce
            if is_bucket and not self._collectives.reads_in_place:
                now.whole, now.missing = part, frozenset()
                return None
            now.whole, now.is_scratch = self._borrow(self.layout.numel), True
            for start, stop in self.layout.padding:
                now.whole[start:stop].zero_()
        elif not now.is_scratch:  # a second gradient of one microbatch: autograd's own tensor is not ours to add to
            now.whole, now.is_scratch = self._borrow(self.layout.numel).copy_(now.whole), True
        return now.whole

    @property
    def _sums_before_reducing(self) -> bool:
        """Gradients are summed over microbatches first and over ranks once; what comes after that, like sharded ones."""
        return not self._policy.gradients.sharded and self.holds in (Holds.NOTHING, Holds.LOCAL_SUM)

    # ------------------------------------------------------------------ over ranks

    def reduce_gradients(self, is_last_microbatch: bool) -> bool:
        """Every gradient of the microbatch is here (a missing one counts as zeros): start the reduction.

        Returns whether one was started: unsharded gradients wait for the last microbatch.
        """
        self.finish_reduction()  # the microbatch's before may be in flight still, where no gradient has come since
        self._take_arrived()
        now, self._microbatch = self._microbatch, _Microbatch(self._everything)
        if self._sums_before_reducing:
            if not is_last_microbatch:
                return False
            rows = self._summed_rows()
        else:
            if now.whole is None:
                now.whole = self._borrow(self.layout.numel).zero_()
            elif now.missing:
                self._zero(now.whole, now.missing)
            rows = now.whole.view(self._shape)
        if self._collectives.predivide_factor != 1.0:  # into scratch: the rows may be autograd's own tensor
            divided = self._borrow(self.layout.numel).view_as(rows)
            rows = torch.div(rows, self._collectives.predivide_factor, out=divided)
        workspace_numel = self._collectives.workspace_numel(rows)
        workspace = self._borrow(workspace_numel) if workspace_numel else rows.new_empty(0)
        label = f"reduce-scatter of gradients of {self.label}"
        pending = self._collectives.reduce_scatter(rows, workspace, self.number, label)
        self._flight, self._scratch = _Flight(pending, self._scratch), []
        self._move("reduce")
        return True

    def _summed_rows(self) -> Tensor:
        assert self._rows is not None
        self._wait_readers()
        self._zero(self._rows.view(-1), self._everything - self._summed)
        if self._rows.dtype == self._dtypes.reduce:
            return self._rows
        return self._borrow(self.layout.numel).view(self._shape).copy_(self._rows)

    def finish_reduction(self) -> None:
        """Block until the mean over ranks, if any is on its way, is in this rank's shard; scratch goes back to the pool."""
        if self._flight is None:
            return
        self.wait_gather()  # it still reads the shard that is about to change, and another will follow
        slot, adds = self._own.gradient, self.holds is Holds.ADDING
        with slot.borrowed(self._accelerator, self._pool, read=adds, write=True) as own:
            self._flight.pending.finish(own, accumulate=adds)
            if slot.memory_in(self._accelerator) is None:
                self._own.squares = sum_of_squares(own)  # while it is here
        self._move("land")
        self._end_flight(self._flight)

    def _end_flight(self, flight: _Flight) -> None:
        self._read = flight.pending
        self._return_scratch(flight.scratch, _Readers(flight.pending) if flight.pending.has_readers else None)
        self._flight = None

    def _wait_readers(self) -> None:
        """The rows are about to be written to."""
        if self._read is not None:
            self._read.wait_readers()
            self._read = None

    def start_gather(self) -> None:
        """Where the optimizer is unsharded, every rank needs every row of the mean: once, unless it is changed."""
        if not self._policy.optimizer.sharded and self._gathering is None:
            assert self._rows is not None
            self._gathering = self._collectives.all_gather(
                self._rows, self.number, f"all-gather of gradients of {self.label}"
            )

    def wait_gather(self) -> None:
        """Block until what `start_gather` started has arrived."""
        if self._gathering is not None:
            self._wait_readers()
            self._gathering.wait()  # which raises again where it did before
            self._gathering = None

    def forget(self) -> None:
        """A new step begins, or this one broke off: nothing of it is wanted any longer."""
        self.wait_gather()  # it would write into the next step's sums
        if self._flight is not None:  # its transfers still write to the scratch
            scratch = self._borrow(self.layout.shard_numel, self._dtypes.accumulate)
            self._flight.pending.finish(scratch, accumulate=False)
            self._end_flight(self._flight)
        self._return_scratch(self._scratch)
        self._microbatch = _Microbatch(self._everything)
        self._summed.clear()
        for shard in self.shards:
            shard.gradient.empty()
        self._move("forget")

    def _borrow(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        scratch = self._pool.acquire(numel, dtype or self._dtypes.reduce)
        self._scratch.append(scratch)
        return scratch

    def _return_scratch(self, scratch: list[Tensor], after: Transfer | None = None) -> None:
        for one in scratch:
            self._pool.release(one, after)
        scratch.clear()

    def _zero(self, flat: Tensor, indices: frozenset[int]) -> None:
        for piece in self.layout.pieces:
            if piece.index in indices:
                flat[piece.start : piece.start + piece.numel].zero_()

    def tensors(self) -> list[Tensor]:
        """The gradients at rest that live, as far as they are the accelerator's memory."""
        slots = [shard.gradient for shard in self.shards]
        found = [slot.memory_in(self._accelerator) for slot in slots if slot.buffer is None or slot.buffer.nbytes]
        return [memory for memory in found if memory is not None]

    def buffers(self) -> list[FlatBuffer]:
        """Of these, the memory that can be given back, and has a content."""
        found = [shard.gradient.buffer for shard in self.shards if not shard.gradient.is_empty]
        return [buffer for buffer in found if buffer is not None]
