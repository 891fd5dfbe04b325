"""Owns a unit: the parameters that are unsharded together, their flat buffer and its buckets.

A user's parameter is always the object that the user created, with its name and true shape. The tensor that it shows,
and its class, depend on the unit's state (see appearance.py and classes.py):

    AT_REST     a placeholder: one NaN expanded to the true shape. Shape, numel and dtype are right
    GATHERING   still the placeholder
    UNSHARDED   a view of the flat buffer; in a storage of its own, if the buffer is never freed
    UPDATING    the view, in a class that makes readers wait until the all-gather of updated values has landed
    PARKED      the placeholder: the values at rest are elsewhere until `reload_states`

How values come depends on what rests. Shards of the ranks come by an all-gather: a read at rest raises an error that names the
parameter. Whole parameters in CPU memory come by a copy, which needs no other rank: a read at rest waits for them. Other
parameters rest unsharded.

`UNIT_MOVES` has the moves between them, and each change of a unit's state goes through it. Besides its state, a unit has two
flags. While `is_pinned` is true (an `unsharded` block is open, or a state dict is being created or loaded), the unit
does not move to rest. While `is_held` is true (a graph that outlives its backward may read the unit), it is not
resharded.

The optimizer writes to shards, and the user to unsharded parameters. writes.py finds the user's writes, and takes
them to the shards.
"""

from __future__ import annotations

import copy
import enum
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.appearance import Appearance
from zeroshard.core.bucketing import Group
from zeroshard.core.classes import CONVERSIONS, quantised_class
from zeroshard.core.context import Context
from zeroshard.core.gradient_bucket import TAKEN_AT_ONCE, GradientBucket, Holds, Waiting
from zeroshard.core.layout import Piece, lay_out, lay_out_whole
from zeroshard.core.module_hooks import Away
from zeroshard.core.parameter_bucket import InCpuMemory, ParameterBucket
from zeroshard.core.storage.base import Slot
from zeroshard.core.writes import Writes
from zeroshard.errors import UsageError
from zeroshard.policy import DTypes, Place, Residency
from zeroshard.torch_private import grad_of, held_in_python, in_backward, storage_id


class UnitState(enum.Enum):
    """A state of a unit's parameters (see the module's docstring)."""

    __hash__ = object.__hash__  # Enum's own is a call in Python

    AT_REST = "at rest"
    GATHERING = "an all-gather, or a copy from CPU memory, is under way"
    UNSHARDED = "whole and current"
    UPDATING = "whole, and updated values are under way"
    PARKED = "elsewhere until reload_states"


class UnitMove(enum.Enum):
    """A move of a unit from one `UnitState` to another. The value describes its occasion."""

    __hash__ = object.__hash__  # Enum's own is a call in Python

    GATHER = "its values are needed"
    LAND = "its values are here"
    RESHARD = "what rests is enough"
    REFILL = "the step is about to fill its buffer"
    UPDATE = "the all-gather of updated values has started"
    PARK = "its memory is needed for something else"


UNIT_MOVES: dict[UnitState, dict[UnitMove, UnitState]] = {
    UnitState.AT_REST: {
        UnitMove.GATHER: UnitState.GATHERING,
        UnitMove.REFILL: UnitState.UNSHARDED,
        UnitMove.PARK: UnitState.PARKED,
    },
    UnitState.GATHERING: {UnitMove.LAND: UnitState.UNSHARDED, UnitMove.RESHARD: UnitState.AT_REST},
    UnitState.UNSHARDED: {
        UnitMove.RESHARD: UnitState.AT_REST,
        UnitMove.UPDATE: UnitState.UPDATING,
        UnitMove.PARK: UnitState.PARKED,
    },
    UnitState.UPDATING: {UnitMove.LAND: UnitState.UNSHARDED},
    # Units that rest unsharded are parked so, too.
    UnitState.PARKED: {UnitMove.RESHARD: UnitState.AT_REST, UnitMove.LAND: UnitState.UNSHARDED},
}
"""For each state of a unit, the state to which each move leads. A missing move is a bug in zeroshard and raises an error."""

MOVES_TO_REST = (UnitMove.RESHARD, UnitMove.PARK)
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
        index_of: the index of each parameter in `named`, by its `id`.
        counted_shard: the shard of each bucket whose gradients this rank counts in norms; None if another rank does.
        data_world_size: the number of ranks with different batches, over which gradients are averaged.
        sharded_at_rest: whether only shards rest, so that every rank must take part when values come.
        comes_and_goes: whether the unsharded parameters have memory only while they are used.
    """

    def __init__(self, group: Group, first_bucket: int, context: Context) -> None:
        self.group = group
        self.label = group.label + group.kind
        self.named = group.named
        self.parameters = [entry.parameter for entry in group.named]
        self.index_of = {id(entry.parameter): index for index, entry in enumerate(self.named)}
        self.module = group.module
        self.trainable = group.trainable
        self.policy = context.policy
        self.collectives = context.collectives
        self.others = context.others
        self._places = context.places
        self.data_world_size = context.data_world_size
        self.is_cut = group.is_cut
        # An unsharded optimizer has the other ranks' shards, too. Parameters that are whole on every rank of another dimension
        # count only on the first of them.
        self.counted_shard = self.collectives.shard if self.is_cut or self.others.rank == 0 else None
        self.sharded_at_rest = context.policy.parameters.sharded
        self._make_buckets(first_bucket, context)
        self.comes_and_goes = self.sharded_at_rest or self._cpu is not None
        is_one_launch = len(self.collectives.launches((0, 1))) == 1
        limit = math.inf if is_one_launch else TAKEN_AT_ONCE
        self.waiting = Waiting(len(self.named), limit)
        """Gradients that are not in their buckets yet. If one launch reduces all buckets, they wait for the last gradient."""
        self.pins = 0
        """The number of open `unsharded` blocks."""
        self.checked = 0
        """The number of these blocks that report changes at their end, or give them to all ranks: all but borrowings."""
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
        whole_class = quantised_class(type(self.parameters[0])) if group.is_quantised else whole_class
        assert whole_class is not None
        # A separate storage would not notice that the flat buffer's memory is freed.
        separate = self.flat.has_address and not self.comes_and_goes
        self.away = Away()
        self.appearance = Appearance(
            self.named,
            views,
            self,
            whole_class,
            context.live,
            separate=separate,
            keeps_classes=group.is_of_own_class or (group.is_quantised and not self.comes_and_goes),
        )
        self.writes = Writes(
            self.appearance, self.buckets, self._cpu, context,
            is_cut=self.is_cut, trainable=self.trainable, has_address=self.flat.has_address,
        )  # fmt: skip
        self.flat.count_uses()  # not those of the tensors that parameters show or an optimizer updates
        for entry, view in zip(self.named, self.appearance.views, strict=True):
            # Data before the class, which `_show` sets: setting data ends a parameter of `sharded_init`.
            self.appearance.show_one(entry, view)
        self._show()
        self._count()
        self.reshard()

    def _make_buckets(self, first_bucket: int, context: Context) -> None:
        """Create the flat buffer and the buckets, with rank 0's values. This takes memory for a second copy of the unit."""
        dtypes = context.dtypes(self.group.dtype, in_fp32=self.group.in_fp32)
        if self.group.is_quantised:
            dtypes = DTypes(*[self.group.dtype] * 5)
        self.master_dtype = dtypes.master if self.trainable else dtypes.param
        numels = [entry.shape.numel() for entry in self.named]
        world_size = context.collectives.world_size
        if context.whole_parameters:
            self.layout = lay_out_whole(numels, world_size, context.alignment)
        else:
            self.layout = lay_out(numels, world_size, context.bucket_numel, alignment=context.alignment)
        whole = torch.zeros(self.layout.numel, dtype=dtypes.master, device=self.named[0].parameter.device)
        for start, entry in zip(self.layout.starts, self.named, strict=True):
            values = entry.local if entry.is_distributed else entry.parameter.detach()
            whole[start : start + entry.shape.numel()].copy_(values.reshape(-1))
        self.collectives.broadcast(whole)
        storages = context.storages
        self.flat = storages.accelerator.flat_buffer(f"parameters of {self.label}", self.layout.numel, dtypes.param)
        self._cpu: InCpuMemory | None = None
        """The place of parameters that rest whole in CPU memory."""
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
        may_be_here = self.state in (UnitState.UNSHARDED, UnitState.UPDATING)
        # What was sharded at rest is there still. Unsharded values may be newer than those in CPU memory.
        is_at_rest = self.sharded_at_rest if may_be_here else self.comes_and_goes
        if is_at_rest and self.state is not UnitState.PARKED and not self.is_pinned:
            self._abandon()
            self.state = UnitState.AT_REST
            self._count()
        if self.state is UnitState.UNSHARDED:
            self._show()
        else:
            self._hide()
        if self.state is UnitState.AT_REST:
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
        if before is UnitState.UPDATING:
            self.away.end()
            self.appearance.make_readers_wait(False)
            self.writes.record()
        elif there is UnitState.UNSHARDED:
            try:
                self.writes.refuse_lost()
            finally:
                self._show()
        elif before is UnitState.UNSHARDED:
            self._hide()

    def _show(self) -> None:
        """Show values that are here."""
        self.away.end()
        self.appearance.show()
        self.writes.record()

    def _hide(self) -> None:
        """Hide values that leave, or that are about to be updated."""
        self.away.begin()
        if self.state is UnitState.UPDATING:
            self.appearance.make_readers_wait(True)
        else:
            self.appearance.hide()
            self.writes.record()

    def _count(self) -> None:
        """Count the elements of a unit that comes and goes as live while it is unsharded or arriving."""
        if self.comes_and_goes and (self.is_arriving or self.state is UnitState.UNSHARDED):
            self._live.numels[self] = self.layout.numel
        else:
            self._live.numels.pop(self, None)

    @property
    def is_pinned(self) -> bool:
        """Whether the unit stays unsharded through calls of `reshard`."""
        return self.pins > 0 or self.state_dicts > 0

    def pin(self, count: int, *, checks: bool, decides: bool) -> set[int]:
        """Count one more block of access (`count` is 1), or one less (-1). Return the writes through `data` that are lost then.

        Args:
            checks: whether the block reports changes at its end, or gives them to all ranks.
            decides: whether it gives them to all ranks.
        """
        self.pins += count
        self.checked += count * checks
        self.undecided += count * decides
        written = self.writes.watch(self.sharded_at_rest and self.checked > 0)
        return set() if decides else written

    @property
    def is_away(self) -> bool:
        """Whether the parameters do not show their values now."""
        return self.state is not UnitState.UNSHARDED

    @property
    def is_arriving(self) -> bool:
        """Whether values are on their way to the flat buffer."""
        return self.state in (UnitState.GATHERING, UnitState.UPDATING)

    # ------------------------------------------------------------------ unshard and reshard

    def start_unshard(self) -> None:
        """Start to unshard the parameters, unless they are unsharded or arriving. Raise if they are parked."""
        if self.state is UnitState.PARKED:
            raise UsageError(f"{self.label} is parked by offload_states(): call reload_states() before it is used.")
        if self.state is UnitState.AT_REST or self._is_moving:
            self._begin_move()
        if self.state is UnitState.AT_REST:
            try:
                self.flat.allocate()
                if self._cpu is not None:
                    self._cpu.start()
                else:
                    self._gather()
            except BaseException:
                self._abandon()
                raise
            self._move(UnitMove.GATHER)
        self._is_moving = False

    def _gather(self) -> None:
        for bucket in self.buckets:
            bucket.start_reload()
        if len(self.buckets) == 1:
            self.buckets[0].unshard()
        else:
            with self.collectives.together():
                for bucket in self.buckets:
                    bucket.unshard()

    def _land(self) -> None:
        """Wait for values in flight to the flat buffer."""
        if self._cpu is not None:
            self._cpu.land()
        for bucket in self.buckets:
            bucket.wait_unsharded()

    def _abandon(self) -> None:
        """Abandon values in flight to the flat buffer: afterwards nothing writes to it."""
        if self._cpu is not None:
            self._cpu.land()
        for bucket in self.buckets:
            bucket.abandon_unshard()

    def prefetch(self) -> None:
        """Start to read parameters from disk, since they are needed soon."""
        if self.state is UnitState.AT_REST and self._cpu is None:
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
        self._land()
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
        if self.state is UnitState.AT_REST and self.flat.nbytes:  # a user's view kept the memory
            self._free()
        if (
            not self.comes_and_goes
            or self.state in (UnitState.AT_REST, UnitState.PARKED)
            or self.is_pinned
            or self.is_held
        ):
            return
        if self.state is UnitState.UPDATING:
            self.unshard()
        self._land()  # a transfer in flight may still be writing to the storage
        if self._cpu is not None and self.state is UnitState.UNSHARDED and any(self.writes.given_data()):
            return  # autograd may have saved the user's tensor itself: the next step takes its values
        self.write_back()
        if self._cpu is not None and self.state is UnitState.UNSHARDED:
            self._cpu.keep()
        if not self._begin_move():  # a repair reshards the unit, too
            self._move(UnitMove.RESHARD)
            self._free()
        self._is_moving = False

    def _free(self) -> None:
        self.flat.free()
        if not self.flat.nbytes:
            self.writes.outdate_saved()

    def refuse_pinned(self, what: str) -> None:
        """Raise if a block that keeps the unit unsharded is open while `what` runs. Forget state dicts that raised."""
        self.state_dicts = 0
        if self.pins:
            raise UsageError(
                f"{what} was called inside zeroshard.unsharded() or a loop over named_weights(), which holds {self.label}. "
                "Call it outside."
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
        self.write_back()  # otherwise values that the user wrote or assigned through `.data` would be lost
        self.reshard()
        self._move(UnitMove.PARK)

    def unpark(self) -> None:
        """Return a parked unit to its state at rest. The model states must be in their slots again."""
        self.writes.unpark()
        if self.state is not UnitState.PARKED:
            return
        self._move(UnitMove.RESHARD if self.comes_and_goes else UnitMove.LAND)

    def release(self) -> None:
        """Return every parameter to the user, whole and in a storage of its own."""
        self.unshard()
        self.appearance.release()
        self._live.numels.pop(self, None)

    # ------------------------------------------------------------------ values that change (see writes.py for the user's)

    def written(self, before_copies: Callable[[], object]) -> set[int]:
        """Return the parameters that the user wrote to on this rank, by index, if they are unsharded at rest.

        Writes that left a trace are not stored yet: all ranks first get the owners' values. Otherwise, master weights would lose
        digits.

        Args:
            before_copies: see `Writes.adopt_new_data`.
        """
        if not self.sharded_at_rest and self.state is UnitState.UNSHARDED:
            # If each step gathers the owners' values over all ranks that have these parameters, `write_back` finds writes
            # without a trace early enough.
            scans = not self.policy.optimizer.sharded or self.others.world_size > 1
            self.writes.look(scans=scans, before_copies=before_copies)
        return self.writes.found

    def write_back(self, *, has_looked: bool = False) -> None:
        """Copy values that the user may have written, if they are here: see `Writes.keep`."""
        if self.state is UnitState.UNSHARDED:
            self.writes.keep(has_looked=has_looked)

    def come_for_changes(self) -> None:
        """Bring values, which are about to change, into the flat buffer, if they rest in CPU memory or are arriving."""
        if self.is_arriving or (self.state is UnitState.AT_REST and self._cpu is not None):
            self.unshard()

    def load_masters(self, updated: Sequence[int] | None = None) -> None:
        """Copy new master weights to the parameters. Outdate graphs of those `updated` (default: all). All ranks must call it."""
        self.writes.outdate_graphs(updated)
        was_at_rest = self.state is UnitState.AT_REST
        self.come_for_changes()
        self.writes.outdate_cpu_copy()
        for bucket in self.buckets:
            bucket.load_masters(regather=self.state is UnitState.UNSHARDED)
        if was_at_rest:
            self.reshard()

    def refuse_unfrozen(self, optimized: set[int]) -> None:
        """Raise if a frozen parameter of the optimizer now takes gradients, which would not be reduced.

        (A parameter that required a gradient from the start is frozen only if the optimizer does not list it.)
        """
        for entry in self.named:
            if entry.parameter.requires_grad and id(entry.parameter) in optimized:
                raise UsageError(
                    f"{entry.fqn} was unfrozen, and would not train: call update_trainable() (on every rank) after "
                    "changing requires_grad."
                )

    # ------------------------------------------------------------------ the user's reads and gradients (see core/classes.py)

    @property
    def used(self) -> set[int]:
        """The parameters that received a gradient on this rank in this step, by index."""
        return self._live.step.used[self]

    @property
    def replaced_gradients(self) -> set[int]:
        """The parameters in `used` whose `grad` the user has set after the gradient was taken."""
        return self._live.step.replaced[self]

    def is_summed_here(self, index: int) -> bool:
        """Return whether this rank holds a sum over microbatches of a parameter's gradient that is not reduced yet."""
        return any(bucket.holds is Holds.LOCAL_SUM for bucket, _ in self._homes[index])

    def before_read(self, parameter: Tensor, what: str) -> None:
        """Make the values current for the operation `what`, if that does not require other ranks. Otherwise raise."""
        if not self.sharded_at_rest and self.state is not UnitState.PARKED:
            self.refuse_elsewhere()
            self.unshard()
            if self._cpu is not None and not in_backward():
                self.is_held = True  # a graph outside of all forwards, such as a penalty's, saves the parameter itself
            return
        fqn = self.named[self.index_of[id(parameter)]].fqn
        if self.state is UnitState.PARKED:
            raise UsageError(f"{fqn} is parked by offload_states(): call reload_states() before it is used.")
        if what in CONVERSIONS:
            raise UsageError(
                f"{fqn} is sharded at rest, and `{what}` was called for it. Convert the whole model (model.to, model.half) before "
                "shard(), which fixes its dtypes; one value inside `with zeroshard.unsharded(module):` on every rank."
            )
        if _is_inside_ddp():
            raise UsageError(
                f"DistributedDataParallel was put around a sharded model, and {fqn} is sharded at rest. Leave "
                "DistributedDataParallel (accelerator.prepare(model)) out: zeroshard averages the gradients itself."
            )
        raise UsageError(
            f"{fqn} is sharded at rest, and `{what}` needs its values while its module does not run. Read or write inside "
            "`with zeroshard.unsharded(module):` on every rank (to write, with modifier_rank=0). In another module's forward, use "
            "zeroshard.borrow(module, parameter). For files: sharded.save, export."
        )

    def refuse_elsewhere(self) -> None:
        """Raise if a read would move the unit while other code trains: in a second thread, or in the handler of a signal."""
        if not self.is_away:
            return
        trainer = self._live.trainer
        if _interrupts_core():
            where = "a signal's handler, which has interrupted their transfer. Set a flag there, and read in the loop"
        elif not in_backward() and runs_beside(trainer):
            where = "a second thread, and only the thread that steps waits for them. Read there, and pass values on"
        else:
            return
        raise UsageError(
            f"{self.label} was read while its updated values are on their way, in {where}. To read at any time, copy "
            "parameter.detach().clone() after each step."
        )

    def deep_copy(self, parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary copy with the true values. Copies of the unit's other parameters go into `memo`.

        Every rank must call it for sharded parameters.
        """
        if id(parameter) not in self.index_of:  # a copy of a copy
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        if self.state is UnitState.PARKED:
            self.before_read(parameter, "deepcopy")
        was_at_rest = self.state is UnitState.AT_REST
        with self.collectives.operation("deepcopy"):
            self.unshard()
        new = [entry for entry in self.named if id(entry.parameter) not in memo]  # ordinary ones may have been copied
        for entry in new:
            if self.group.is_quantised:
                copy.deepcopy(entry.parameter, memo)  # in its own way, now that it has its values
                continue
            memo[id(entry.parameter)] = nn.Parameter(entry.parameter.detach().clone(), entry.parameter.requires_grad)
        if was_at_rest:
            self.reshard()
        for entry in [] if self.group.is_quantised else new:
            memo[id(entry.parameter)].__dict__.update(copy.deepcopy(entry.parameter.__dict__, memo))
        copied = memo[id(parameter)]
        assert isinstance(copied, nn.Parameter)
        return copied

    def is_taken(self, index: int) -> bool:
        """Return whether a parameter's `grad` shows neither a sum on this rank nor, for any parameter here, what the user set."""
        if index not in self.used or self.replaced_gradients or not self._homes[index]:  # no bucket: it has no elements
            return False
        for bucket, _ in self._homes[index]:  # noqa: SIM110 (torch's clipping asks four times for each parameter)
            if bucket.holds is Holds.LOCAL_SUM:
                return False
        return True

    def show_taken(self) -> None:
        """Show the gradients that were taken in this step."""
        self.appearance.show_taken(self.used)
        is_summed = any(bucket.holds is Holds.LOCAL_SUM for bucket in self.gradients)
        if len(self.used) == len(self.named) and not (self.replaced_gradients or is_summed):
            self.appearance.show_all_taken()

    def taken_gradient(self, parameter: Tensor) -> str | None:
        """Return the parameter's fqn if its gradient of this step was taken out of `grad`, and the user has set no other."""
        index = self.index_of.get(id(parameter))
        if index is None or index not in self.used or index in self.replaced_gradients:
            return None
        return self.named[index].fqn

    def local_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's sum over the microbatches so far, if the rank holds it in one piece and in the parameter's dtype.

        Writes to the returned tensor take effect.
        """
        index = self.index_of.get(id(parameter))
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

    def gradient_operation(self, parameter: Tensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on the mean gradient; NotImplemented if shards cannot run it. Every rank must call it."""
        return self._live.gradient_operation((self, self.index_of[id(parameter)]), name, args, kwargs)

    def replace_gradient(self, parameter: Tensor) -> None:
        """Record that the user set the parameter's `grad`, to None or to another tensor."""
        index = self.index_of.get(id(parameter))
        if index is None or index not in self.used:
            return
        self.replaced_gradients.add(index)
        self.appearance.taken.clear()
        self._live.step.gradients_replaced()
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

    def buckets_of(self, indices: Iterable[int]) -> Iterable[GradientBucket]:
        """Return the buckets that hold a part of the gradients of these parameters."""
        if len(self.gradients) == 1:
            return self.gradients
        return dict.fromkeys(bucket for index in indices for bucket, _ in self._homes[index])

    def take_gradients(self) -> None:
        """Pass the waiting gradients to their buckets, which copy them or send them in place. Keep no reference to them."""
        waiting = self.waiting.take()
        self.used.update(waiting)
        flats = {
            index: (gradient.detach() if gradient.requires_grad else gradient).flatten()
            for index, gradient in waiting.items()
        }
        waiting.clear()
        for bucket in self.buckets_of(flats):
            bucket.add_gradients(flats)

    @property
    def used_flags(self) -> bytes:
        """One byte for each parameter: 1 if it received a gradient on this rank in this step."""
        if len(self.used) == len(self.named):
            return b"\1" * len(self.named)
        return bytes(index in self.used for index in range(len(self.named)))

    @property
    def has_all_gradients(self) -> bool:
        """Whether every parameter has its gradient of this microbatch, so that the backward no longer reads the unit."""
        return self.trainable and len(self.waiting.received) == len(self.named)

    def forget_gradients(self) -> None:
        """Drop the waiting gradients and show none. The step's facts go with the step."""
        self.waiting.take()
        self.waiting.received.clear()
        self.appearance.taken.clear()
        self.appearance.show_taken(())

    # ------------------------------------------------------------------ the step

    def begin_step(self, *, has_looked: bool) -> None:
        """Prepare for the step: wait for arriving values and write the shown parameters to their place at rest."""
        self.is_held = False
        self.appearance.show_taken(())
        self.settle()
        if self.trainable:
            self.write_back(has_looked=has_looked)
        self.reshard()

    def sync_parameters(self) -> None:
        """Show the updated values after the optimizer's step or make readers wait for them."""
        self.reshard()
        self.writes.outdate_cpu_copy()
        if self.state is UnitState.AT_REST and self._cpu is not None:
            self.flat.allocate()
            self._move(UnitMove.REFILL)
        if len(self.buckets) == 1:
            self.buckets[0].sync()
        else:
            with self.collectives.together():
                for bucket in self.buckets:
                    bucket.sync()
        if not self.sharded_at_rest and any(bucket.gathering is not None for bucket in self.buckets):
            self._move(UnitMove.UPDATE)


_CORE = tuple(
    str(Path(__file__).parent / name)
    for name in (
        f"transport{os.sep}", f"storage{os.sep}", "gradient_bucket.py", "norm.py", "reductions.py", "appearance.py", "writes.py",
        "classes.py", "context.py", "parameter_bucket.py", "step.py", "unit.py",
    )
)  # fmt: skip
"""The beginnings of the names of files whose functions never call code of the user's."""


def refuse_undecided(units: Sequence[Unit], what: str) -> None:
    """Raise if `what` would store parts of changes: of a swap, or of an open block that decides about them at its end."""
    refuse_kept_data(units, what)
    for unit in units:
        if unit.undecided:
            raise UsageError(
                f"{what} was called inside unsharded(modifier_rank=...), where changes to {unit.label} count only at the end. Call "
                "it after that block; inside, read with model.state_dict() or sharded.consolidated_state_dict()."
            )


def refuse_kept_data(units: Iterable[Unit], what: str) -> None:
    """Raise if parameters were given other `data`, and their own is kept, as by a swap: `what` would overwrite what is kept."""
    given = list[str]()
    kept = dict[str, Tensor | None]()
    for unit in units:
        if unit.is_away:
            continue
        others, own, is_swap = unit.writes.exchanged()
        given += others
        kept |= own
        if is_swap:
            break
    else:
        if not len(kept) == len(given) > 1:
            return
        of_python = held_in_python([own for own in kept.values() if own is not None])
        if any(own is not None and storage_id(own) not in of_python for own in kept.values()):
            return  # only a graph keeps it
    raise UsageError(
        f"{next(iter(kept))} was given other `data`, and {what} would copy it to the memory of what it showed before, which "
        "is still in use (by aliases such as `kept = p.data`). Exchange values with copies, "
        "kept = p.detach().clone() and p.copy_(other), or delete what is kept."
    )


def _is_inside_ddp() -> bool:
    """Return whether a call comes from DistributedDataParallel."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.parallel.distributed":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _interrupts_core() -> bool:
    """Return whether the caller's caller is code of the user's that has interrupted a function of the core."""
    frame = sys._getframe(1)
    is_of_user = False
    while frame is not None:
        is_of_core = frame.f_code.co_filename.startswith(_CORE)
        if is_of_core and is_of_user:
            return True
        is_of_user = is_of_user or not is_of_core
        frame = frame.f_back  # type: ignore[assignment]
    return False


def runs_beside(trainer: int) -> bool:
    """Return whether this is not the thread that trains, and that one may go on at any time.

    It may not while it waits in Python's own code for another thread, as in `thread.join()` or `future.result()`.
    """
    if trainer == threading.get_ident() or not is_alive(trainer):
        return False
    frame = sys._current_frames().get(trainer)
    return frame is None or not frame.f_code.co_filename.endswith(_WAITING)


_WAITING = tuple(os.sep + name for name in ("threading.py", "queue.py", "selectors.py"))
"""Files of Python's in which a thread waits for others."""


def is_alive(thread: int) -> bool:
    """Return whether a thread with this identifier runs."""
    return any(one.ident == thread for one in threading.enumerate())


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
        own = replace(context, policy=policy)
        unit = Unit(group, first_bucket, own.of_experts() if group.is_cut else own)
        units.append(unit)
        first_bucket += len(unit.buckets)
    return units
