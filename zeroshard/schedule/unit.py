"""Owns a unit: the parameters that are unsharded together, their flat buffer and its buckets.

A user's parameter is always the object that the user created, with its name and true shape. The tensor that it shows,
and its class, depend on the unit's state (see appearance.py and classes.py in parameters/):

    SHARDED     a placeholder: one NaN expanded to the true shape. Shape, numel and dtype are right; a read of its values
                raises an error that names it
    GATHERING   still the placeholder
    UNSHARDED   a view of the flat buffer; in a storage of its own, if the buffer is never freed
    UPDATING    the view, in a class that makes readers wait until the all-gather of updated values has landed
    OFFLOADED   unsharded, at rest in CPU memory between steps: the placeholder, in a class that brings the values back
                before a read. This needs no other rank
    PARKED      the placeholder: the values at rest are elsewhere until `reload_states`

`UNIT_MOVES` has the moves between them, and each change of a unit's state goes through it. Besides its state, a unit has two
flags. While `is_pinned` is true (an `unsharded` block is open, or a state dict is being created or loaded), the unit
does not move to rest. While `is_held` is true (a graph that outlives its backward may read the unit), it is not
resharded.

The optimizer writes to shards, and the user to unsharded parameters. The user's values go to the shards, and to master
weights, before the optimizer steps and before the unsharded values leave. Where ranks wrote different values, the
values of each element's owner count.

    trace of a write           found by
    a version counter          `Appearance.collect_written`, at no cost
    another tensor as `.data`  `Appearance.adopt_new_data`, by its address, shape and strides
    none (through `.data`)     `ParameterBucket.save_hidden_writes`, which compares values; only if the user may have read `.data`
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.gradients.gradient_bucket import TAKEN_AT_ONCE, GradientBucket, Holds, Waiting
from zeroshard.layout.bucketing import Group
from zeroshard.layout.layout import Piece, lay_out, lay_out_whole
from zeroshard.parameters.appearance import Appearance
from zeroshard.parameters.classes import CONVERSIONS
from zeroshard.parameters.context import Context
from zeroshard.parameters.parameter_bucket import InCpuMemory, ParameterBucket
from zeroshard.policy import Place, Residency
from zeroshard.storage.base import Slot
from zeroshard.torch_private import grad_of


class UnitState(enum.Enum):
    """A state of a unit's parameters (see the module's docstring)."""

    SHARDED = "sharded"
    GATHERING = "an all-gather, or a copy from CPU memory, is under way"
    UNSHARDED = "whole and current"
    UPDATING = "whole, and updated values are under way"
    OFFLOADED = "whole in CPU memory"
    PARKED = "elsewhere until reload_states"


class UnitMove(enum.Enum):
    """A move of a unit from one `UnitState` to another. The value describes its occasion."""

    GATHER = "its values are needed"
    LAND = "its values are here"
    RESHARD = "this rank's shard is enough"
    OFFLOAD = "its values are in CPU memory"
    REFILL = "the step is about to fill its buffer"
    UPDATE = "the all-gather of updated values has started"
    PARK = "its memory is needed for something else"


UNIT_MOVES: dict[UnitState, dict[UnitMove, UnitState]] = {
    UnitState.SHARDED: {UnitMove.GATHER: UnitState.GATHERING, UnitMove.PARK: UnitState.PARKED},
    UnitState.GATHERING: {UnitMove.LAND: UnitState.UNSHARDED, UnitMove.RESHARD: UnitState.SHARDED},
    UnitState.UNSHARDED: {
        UnitMove.RESHARD: UnitState.SHARDED,
        UnitMove.OFFLOAD: UnitState.OFFLOADED,
        UnitMove.UPDATE: UnitState.UPDATING,
        UnitMove.PARK: UnitState.PARKED,
    },
    UnitState.UPDATING: {UnitMove.LAND: UnitState.UNSHARDED},
    UnitState.OFFLOADED: {
        UnitMove.GATHER: UnitState.GATHERING,
        UnitMove.REFILL: UnitState.UNSHARDED,
        UnitMove.PARK: UnitState.PARKED,
    },
    # A unit is parked in its place at rest: sharded, in CPU memory, or whole.
    UnitState.PARKED: {
        UnitMove.RESHARD: UnitState.SHARDED,
        UnitMove.OFFLOAD: UnitState.OFFLOADED,
        UnitMove.LAND: UnitState.UNSHARDED,
    },
}
"""For each state of a unit, the state to which each move leads. A missing move is a bug in zeroshard and raises an error."""

MOVES_TO_REST = (UnitMove.RESHARD, UnitMove.OFFLOAD, UnitMove.PARK)
"""The moves after which the flat buffer has no values: refused while a unit is pinned."""


class Unit:
    """A unit of parameters (see the module's docstring).

    Args:
        group: the parameters; all of one dtype, on one device, and all trainable or all frozen.
        first_bucket: the number of its first bucket.
        context: the objects that buckets share, with the policy of this group.

    Attributes:
        flat: the flat buffer, which has the parameters' values.
        layout: the parameters' places in the flat buffer, and the boundaries of buckets and shards.
        buckets: the parameters' buckets, in the order of the layout.
        gradients: the gradients' buckets, in the same order; none for frozen parameters.
        is_cut: whether the parameters are DTensors that are divided over the ranks of `Context.others`. If not, each of
            those ranks has the same whole parameters.
        comes_and_goes: whether the unsharded parameters have memory only while they are used.
    """

    def __init__(self, group: Group, first_bucket: int, context: Context) -> None:
        self.group = group
        self.label = group.label + group.kind
        self.named = group.named
        self._index_of = {id(entry.parameter): index for index, entry in enumerate(self.named)}
        self.module = group.module
        self.trainable = group.trainable
        self.policy = context.policy
        self.collectives = context.collectives
        self.others = context.others
        self.is_cut = not self.named[0].placement.is_whole
        self.sharded_at_rest = context.policy.parameters.sharded
        self._make_buckets(first_bucket, context)
        self.comes_and_goes = self.sharded_at_rest or self._cpu is not None
        is_one_launch = len(self.collectives.launches((0, 1))) == 1
        limit = math.inf if is_one_launch else TAKEN_AT_ONCE
        self.waiting = Waiting(len(self.named), limit)
        """Gradients that are not in their buckets yet. If one launch reduces all buckets, they wait for the last gradient."""
        self.used: set[int] = set()
        """Parameters that received a gradient on this rank since the last `forget_gradients`."""
        self.replaced_gradients: set[int] = set()
        """The parameters in `used` whose `grad` the user has set after the gradient was taken."""
        self.pins = 0
        """The number of open `unsharded` blocks."""
        self.undecided = 0
        """The number of these blocks that give a rank's changes to all ranks at their end."""
        self.state_dicts = 0
        """The number of state dicts that are being created or loaded. One that raised is counted until `refuse_pinned`."""
        self.is_held = False
        """Whether the unit stays unsharded for a graph, until a step, `zero_grad`, or a backward that leaves no graph."""
        self._live = context.live
        self.state = UnitState.UNSHARDED
        self._is_moving = False
        """Whether a move has begun and has not ended. It stays true after an exception inside, such as an interrupt."""
        views = [self.flat.view(start, e.shape) for start, e in zip(self.layout.starts, self.named, strict=True)]
        whole_class = context.distributed_class if self.named[0].is_distributed else context.whole_class
        assert whole_class is not None
        # A separate storage would not notice that the flat buffer's memory is freed.
        separate = self.flat.has_address and not self.comes_and_goes
        own_writes = [context.live.own_writes[id(entry.parameter)] for entry in self.named]
        self.appearance = Appearance(
            self.named, views, self, whole_class, own_writes, separate=separate, keeps_classes=group.is_of_own_class
        )
        self._written: set[int] = set()
        """The parameters that the user has written to since the last `spread_owners_values`, by index."""
        self._masters_wait = False
        """Whether parameters were written while master weights were parked."""
        self.flat.count_uses()  # not those of the tensors that parameters show or an optimizer updates
        self.appearance.show_first()
        self._count()
        self.reshard()
        self.offload()

    def _make_buckets(self, first_bucket: int, context: Context) -> None:
        """Create the flat buffer and the buckets, with rank 0's values. This takes memory for a second copy of the unit."""
        dtypes = context.dtypes(self.group.dtype)
        self.master_dtype = dtypes.master if self.trainable else dtypes.param
        numels = [entry.shape.numel() for entry in self.named]
        world_size = context.collectives.world_size
        if context.whole_parameters:
            self.layout = lay_out_whole(numels, world_size)
        else:
            self.layout = lay_out(numels, world_size, context.bucket_numel)
        whole = torch.zeros(self.layout.numel, dtype=dtypes.master, device=self.named[0].parameter.device)
        for start, entry in zip(self.layout.starts, self.named, strict=True):
            values = entry.local if entry.is_distributed else entry.parameter.detach()
            whole[start : start + entry.shape.numel()].copy_(values.reshape(-1))
        self.collectives.broadcast(whole)
        storages = context.storages
        self.flat = storages.accelerator.flat_buffer(
            f"parameters of {self.label}", self.layout.numel, dtypes.param, comes_and_goes=self.sharded_at_rest
        )
        self._cpu: InCpuMemory | None = None
        """The place of parameters that rest whole in CPU memory between steps."""
        slot: Slot | None = None
        is_elsewhere = self.policy.parameters.place is not Place.ACCELERATOR
        if not self.sharded_at_rest and is_elsewhere and storages.host is not storages.accelerator:
            slot = storages.host.slot(self.label, self.layout.numel, dtypes.param)
            self._cpu = InCpuMemory(self.flat, slot)
        self.buckets: list[ParameterBucket] = []
        self.gradients: list[GradientBucket] = []
        self._homes: list[list[tuple[GradientBucket, Piece]]] = [[] for _ in self.named]
        """For each parameter, the buckets that hold a part of its gradient, each with the place of this part."""
        for number, part in enumerate(self.layout.buckets, start=first_bucket):
            label = f"{self.label} [bucket {number}]"
            rows = self.flat.view(part.start, torch.Size((world_size, part.shard_numel)))
            values = whole[part.start : part.stop]
            parameters = ParameterBucket(
                number, label, part, dtypes, rows, values, slot, context, trainable=self.trainable
            )
            self.buckets.append(parameters)
            if self.trainable:
                gradients = GradientBucket(parameters, dtypes, context)
                self.gradients.append(gradients)
                for piece in part.pieces:
                    self._homes[piece.index].append((gradients, piece))

    def _begin_move(self) -> bool:
        """Record that a move begins. If the previous one did not end, first repair the state that it left, and return True."""
        if not self._is_moving:
            self._is_moving = True
            return False
        if self.sharded_at_rest and self.state is not UnitState.PARKED and not self.is_pinned:
            for bucket in self.buckets:
                bucket.abandon_unshard()
            self.state = UnitState.SHARDED
            self._count()
        if self.state is UnitState.UNSHARDED:
            self.appearance.show_current()
        elif self.state is UnitState.UPDATING:
            self.appearance.make_readers_wait()
        else:
            self.appearance.hide()
        if self.state is UnitState.SHARDED:
            self._free()
        return True

    def _move(self, move: UnitMove) -> None:
        """Change the state and show the user the parameters of the new state."""
        there = UNIT_MOVES[self.state].get(move)
        is_kept = self.is_pinned or (self.is_held and move is UnitMove.RESHARD)
        if there is None or (is_kept and move in MOVES_TO_REST):
            raise RuntimeError(
                f"a bug in zeroshard, please report it: {self.label} is {self.state.value}, with {self.pins} pins and "
                f"{self.state_dicts} state dicts, and was to make the move {move.name}."
            )
        before = self.state
        self.state = there
        self._count()
        if there is UnitState.UPDATING:
            self.appearance.make_readers_wait()
        elif before is UnitState.UPDATING:
            self.appearance.end_wait()
        elif there is UnitState.UNSHARDED:
            self.appearance.show_views()
        elif before is UnitState.UNSHARDED:
            self.appearance.hide()

    def _count(self) -> None:
        """If the unit is sharded at rest, count its elements as live while it is unsharded or arriving."""
        if self.sharded_at_rest and (self.is_arriving or self.state is UnitState.UNSHARDED):
            self._live.numels[self] = self.layout.numel
        else:
            self._live.numels.pop(self, None)

    @property
    def is_pinned(self) -> bool:
        """Whether the unit stays unsharded through calls of `reshard` and `offload`."""
        return self.pins > 0 or self.state_dicts > 0

    @property
    def is_arriving(self) -> bool:
        """Whether values are on their way to the flat buffer."""
        return self.state in (UnitState.GATHERING, UnitState.UPDATING)

    # ------------------------------------------------------------------ unshard and reshard

    def start_unshard(self) -> None:
        """Start to unshard the parameters, unless they are unsharded or arriving. Raise if they are parked."""
        if self.state is UnitState.PARKED:
            raise UsageError(f"{self.label} is parked by offload_states(): call reload_states() before it is used.")
        if self.state is UnitState.SHARDED or self._is_moving:
            self._begin_move()
        if self.state is UnitState.SHARDED:
            try:
                with self.collectives.together():
                    for bucket in self.buckets:
                        bucket.unshard(self._make_room)
            except BaseException:
                for bucket in self.buckets:
                    bucket.abandon_unshard()
                raise
            self._move(UnitMove.GATHER)
        elif self.state is UnitState.OFFLOADED:
            assert self._cpu is not None
            self._cpu.start()
            self._move(UnitMove.GATHER)
        self._is_moving = False

    def _make_room(self) -> None:
        if self.flat.nbytes:  # an earlier bucket's all-gather has asked for it
            return
        self.flat.allocate()
        for bucket in self.buckets:
            bucket.start_reload()

    def prefetch(self) -> None:
        """Start to read parameters from disk, since they are needed soon."""
        if self.state is UnitState.SHARDED:
            for bucket in self.buckets:
                assert bucket.block is not None
                bucket.block.prefetch()

    def unshard(self) -> None:
        """Make the parameters whole and current for their next use."""
        if self.state is UnitState.UNSHARDED and not self._is_moving:
            return
        self.start_unshard()
        if self.state is UnitState.UNSHARDED:
            return
        if self._cpu is not None:
            self._cpu.land()
        for bucket in self.buckets:
            bucket.wait_unsharded()
        self._begin_move()
        self._move(UnitMove.LAND)
        self._is_moving = False

    def settle_at_rest(self) -> None:
        """Wait for values in flight to their place at rest, so that nothing reads or writes that memory afterwards."""
        for bucket in self.buckets:
            bucket.settle()

    def settle(self) -> None:
        """Wait for updated values in flight, to the unsharded parameters or to their place at rest."""
        self.settle_at_rest()
        if not self.sharded_at_rest and self.is_arriving:
            self.unshard()

    def reshard(self) -> None:
        """Free the unsharded parameters after their use. Do nothing if the unit is unsharded at rest, pinned or held."""
        if self._is_moving and self._begin_move():
            self._is_moving = False
        if self.state is UnitState.SHARDED and self.flat.nbytes:  # a user's view kept the memory
            self._free()
        if (
            not self.sharded_at_rest
            or self.state in (UnitState.SHARDED, UnitState.PARKED)
            or self.is_pinned
            or self.is_held
        ):
            return
        for bucket in self.buckets:
            bucket.wait_unsharded()  # a transfer in flight may still be writing to the storage
        self.write_back()
        if not self._begin_move():  # a repair reshards the unit, too
            self._move(UnitMove.RESHARD)
            self._free()
        self._is_moving = False

    def _free(self) -> None:
        self.flat.free()
        if not self.flat.nbytes:
            self.appearance.outdate_saved()

    def offload(self) -> None:
        """Return parameters to CPU memory if they rest there: copy them if they may have changed, and free the flat buffer."""
        if not (self.is_arriving or self.state is UnitState.UNSHARDED) or not self._may_leave:
            return
        assert self._cpu is not None
        self.unshard()
        if not self.trainable:
            self.appearance.collect_written()
        elif self._look(scans=False):
            self._save_rows()
        # A write through `.data` leaves no trace. Frozen parameters, such as an EMA teacher's, may be updated in this way.
        self._move(UnitMove.OFFLOAD)
        self._cpu.leave(changed=not self._cpu.is_current or not self.trainable)

    @property
    def _may_leave(self) -> bool:
        """Whether the values may be offloaded."""
        return self._cpu is not None and not self.is_pinned

    def refuse_pinned(self, what: str) -> None:
        """Raise if a block that keeps the unit unsharded is open while `what` runs. Forget state dicts that raised."""
        self.state_dicts = 0
        if self.pins:
            raise UsageError(
                f"{what} was called inside zeroshard.unsharded() or a loop over named_weights(), which holds {self.label}. "
                "Call it outside."
            )

    def refuse_undecided(self, what: str) -> None:
        """Raise if a modifier rank's changes count only at the end of an open `unsharded`: `what` would store parts of them."""
        if self.undecided:
            raise UsageError(
                f"{what} was called inside unsharded(modifier_rank=...), where changes to {self.label} count only at the end. Call "
                "it after that block; inside, read with model.state_dict() or sharded.consolidated_state_dict()."
            )

    def refuse_parked(self, what: str) -> None:
        if self._live.parked:
            raise UsageError(f"{what} {self.label} needs states that are parked: call reload_states() first.")

    def park(self, *, parameters: bool) -> None:
        """Prepare to park model states. With `parameters`, park the parameters too: they then show placeholders."""
        self.refuse_pinned("offload_states()")
        if not parameters:
            return
        self.is_held = False  # torch refuses a graph from before: its saved parameters are outdated
        self.reshard()
        self.write_back()  # otherwise values that the user wrote or assigned through `.data` would be lost
        self.offload()
        self._move(UnitMove.PARK)

    def unpark(self) -> None:
        """Return a parked unit to its state at rest. The model states must be in their slots again."""
        if self._masters_wait:
            self._masters_wait = False
            for bucket in self.buckets:
                bucket.masters_from_rests()
        if self.state is not UnitState.PARKED:
            return
        if self.sharded_at_rest:
            self._move(UnitMove.RESHARD)
        elif self._may_leave:
            self._move(UnitMove.OFFLOAD)
        else:
            self._move(UnitMove.LAND)

    def release(self) -> None:
        """Return every parameter to the user, whole and in a storage of its own."""
        self.unshard()
        self.appearance.release()
        self._live.numels.pop(self, None)

    # ------------------------------------------------------------------ the user's writes

    def written(self) -> set[int]:
        """Return the parameters that the user wrote to on this rank, by index, if they are unsharded at rest.

        Writes that left a trace are not stored yet: all ranks first get the owners' values. Otherwise, master weights would lose
        digits.
        """
        if not self.sharded_at_rest and self.state is UnitState.UNSHARDED:
            # If each step gathers the owners' values over all ranks that have these parameters, `write_back` finds writes
            # without a trace early enough.
            self._look(scans=not self.policy.optimizer.sharded or self.others.world_size > 1)
        return self._written

    def _look(self, *, scans: bool) -> bool:
        """Add the user's writes on this rank to `_written`. Return whether any left a trace.

        Args:
            scans: whether to compare values if no write left a trace, and the user may have read `data`.
        """
        new = self.appearance.collect_written()
        if scans and not new and self._live.data_was_read and not self._live.parked:
            for bucket in self.buckets:
                if bucket.save_hidden_writes():
                    self._written |= {piece.index for piece in bucket.layout.pieces}
        self._written |= new
        if self._written:
            self._outdate_cpu_copy()
        return bool(new)

    def _outdate_cpu_copy(self) -> None:
        """Record that the values in CPU memory, if there are any, are no longer current."""
        if self._cpu is not None:
            self._cpu.is_current = False

    def _save_rows(self) -> None:
        """Copy unsharded values to the slots and the master weights. Parked master weights get them in `unpark`."""
        for bucket in self.buckets:
            bucket.save_rows(masters=not self._live.parked)
        self._masters_wait |= bool(self._live.parked)

    def write_back(self) -> None:
        """Copy unsharded values that the user may have written: to their place at rest, and to the master weights."""
        if self.state is not UnitState.UNSHARDED:
            return
        if self.sharded_at_rest:
            if self.appearance.collect_written():
                self._save_rows()
            return
        if self.trainable and self._look(scans=True):
            self._save_rows()
        self.appearance.adopt_new_data()
        if self._cpu is None:
            return
        for bucket in self.buckets:
            # Parameters that are their own master weights are stored, so that the user's writes persist when the buffer is freed.
            for shard, master in bucket.masters.items():
                if master is bucket.rests[shard]:
                    master.write(bucket.rows[shard])
        if not self.trainable:
            self._cpu.slot.write(self.flat.tensor)

    def spread_owners_values(self) -> None:
        """Give all ranks the owner's value of each element, after a write on any rank. Every rank must call it."""
        if self.is_arriving or self.state is UnitState.OFFLOADED:
            self.unshard()
        self.appearance.collect_written()
        self._written.clear()
        self._outdate_cpu_copy()
        for bucket in self.buckets:
            label = f"all-gather of written {bucket.label}"
            self.collectives.all_gather(bucket.rows, bucket.number, label).wait()
            self._broadcast_first_replica(bucket)
            bucket.save_rows()
            bucket.broadcast_masters(None if self.is_cut else self.others)

    def broadcast_from(self, source: int) -> None:
        """Give rank `source`'s values of the unsharded parameters to all ranks. Every rank must call it."""
        self._outdate_cpu_copy()
        self.appearance.collect_written()  # tensors that were assigned as `.data` are copied into the rows first
        for bucket in self.buckets:
            self._broadcast_first_replica(bucket)
            self.collectives.broadcast(bucket.rows, source)
            bucket.save_rows()

    def _broadcast_first_replica(self, bucket: ParameterBucket) -> None:
        """Broadcast whole parameters over the other dimensions, from the first rank of these."""
        if not self.is_cut:
            self.others.broadcast(bucket.rows)

    def load_masters(self, updated: Iterable[int] | None = None) -> None:
        """Copy new master weights to the parameters. Outdate graphs of those `updated` (default: all). All ranks must call it."""
        self.appearance.outdate_graphs(updated)
        if self.is_arriving or self.state is UnitState.OFFLOADED:
            self.unshard()
        self._outdate_cpu_copy()
        for bucket in self.buckets:
            bucket.load_masters(regather=self.state is UnitState.UNSHARDED)

    def written_since(self, versions: Sequence[int]) -> set[int]:
        """Return the indices of parameters that this rank wrote to since `versions`. If they are sharded, do not store writes."""
        self.appearance.adopt_new_data()
        written = self.appearance.written_since(versions)
        if written and self.sharded_at_rest:
            self.appearance.collect_written()
        return written

    # ------------------------------------------------------------------ the user's reads and gradients (see parameters/classes.py)

    def is_summed_here(self, index: int) -> bool:
        """Return whether this rank holds a sum over microbatches of a parameter's gradient that is not reduced yet."""
        return any(bucket.holds is Holds.LOCAL_SUM for bucket, _ in self._homes[index])

    def before_read(self, parameter: Tensor, what: str) -> None:
        """Make the values current for the operation `what`, if that does not require other ranks. Otherwise raise."""
        if not self.sharded_at_rest and self.state is not UnitState.PARKED:
            self.unshard()
            return
        fqn = self.named[self._index_of[id(parameter)]].fqn
        if self.state is UnitState.PARKED:
            raise UsageError(f"{fqn} is parked by offload_states(): call reload_states() before it is used.")
        more = ""
        if what in CONVERSIONS:
            more = " To convert the whole model (model.to, model.half), do so before shard(), which fixes its dtypes."
        raise UsageError(
            f"{fqn} is sharded at rest, and `{what}` needs its values while its module does not run. Read or write inside "
            "`with zeroshard.unsharded(module):` on every rank (to write, with modifier_rank=0). In another module's forward, use "
            f"zeroshard.borrow(module, parameter). For files: sharded.save, export.{more}"
        )

    def deep_copy(self, parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary copy with the true values. Copies of the unit's other parameters go into `memo`.

        Every rank must call it for sharded parameters.
        """
        if id(parameter) not in self._index_of:  # a copy of a copy
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        if self.state is UnitState.PARKED:
            self.before_read(parameter, "deepcopy")
        was_offloaded = self.state is UnitState.OFFLOADED
        with self.collectives.operation("deepcopy"):
            self.unshard()
        new = [entry for entry in self.named if id(entry.parameter) not in memo]  # ordinary ones may have been copied
        for entry in new:
            memo[id(entry.parameter)] = nn.Parameter(entry.parameter.detach().clone(), entry.parameter.requires_grad)
        self.reshard()
        if was_offloaded:
            self.offload()
        for entry in new:
            memo[id(entry.parameter)].__dict__.update(copy.deepcopy(entry.parameter.__dict__, memo))
        copied = memo[id(parameter)]
        assert isinstance(copied, nn.Parameter)
        return copied

    def index_of(self, parameter: Tensor) -> int:
        return self._index_of[id(parameter)]

    def is_taken(self, index: int) -> bool:
        """Return whether a parameter's `grad` shows neither a sum on this rank nor, for any parameter here, what the user set."""
        if index not in self.used or self.replaced_gradients:
            return False
        for bucket, _ in self._homes[index]:  # noqa: SIM110 (torch's clipping asks four times for each parameter)
            if bucket.holds is Holds.LOCAL_SUM:
                return False
        return True

    def taken_gradient(self, parameter: Tensor) -> str | None:
        """Return the parameter's fqn if its gradient of this step was taken out of `grad`, and the user has set no other."""
        index = self._index_of.get(id(parameter))
        if index is None or index not in self.used or index in self.replaced_gradients:
            return None
        return self.named[index].fqn

    def local_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's sum over the microbatches so far, if the rank holds it in one piece and in the parameter's dtype.

        Writes to the returned tensor take effect.
        """
        index = self._index_of.get(id(parameter))
        if index is None:
            return None
        entry = self.named[index]
        if not self._homes[index]:  # a parameter without elements
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        for bucket, _ in self._homes[index]:
            whole = bucket.local_sum(index)
            if whole is not None and whole.numel() == entry.shape.numel():
                return entry.as_parameter(whole.view(entry.shape)) if whole.dtype == parameter.dtype else None
        return None

    @property
    def operations(self) -> Any:
        """The operations on gradients in this step (see `Live`); None before the first, and if the user has set a `grad`."""
        return None if self.replaced_gradients else self._live.operations

    def gradient_operation(self, parameter: Tensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on the mean gradient; NotImplemented if shards cannot run it. Every rank must call it."""
        return self._live.gradient_operation((self, self._index_of[id(parameter)]), name, args, kwargs)

    def replace_gradient(self, parameter: Tensor) -> None:
        """Record that the user set the parameter's `grad`, to None or to another tensor."""
        index = self._index_of.get(id(parameter))
        if index is None or index not in self.used:
            return
        self.replaced_gradients.add(index)
        if self.replaced_gradients >= self.used:
            self._live.drop_gradients()

    def dropped_gradients(self) -> set[int]:
        """Return the parameters in `used` whose `grad` the user has set to None on this rank: the step leaves them out."""
        return {index for index in self.replaced_gradients if grad_of(self.named[index].parameter) is None}

    def refuse_replaced_gradients(self, indices: Iterable[int] | None = None) -> None:
        """Raise if the user set `grad`, to a tensor or None, of a parameter whose gradient is already in the mean.

        Args:
            indices: the parameters in question; default: those that `replace_gradient` recorded.
        """
        if indices is None:
            indices = self.replaced_gradients
        for index in indices:
            fqn = self.named[index].fqn
            raise UsageError(
                f"{fqn}.grad was set after a backward of this step had given it a gradient: by DDP or accelerator.prepare(model) "
                "around the sharded model (leave that out), by zero_grad() of a module (call the optimizer's), or by hand (set it "
                "before any backward; set None after the last one, to leave the parameter out of the step; or set the mean "
                f'over ranks with sharded.states.set("{fqn}", "gradients", value)).'
            )

    # ------------------------------------------------------------------ gradients

    def buckets_of_waiting(self) -> list[GradientBucket]:
        """Return the buckets of the waiting gradients."""
        return [bucket for index in self.waiting.gradients for bucket, _ in self._homes[index]]

    def take_gradients(self) -> None:
        """Pass the waiting gradients to their buckets, which copy them or send them in place. Keep no reference to them."""
        by_bucket: dict[GradientBucket, list[tuple[Piece, Tensor]]] = {}
        waiting = self.waiting.take()
        self.used.update(waiting)
        for index, gradient in waiting.items():
            flat = (gradient.detach() if gradient.requires_grad else gradient).flatten()
            for bucket, piece in self._homes[index]:
                by_bucket.setdefault(bucket, []).append((piece, flat))
        for bucket, gradients in by_bucket.items():
            bucket.add_gradients(gradients)

    @property
    def has_all_gradients(self) -> bool:
        """Whether every parameter has its gradient of this microbatch, so that the backward no longer reads the unit."""
        return self.trainable and len(self.waiting.received) == len(self.named)

    def forget_gradients(self) -> None:
        self.waiting.take()
        self.used.clear()
        self.replaced_gradients.clear()
        self.waiting.received.clear()
        self.appearance.show_taken(())

    # ------------------------------------------------------------------ the step

    def begin_step(self) -> None:
        """Prepare for the step: wait for arriving values and write the shown parameters to their place at rest."""
        self.is_held = False
        self.appearance.show_taken(())
        self.settle()
        if self.trainable:
            self.write_back()
            if self.state is UnitState.UNSHARDED and self._may_leave:
                assert self._cpu is not None
                self._move(UnitMove.OFFLOAD)
                self._cpu.leave(changed=False)  # all of it is gathered again after the step
        self.offload()

    def sync_parameters(self) -> None:
        """Show the updated values after the optimizer's step or make readers wait for them."""
        self.reshard()
        self._outdate_cpu_copy()
        if self.state is UnitState.OFFLOADED:
            self.flat.allocate()
            self._move(UnitMove.REFILL)
        with self.collectives.together():
            for bucket in self.buckets:
                bucket.sync()
        if not self.sharded_at_rest and any(bucket.gathering is not None for bucket in self.buckets):
            self._move(UnitMove.UPDATE)


def make_units(groups: Sequence[Group], context: Context, first_bucket: int = 0) -> list[Unit]:
    """Create a unit for each group, with buckets numbered from `first_bucket` on. Every rank must call it."""
    units = list[Unit]()
    trained = [sum(entry.shape.numel() for entry in group.named) if group.trainable else 0 for group in groups]
    room = context.policy.offload_optimizer.ratio * sum(trained)
    for group, numel in zip(groups, trained, strict=True):
        policy = context.policy
        if group.stays:
            policy = replace(policy, parameters=Residency(sharded=False, place=Place.ACCELERATOR))
        if numel <= room:
            room -= numel
        else:  # optimizer states beyond the ratio stay there, too
            optimizer = replace(policy.optimizer, place=Place.ACCELERATOR)
            gradients = replace(policy.gradients, place=Place.ACCELERATOR)
            policy = replace(policy, optimizer=optimizer, gradients=gradients)
        unit = Unit(group, first_bucket, replace(context, policy=policy))
        units.append(unit)
        first_bucket += len(unit.buckets)
    return units
