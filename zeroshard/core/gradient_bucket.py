"""Owns the gradients of one bucket: collected from autograd, summed over microbatches, reduced to the mean over ranks.

For a bucket of n elements on one of W ranks (S = n / W), unsharded gradients are a tensor [W, S]: this rank's sum between
microbatches, then the mean. Sharded gradients are the mean [S] of this rank's shard. A microbatch's gradients are
collected in scratch, or taken as autograd returned them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor, nn

from zeroshard.core.context import Context
from zeroshard.core.layout import Piece
from zeroshard.core.norm import sum_of_squares
from zeroshard.core.parameter_bucket import ParameterBucket, memories_in
from zeroshard.core.storage.base import Slot, Storage
from zeroshard.core.storage.buffers import FlatBuffer
from zeroshard.core.storage.transfers import Transfer
from zeroshard.core.transport.base import Reduction, Work
from zeroshard.policy import DTypes
from zeroshard.torch_private import GRAD, foreach_copy_, labelled, never_compiled

TAKEN_AT_ONCE = 1 << 16
"""The most elements of gradients that may wait: few enough that a core's cache still has them when they are copied."""


@dataclass(eq=False)
class Shard:
    """A shard of a bucket, as the optimizer sees it: slots of `shard_numel` elements.

    Attributes:
        number: its number in the bucket.
        rest: the shard as stored between steps: parameters in the forward's dtype, or master weights that are rounded
            to that dtype.
        master: the values that the optimizer updates; `rest` itself if the dtype is the same.
        gradient: the mean over ranks.
        step: the storage in which the optimizer steps.
        home: the storage of the optimizer's states.
        is_shown: whether the user reads and may write the master weights directly.
        squares: the gradient's sum of squares, if the gradient left the accelerator and has not changed since.
    """

    number: int
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


class Holds(enum.Enum):
    """The contents that a bucket may have in a step."""

    __hash__ = object.__hash__  # Enum's own is a call in Python

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
"""The moves of a bucket, and the state after each. (Sums on this rank are for policies that do not shard gradients.)"""


@dataclass(slots=True)
class Microbatch:
    """This rank's contribution in one microbatch.

    Attributes:
        arrived: the parameters whose gradient has arrived.
        is_closed: whether no more gradients will arrive, so that missing ones count as zeros.
        whole: [n] in scratch; or a part of the tensor that autograd returned, which must not be written to.
        is_scratch: whether `whole` is scratch.
    """

    arrived: set[int] = field(default_factory=set)
    is_closed: bool = False
    whole: Tensor | None = None
    is_scratch: bool = False


@dataclass
class _Flight:
    """A reduction in flight. Its scratch is busy until it lands.

    Attributes:
        stays: whether its sum stays on the accelerator, since another microbatch follows.
        before: scratch for the earlier sum, to which this one is added, and the transfer that fills it.
    """

    reduction: Reduction
    scratch: list[Tensor] = field(default_factory=list)
    stays: bool = False
    before: tuple[Tensor, Transfer] | None = None


class Waiting:
    """The gradients of a unit that wait until its buckets take them together, and the parameters that gave one.

    Passing one gradient through hooks, schedule, unit and bucket takes a CPU as long as copying some 10,000 elements, so
    small gradients are passed together. The first one passes through all but the bucket. Later ones join it by a short path,
    which only stores them. Other events (the unit's last gradient, the end of the backward, a second gradient of a
    parameter, `zero_grad`) find them here.

    A parameter's hook refers to this object, so it must not hold parameters, or buckets or units, which own them.

    Args:
        count: the number of the unit's parameters.
        limit: the number of elements that may wait.
    """

    __slots__ = ("_count", "_limit", "_numel", "backward", "gradients", "received")

    def __init__(self, count: int, limit: float) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.received: set[int] = set()
        """The parameters that gave a gradient since the backward of the module's latest call began."""
        self._count = count
        self._limit = limit
        self._numel = 0
        self.backward: Callable[[], object] = lambda: None
        """Returns None once the backward that added the first gradient has ended or was aborted: no gradient may join then."""

    def add(self, index: int, gradient: Tensor) -> bool:
        """Keep the gradient of parameter `index`. Return whether it is time to take all waiting gradients."""
        self.gradients[index] = gradient
        self.received.add(index)
        self._numel += gradient.numel()
        return self._numel >= self._limit or len(self.received) == self._count

    def joining(
        self, index: int, otherwise: Callable[[Tensor], None], ordinary: type[nn.Parameter]
    ) -> Callable[[Tensor], None]:
        """Return a hook for parameter `index` that adds its gradient to the waiting ones, if no other code must handle it.

        Args:
            otherwise: the hook that handles other gradients: the first of several, the unit's last, one that reaches the limit, a
                second one of a parameter, or one that is refused.
            ordinary: the class of parameters that have their values.
        """
        gradients = self.gradients
        received = self.received
        ahead_of_last = self._count - 1
        take_out = GRAD.__get__
        put = GRAD.__set__
        strided = torch.strided

        def join(parameter: Tensor) -> None:
            # One frame that uses only local names: between two hooks a backward evicts the interpreter's data from caches.
            is_open = gradients and type(parameter) is ordinary and self.backward() is not None
            if is_open and len(received) < ahead_of_last:
                gradient = take_out(parameter)
                # A waiting parameter may have left `received`: the backward of its module's next call has begun.
                is_first = index not in received and index not in gradients
                if is_first and gradient is not None and gradient.layout is strided:
                    numel = self._numel + gradient.numel()
                    if numel < self._limit:
                        put(parameter, None)
                        gradients[index] = gradient
                        received.add(index)
                        self._numel = numel
                        return
            otherwise(parameter)

        return never_compiled(join)  # a backward may run inside a compiled function

    def take(self) -> dict[int, Tensor]:
        taken = dict(self.gradients)
        self.gradients.clear()
        self._numel = 0
        self.backward = lambda: None
        return taken


class GradientBucket:
    """The gradients of one bucket of parameters (see the module's docstring)."""

    def __init__(self, parameters: ParameterBucket, dtypes: DTypes, context: Context) -> None:
        self.number = parameters.number
        self.label = parameters.label
        self._label_of_reduction = f"reduce-scatter of gradients of {self.label}"
        self._label_of_wait = f"wait for {self._label_of_reduction}"
        self.layout = parameters.layout
        self._dtypes = dtypes
        self._policy = context.policy
        self.collectives = context.collectives
        self._averaged = context.data_world_size
        self._predivide_factor = context.precision.predivide_factor
        self._pool = context.pool
        self._accelerator = context.storages.accelerator
        self._shape = parameters.rows.shape
        self._rows: Tensor | None = None
        """[W, S], if gradients are not sharded."""
        if not self._policy.gradients.sharded:
            self._rows = torch.zeros(self._shape, dtype=dtypes.accumulate, device=parameters.rows.device)
        storages = context.storages
        self.shards: list[Shard] = []
        """The shards that this rank updates: its own, or all if the optimizer is unsharded."""
        for number, master in parameters.masters.items():
            label = f"gradients of {self.label}"
            if self._rows is None:
                gradient = storages.gradient_slot(self._policy, label, self.layout.shard_numel, dtypes.accumulate)
            else:
                gradient = self._accelerator.around(label, self._rows[number])
            rest = parameters.rests[number]
            shard = Shard(
                number, self.layout.shard_pieces(number), rest, master, gradient, storages.step(self._policy),
                storages.optimizer(self._policy), is_shown=master is rest and parameters.block is None,
            )  # fmt: skip
            self.shards.append(shard)
            if number == parameters.own_shard:
                self._own = shard
        self._piece_of = {piece.index: piece for piece in self.layout.pieces}
        self._everything = self._piece_of.keys()
        self._is_reduced_at_once = len(self._everything) == 1
        self._sizes, self._is_piece = _cuts(self.layout.numel, self.layout.pieces)
        self._stop = sum(piece.numel for piece in self.layout.pieces)
        """The end of the pieces, if there is no padding between them (`_has_no_gaps`)."""
        self._has_no_gaps = not any(self._sizes[:-1:2])
        self.holds = Holds.NOTHING
        self.microbatch = Microbatch()
        self._summed: set[int] = set()
        """The parameters that are in this rank's sum."""
        self._scratch: list[Tensor] = []
        self.flight: _Flight | None = None
        """The reduction in flight, if there is one."""
        self._sum: Tensor | None = None
        """The mean over ranks so far, on the accelerator until the last microbatch, if its place is elsewhere."""
        self._gathering: Work | None = None

    def _move(self, event: str) -> None:
        assert (event, self.holds) in MOVES, f"{event} of {self.label}, which holds {self.holds.value}"
        self.holds = MOVES[event, self.holds]

    # ------------------------------------------------------------------ one microbatch

    @property
    def is_complete(self) -> bool:
        """Whether every parameter's gradient of this microbatch has arrived."""
        return len(self.microbatch.arrived) == len(self._everything)

    def add_gradients(self, flats: Mapping[int, Tensor]) -> None:
        """Add this rank's gradients of several parameters in this microbatch, each whole and flattened, by index.

        No reduction of the bucket may be in flight: its scratch would be busy.
        """
        now = self.microbatch
        if self._sums_before_reducing:
            assert self._rows is not None
            whole = self._rows.view(-1)
            before = self._summed
            self._move("add")
        else:
            if now.whole is None:
                if self._is_reduced_at_once and self._takes_over(flats):
                    return
                now.whole = self._borrow(self.layout.numel)
                now.is_scratch = True
                for start, stop in self.layout.padding:
                    now.whole[start:stop].zero_()
            elif not now.is_scratch:  # a second gradient: autograd's own tensor must not be written to
                now.whole = self._borrow(self.layout.numel).copy_(now.whole)
                now.is_scratch = True
            whole = now.whole
            before = now.arrived
        indices = flats.keys() & self._everything
        self._put(whole, flats, indices, indices & before)
        now.arrived |= indices
        if before is not now.arrived:
            self._summed |= indices

    def _put(self, whole: Tensor, flats: Mapping[int, Tensor], indices: Set[int], added: Set[int]) -> None:
        """Copy gradients to their places in `whole`, or add those of `added` to the values there."""
        if len(indices) == len(self._everything) and not added:  # the usual case, in few calls
            parts = [_part(piece, flats[piece.index]) for piece in self.layout.pieces]
            if self._has_no_gaps and parts[0].dtype == whole.dtype:
                torch.cat(parts, out=whole[: self._stop])
            else:
                foreach_copy_([*compress(whole.split_with_sizes(self._sizes), self._is_piece)], parts)
            return
        pieces = [self._piece_of[index] for index in indices - added]
        if pieces:
            targets = [whole[piece.start : piece.start + piece.numel] for piece in pieces]
            foreach_copy_(targets, [_part(piece, flats[piece.index]) for piece in pieces])
        for index in added:
            piece = self._piece_of[index]
            whole[piece.start : piece.start + piece.numel].add_(_part(piece, flats[index]))

    def _takes_over(self, flats: Mapping[int, Tensor]) -> bool:
        """Reduce the bucket from autograd's own tensor, if the gradient of its only parameter can be sent as it is."""
        (piece,) = self.layout.pieces
        part = _part(piece, flats[piece.index])
        if piece.numel != self.layout.numel or part.dtype != self._dtypes.reduce:
            return False
        self.microbatch.whole = part
        self.microbatch.arrived.add(piece.index)
        return True

    def local_sum(self, index: int) -> Tensor | None:
        """Return this rank's sum, 1-D, of the bucket's part of a parameter's gradient; None if no unreduced sum exists."""
        if self.holds is not Holds.LOCAL_SUM or index not in self._summed:
            return None
        assert self._rows is not None
        piece = self._piece_of[index]
        return self._rows.view(-1)[piece.start : piece.start + piece.numel]

    @property
    def _sums_before_reducing(self) -> bool:
        """Whether microbatches are summed before a reduction. Microbatches after it are reduced like sharded gradients."""
        return not self._policy.gradients.sharded and self.holds in (Holds.NOTHING, Holds.LOCAL_SUM)

    # ------------------------------------------------------------------ over ranks

    @property
    def offloaded_nbytes(self) -> int:
        """The bytes of this rank's mean if it does not rest on the accelerator, otherwise 0."""
        gradient = self._own.gradient
        return 0 if gradient.memory_in(self._accelerator) is not None else gradient.nbytes

    def reduce_gradients(self, is_last_microbatch: bool, keeps_sum: bool) -> bool:
        """Start the reduction of the microbatch's gradients. Missing ones count as zeros.

        Return whether it was started: unsharded gradients wait for the last microbatch. No other reduction may be in flight.

        Args:
            keeps_sum: whether a mean that rests elsewhere stays on the accelerator until the last microbatch.
        """
        now = self.microbatch
        self.microbatch = Microbatch()
        if self._sums_before_reducing:
            if not is_last_microbatch:
                return False
            assert self._rows is not None
            self._zero(self._rows.view(-1), self._everything - self._summed)
            rows = self._rows
            if rows.dtype != self._dtypes.reduce:
                rows = self._borrow(self.layout.numel).view(self._shape).copy_(rows)
        else:
            if now.whole is None:
                now.whole = self._borrow(self.layout.numel).zero_()
            elif len(now.arrived) < len(self._everything):
                self._zero(now.whole, self._everything - now.arrived)
            rows = now.whole.view(self._shape)
        factor = self._predivide_factor
        if factor != 1.0:  # into scratch: the rows may be autograd's own tensor
            rows = torch.div(rows, factor, out=self._borrow(self.layout.numel).view_as(rows))
        workspace_numel = self.collectives.workspace_numel(rows)
        workspace = self._borrow(workspace_numel) if workspace_numel else rows.new_empty(0)
        divisor = self._averaged / factor
        label = self._label_of_reduction
        with labelled(label):
            reduction = self.collectives.reduce_scatter(rows, workspace, self.number, label, divisor)
        stays = keeps_sum and not is_last_microbatch and self.offloaded_nbytes > 0
        self.flight = _Flight(reduction, self._scratch, stays)
        self._scratch = []
        self._move("reduce")
        if self.holds is Holds.ADDING and self._sum is None and self.offloaded_nbytes and self._pool.spare_nbytes:
            gradient = self._own.gradient
            before = self._pool.acquire(gradient.numel, gradient.dtype)
            self.flight.before = before, gradient.read(before)
        return True

    def finish_reduction(self) -> None:
        """Block until the mean of the reduction in flight, if any, has arrived on this rank. Return its scratch to the pool."""
        if self.flight is not None:
            with labelled(self._label_of_wait):
                self._finish_reduction(self.flight)

    def _finish_reduction(self, flight: _Flight) -> None:
        self.wait_gather()  # it still reads the shard that is about to change, and another gather will follow
        slot = self._own.gradient
        adds = self.holds is Holds.ADDING
        memory = slot.memory_in(self._accelerator)
        # The mean lands in one of three places: on the accelerator until the last microbatch, in scratch that already has the
        # earlier sum, or in its slot, through scratch that is borrowed only now. See [Note: room] in reductions.py.
        if flight.stays or self._sum is not None:
            if self._sum is None:
                self._sum = self._accelerator.room(slot.numel, slot.dtype)
                if adds:
                    slot.read(self._sum).wait(self._sum.device)
            flight.reduction.finish(self._sum, accumulate=adds)
        elif flight.before is not None:
            own, reading = flight.before
            flight.before = None  # if the write fails, the landing is tried again, and reads again
            after: Transfer = reading
            try:
                reading.wait(own.device)
                flight.reduction.finish(own, accumulate=True)
                self._own.squares = sum_of_squares(own)
                after = slot.write(own)
            finally:
                self._pool.release(own, after)
        elif memory is not None:
            slot.fill()
            flight.reduction.finish(memory, accumulate=adds)
            slot.version += 1
        else:
            with slot.borrowed(self._accelerator, self._pool, read=adds, write=True) as own:
                flight.reduction.finish(own, accumulate=adds)
                self._own.squares = sum_of_squares(own)  # before it leaves the accelerator
        self._move("land")
        self._end_flight(flight)
        if not flight.stays:
            self.write_sum()

    def write_sum(self) -> None:
        """Write a mean that stayed on the accelerator to its slot at rest."""
        if self._sum is not None:
            self._own.squares = sum_of_squares(self._sum)
            self._own.gradient.write(self._sum)
            self._sum = None

    def _end_flight(self, flight: _Flight) -> None:
        self._return_scratch(flight.scratch)
        self.flight = None
        if flight.before is not None:
            self._pool.release(*flight.before)

    @property
    def gathers_mean(self) -> bool:
        """Whether every rank needs all of the mean's rows, since the optimizer is unsharded."""
        return not self._policy.optimizer.sharded

    def start_gather(self) -> None:
        """Start to gather the mean's rows, once, if every rank needs them."""
        if self.gathers_mean and self._gathering is None:
            assert self._rows is not None
            label = f"all-gather of gradients of {self.label}"
            self._gathering = self.collectives.all_gather(self._rows, self.number, label)

    def wait_gather(self) -> None:
        """Block until the gather that `start_gather` started, if one is in flight, has arrived."""
        if self._gathering is not None:
            self._gathering.wait()  # a wait that failed raises its error again
            self._gathering = None

    def forget(self) -> None:
        """Drop all gradients, since a new step begins or this one was aborted."""
        self.wait_gather()  # it would write into the next step's sums
        if self.flight is not None:  # its transfers are still writing to the scratch
            scratch = self._borrow(self.layout.shard_numel, self._dtypes.accumulate)
            self.flight.reduction.finish(scratch, accumulate=False)
            self._end_flight(self.flight)
        self._return_scratch(self._scratch)
        self._sum = None
        self.microbatch = Microbatch()
        self._summed.clear()
        for shard in self.shards:
            shard.gradient.empty()
        self._move("forget")

    def _borrow(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        scratch = self._pool.acquire(numel, dtype or self._dtypes.reduce)
        self._scratch.append(scratch)
        return scratch

    def _return_scratch(self, scratch: list[Tensor]) -> None:
        while scratch:  # each leaves the list first: after an interrupt, none is returned twice
            self._pool.release(scratch.pop(0))

    def _zero(self, flat: Tensor, indices: Set[int]) -> None:
        for index in indices:
            piece = self._piece_of[index]
            flat[piece.start : piece.start + piece.numel].zero_()

    def tensors(self) -> list[Tensor]:
        """Return the gradients at rest that are allocated in the accelerator's memory."""
        slots = [shard.gradient for shard in self.shards]
        allocated = [slot for slot in slots if slot.buffer is None or slot.buffer.nbytes]
        return memories_in(self._accelerator, allocated)

    def buffers(self) -> list[FlatBuffer]:
        """Return the buffers of gradients at rest that have content and can be freed."""
        found = [shard.gradient.buffer for shard in self.shards if not shard.gradient.is_empty]
        return [buffer for buffer in found if buffer is not None]


def _cuts(numel: int, pieces: Sequence[Piece]) -> tuple[list[int], list[bool]]:
    """Return the sizes of a bucket's pieces and of the padding between them, in order, and for each whether it is a piece."""
    sizes: list[int] = []
    is_piece: list[bool] = []
    stop = 0
    for piece in pieces:
        sizes += [piece.start - stop, piece.numel]
        is_piece += [False, True]
        stop = piece.start + piece.numel
    return [*sizes, numel - stop], [*is_piece, False]


def _part(piece: Piece, gradient: Tensor) -> Tensor:
    """Return the piece's part of a flattened gradient."""
    if piece.numel == gradient.numel():
        return gradient
    return gradient[piece.parameter_start : piece.parameter_start + piece.numel]
