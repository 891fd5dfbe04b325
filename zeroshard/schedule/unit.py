"""Owns a unit: the parameters that are unsharded together, their flat buffer and its buckets. Called by schedule.

A user's parameter is always the ordinary named `nn.Parameter` that the user made, with its true shape. What it looks at, and which
class it is of meanwhile, depends on the unit's state (see parameters/shown.py):

    UNSHARDED   a view of the flat buffer
    ARRIVING    sharded at rest: still the placeholder. Unsharded at rest: the view, but of the class that makes readers wait
                until the all-gather of the updated values has landed
    SHARDED     a placeholder: one NaN expanded to the true shape. Shape, numel and dtype are right; whoever asks for values gets an
                error that names it
    OFFLOADED   unsharded, at rest in CPU memory between steps: the placeholder, of the class whose readers bring the
                values back first. No other rank is needed for that
    PARKED      the placeholder: what rests is elsewhere until `reload_states`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.gradients.gradient_bucket import GradientBucket
from zeroshard.gradients.shard import Shard
from zeroshard.layout.bucketing import Group
from zeroshard.layout.layout import lay_out, lay_out_whole
from zeroshard.parameters.away import InCpuMemory, ShardedAway
from zeroshard.parameters.context import BucketSpec, Context
from zeroshard.parameters.hidden_writes import follow_hidden_writes
from zeroshard.parameters.parameter_bucket import ParameterBucket
from zeroshard.policy import DTypes, Place
from zeroshard.schedule.appearance import Appearance
from zeroshard.schedule.rounded import lost_writes, refuse_lost
from zeroshard.schedule.states import State
from zeroshard.storage.base import Slot


class Unit:
    """See the module's docstring.

    Args:
        group: the parameters; all of one dtype, on one device, and all trainable or all frozen.
    """

    def __init__(self, group: Group, dtypes: DTypes, first_bucket: int, context: Context) -> None:
        self.label, self.named = group.label, group.named
        self.modules: tuple[nn.Module, ...] = (group.module,)
        self.trainable, self.policy, self.collectives = group.trainable, context.policy, context.collectives
        self.sharded_at_rest = context.policy.parameters.sharded
        self.master_dtype = dtypes.master if self.trainable else dtypes.param
        world_size = context.collectives.world_size
        numels = [entry.shape.numel() for entry in self.named]
        self.layout = (
            lay_out_whole(numels, world_size)
            if context.whole_parameters
            else lay_out(numels, world_size, context.bucket_numel)
        )
        whole = self._collect(dtypes.master, context)
        self.flat = context.flat_buffer(self.label, self.layout.numel, dtypes.param)
        cpu_slot = self._cpu_slot(dtypes.param, context)
        self.buckets: list[ParameterBucket] = []
        self.gradients: list[GradientBucket] = []
        for number, layout in enumerate(self.layout.buckets, start=first_bucket):
            spec = BucketSpec(number, f"{self.label} [bucket {number}]", layout, dtypes, self.trainable)
            rows = self.flat.rows(layout.start, layout.numel, world_size)
            self.buckets.append(ParameterBucket(spec, rows, whole[layout.start : layout.stop], cpu_slot, context))
            if self.trainable:
                self.gradients.append(GradientBucket(spec, self.buckets[-1], context))
        self._away = (
            ShardedAway(self.flat, self.buckets, context.live, context.collectives)
            if self.sharded_at_rest
            else None if cpu_slot is None else InCpuMemory(self.flat, cpu_slot)
        )  # fmt: skip
        self._homes = [
            [(bucket, piece) for bucket in self.layout.buckets for piece in bucket.pieces if piece.index == index]
            for index in range(len(self.named))
        ]
        self._gradient_of = dict(zip(self.layout.buckets, self.gradients, strict=False))
        self._received: set[int] = set()
        self.used: set[int] = set()
        """Parameters that received a gradient on this rank since the last `forget_gradients`."""
        self.replaced_gradients: set[int] = set()  # of these, whose `grad` the user has set since
        self._written: set[int] = set()
        self.pins = 0
        self.is_held = False
        """A graph that outlives the present backward may read it (`create_graph=True`): it is not given back until one ends."""
        self.is_parked = False
        """Some of its model states are away until `reload_states`."""
        self._masters_wait = False  # parameters were written while master weights were parked
        self._state_before = State.UNSHARDED
        self.state = State.UNSHARDED
        views = [self.flat.view(start, e.shape) for start, e in zip(self.layout.starts, self.named, strict=True)]
        self.appearance = Appearance(self, views, dtypes.param, context.whole_class)
        self.appearance.show_views()
        self.reshard()
        self.offload()

    def _cpu_slot(self, dtype: torch.dtype, context: Context) -> Slot | None:
        """Where unsharded parameters rest between steps, if not on the accelerator."""
        residency, storages = context.policy.parameters, context.storages
        if residency.sharded or residency.place is Place.ACCELERATOR or storages.host is storages.accelerator:
            return None
        return storages.host.slot(self.label, self.layout.numel, dtype)

    def _collect(self, dtype: torch.dtype, context: Context) -> Tensor:
        """The unit's parameters, as rank 0 has them, one after another. One unit whole is what start-up costs."""
        device = self.named[0].parameter.device
        whole = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        for start, entry in zip(self.layout.starts, self.named, strict=True):
            whole[start : start + entry.shape.numel()].copy_(entry.parameter.detach().reshape(-1))
        context.collectives.broadcast(whole)
        return whole

    # ------------------------------------------------------------------ together, and given back

    def start_unshard(self, *, to_compute: bool = False) -> None:
        """Start to bring the parameters together, if they are not. See `unshard`."""
        if self.state is State.PARKED:
            raise UsageError(f"{self.label} is parked by offload_states(): call reload_states() before it is used.")
        if self.state in (State.SHARDED, State.OFFLOADED):
            assert self._away is not None
            self._away.start(to_compute=to_compute)
            self.state = State.ARRIVING

    def prefetch(self) -> None:
        """The parameters are needed soon: what rests on disk may start to come."""
        if self.state is State.SHARDED:
            for bucket in self.buckets:
                bucket.prefetch()

    def unshard(self, *, to_compute: bool = False) -> None:
        """The parameters are about to be used: when this returns they are whole and current.

        Args:
            to_compute: as a forward and a backward see them, rounded where the policy's wire is lossy. Else exactly what rests.
        """
        if self.state is not State.UNSHARDED:
            self.start_unshard(to_compute=to_compute)
            if self._away is not None:
                self._away.land()
            for bucket in self.buckets:
                bucket.wait_unsharded()
            self.state = State.UNSHARDED
            self.appearance.show_views()
        if not to_compute:
            lost = lost_writes(self.state, self.buckets, self.appearance)
            for bucket in self.buckets:
                bucket.unround()
            refuse_lost(lost, self.named)

    def round(self) -> None:
        """Nobody looks at the exact values any longer: what stays whole is what a forward and a backward see."""
        if self.sharded_at_rest and self.state is State.UNSHARDED and not self.pins:
            for bucket in self.buckets:
                bucket.round()

    def settle(self) -> None:
        """Wait for updated values that are still arriving, or on their way to where they rest."""
        for bucket in self.buckets:
            bucket.settle()
        if not self.sharded_at_rest and self.state is State.ARRIVING:
            self.unshard()

    def reshard(self) -> None:
        """Used: where parameters are sharded at rest, give the unsharded ones back. Else nothing."""
        if self.state is State.SHARDED and self.flat.nbytes:  # somebody looked at it when it was given back
            self.flat.free()
            self._outdate_saved()
        if not self.sharded_at_rest or self.state in (State.SHARDED, State.PARKED) or self.pins or self.is_held:
            return
        assert self._away is not None
        if self.state is State.ARRIVING:
            self._away.land()
        for bucket in self.buckets:
            bucket.wait_unsharded()  # a transfer in flight still writes to the storage
        lost = lost_writes(self.state, self.buckets, self.appearance)
        if self.state is State.UNSHARDED:
            self.write_back()
        self.state = State.SHARDED
        self.appearance.hide()
        self._away.leave(changed=False)
        self._outdate_saved()
        refuse_lost(lost, self.named)

    def _outdate_saved(self) -> None:
        if not self.flat.nbytes:
            self.appearance.outdate_saved()

    def offload(self) -> None:
        """Where unsharded parameters rest in CPU memory: bring them there, and give the accelerator's memory back."""
        if self.state not in (State.ARRIVING, State.UNSHARDED) or not self._may_leave:
            return
        assert isinstance(self._away, InCpuMemory)
        self.unshard()
        written = self.appearance.take_written()
        # What was written through `.data` has left no trace; frozen parameters are written so (a teacher's average, say).
        self._leave(changed=not self._away.is_current or not self.trainable or bool(written))

    @property
    def _may_leave(self) -> bool:
        """Readers of a class of the user's own could not be made to bring the values back."""
        return isinstance(self._away, InCpuMemory) and not self.pins and self.appearance.tells_readers

    def _leave(self, *, changed: bool) -> None:
        assert isinstance(self._away, InCpuMemory)
        self.state = State.OFFLOADED
        self.appearance.hide()
        self._away.leave(changed=changed)

    def pin(self) -> None:
        """Stay unsharded, whoever gives the unit back, until `unpin`."""
        self.pins += 1

    @property
    def is_pinned(self) -> bool:
        """Somebody holds it unsharded."""
        return self.pins > 0

    def unpin(self) -> None:
        """The end of one `pin`."""
        self.pins -= 1

    def refuse_step(self) -> None:
        """Raise where the unit is pinned: it would go on showing what it was before the step. Or where a parameter was replaced."""
        if self.pins and self.sharded_at_rest:
            raise UsageError(
                f"optimizer.step() inside zeroshard.unsharded(), which holds {self.label} as it is. Step outside."
            )
        self.appearance.refuse_replaced()

    def refuse_parked(self, what: str) -> None:
        """Raise where any of its model states is away."""
        if self.is_parked:
            raise UsageError(f"{what} {self.label} while model states are parked: call reload_states() first.")

    def park(self, *, parameters: bool) -> None:
        """Model states will be elsewhere for a while; where it is the parameters, they show nothing meanwhile."""
        if self.pins:
            raise UsageError(
                f"offload_states() inside zeroshard.unsharded(), which holds {self.label}. Call it outside."
            )
        self.is_parked = True
        if not parameters:
            return
        self.reshard()
        self.write_back()  # another tensor that was given as `.data` would be lost
        self._state_before, self.state = self.state, State.PARKED
        self.appearance.hide()

    def unpark(self) -> None:
        """What rests is where it was."""
        self.is_parked = False
        if self._masters_wait:
            self._masters_wait = False
            for bucket in self.buckets:
                bucket.take_rests()
        if self.state is State.PARKED:
            self.state = self._state_before
            if self.state is State.UNSHARDED:
                self.appearance.show_views()

    def release(self) -> None:
        """Give every parameter back to the user, whole and in a storage of its own."""
        self.unshard()
        self.appearance.release()
        if isinstance(self._away, ShardedAway):
            self._away.dismiss()

    def written(self, *, owners_follow: bool = False) -> set[int]:
        """The parameters to which the user wrote on this rank, where they are unsharded; what rests here follows.

        In 16 bits a write through `.data` is found too: there the master weights say what was shown. (On an accelerator they
        follow it in the step, and nobody is told: see hidden_writes.py.)
        """
        if not self.sharded_at_rest and self.state is State.UNSHARDED:
            new = self.appearance.take_written()
            if new and not owners_follow:  # else theirs come first, see `take_written`: a master would lose digits
                self._take_rows()
            for bucket in () if new or self.is_parked else self.buckets:
                if bucket.take_hidden_writes():
                    self._written |= {piece.index for piece in bucket.layout.pieces}
            self._written |= new
        return self._written

    def _take_rows(self) -> None:
        """What rests, and the master weights, follow what is unsharded; parked master weights when they are back."""
        for bucket in self.buckets:
            bucket.take_rows(masters=not self.is_parked)
        self._masters_wait |= self.is_parked

    def write_back(self, *, is_looked_at: bool = False) -> None:
        """What rests is to be what the user sees, where parameters are unsharded, and written to as the user likes.

        Args:
            is_looked_at: hidden writes were followed before.
        """
        if self.state is not State.UNSHARDED:
            return
        if self.sharded_at_rest:
            refuse_lost(lost_writes(self.state, self.buckets, self.appearance), self.named)
            if self.appearance.take_written():
                self._take_rows()
            return
        if self.trainable:
            self.written()
            if not (self.is_parked or is_looked_at):
                follow_hidden_writes(self.buckets)
        self.appearance.take_new_data()
        if not isinstance(self._away, InCpuMemory):
            return
        for bucket in self.buckets:
            bucket.take_own_row()
        if not self.trainable:
            self._away.slot.write(self.flat.tensor)

    def take_written(self) -> None:
        """The user wrote to the unsharded parameters, on some rank: each element's owner decides. Every rank must call it."""
        if self.state is State.ARRIVING:
            self.unshard()
        self.appearance.take_written()
        self._written.clear()
        self._forget_cpu_copy()
        for bucket in self.buckets:
            bucket.take_owners_rows()
            bucket.take_rows()

    def take_parameters(self, source: int) -> None:
        """Somebody changed the unsharded parameters: rank `source`'s values become everybody's. Every rank must call it."""
        self._forget_cpu_copy()
        self.appearance.take_written()  # what was given as `.data` goes into the rows first
        for bucket in self.buckets:
            bucket.take_parameters(source)

    def take_masters(self, updated: Iterable[int] | None = None) -> None:
        """Master weights (frozen: what rests) were set, all or those `updated`; parameters follow. Every rank must call it."""
        self.appearance.outdate_graphs(updated)
        if self.state in (State.ARRIVING, State.OFFLOADED):
            self.unshard()
        self._forget_cpu_copy()
        for bucket in self.buckets:
            bucket.take_masters(regather=self.state is State.UNSHARDED)

    def _forget_cpu_copy(self) -> None:
        if isinstance(self._away, InCpuMemory):
            self._away.is_current = False

    def written_since(self, versions: Sequence[int]) -> list[str]:
        """The fqns of parameters that were written since; all, where they are sharded at rest, and then the writes are undone."""
        replaced = self.appearance.take_new_data()
        if replaced and not self.sharded_at_rest:
            self._written |= replaced
            self._take_rows()
        changed = [bucket.differs_from_rest() for bucket in self.buckets]  # every rank hears the same
        now = enumerate(zip(versions, self.appearance.versions(), strict=True))
        written = replaced | {index for index, (before, after) in now if before != after}
        if self.sharded_at_rest:
            self.appearance.take_written()
        for bucket, is_changed in zip(self.buckets, changed, strict=True):
            if is_changed:
                bucket.unshard()
                bucket.wait_unsharded()
        return [entry.fqn for index, entry in enumerate(self.named) if any(changed) or index in written]

    # ------------------------------------------------------------------ gradients

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Hand this rank's gradient of parameter `index` to the buckets it lies in."""
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"{self.named[index].fqn} got a sparse gradient ({gradient.layout}); zeroshard reduces dense ones. Make the "
                "embedding with sparse=False."
            )
        flat = gradient.reshape(-1)
        for bucket, piece in self._homes[index]:
            self._gradient_of[bucket].add_gradient(piece, flat)
        self._received.add(index)
        self.used.add(index)

    @property
    def has_all_gradients(self) -> bool:
        """Every parameter has its gradient of this microbatch: nothing in the backward reads the unit any more."""
        return self.trainable and len(self._received) == len(self.named)

    @property
    def is_frozen(self) -> bool:
        """No parameter takes a gradient. (One that the optimizer does not update may still take one.)"""
        return not any(entry.parameter.requires_grad for entry in self.named)

    def expect_gradients(self) -> None:
        """The backward of a call of the unit's module begins (one of several, where it was called so), or the whole is over."""
        self._received.clear()

    def forget_gradients(self) -> None:
        """A new step begins."""
        self.used.clear()
        self.replaced_gradients.clear()
        self._received.clear()
        self.appearance.show_ordinary()

    def optimizer_shards(self) -> Iterator[Shard]:
        """The shards that this rank updates, bucket by bucket."""
        for bucket in self.gradients:
            yield from bucket.shards

    # ------------------------------------------------------------------ the step

    def prepare_step(self) -> Sequence[ParameterBucket]:
        """The optimizer is about to step: none of these values is arriving. Returns what is to be looked at for hidden writes."""
        self.is_held = False
        self.appearance.show_ordinary()
        self.settle()
        is_shown = self.trainable and not self.sharded_at_rest and self.state is State.UNSHARDED
        return self.buckets if is_shown else ()

    def begin_step(self) -> None:
        """Hidden writes were followed: what rests is what is shown, and what rests in CPU memory is here no longer."""
        if self.trainable:
            self.write_back(is_looked_at=True)
        if self.trainable and self.state is State.UNSHARDED and self._may_leave:
            self._leave(changed=False)  # all of it is brought together anew after the step
        self.offload()

    def sync_parameters(self) -> None:
        """The optimizer has stepped: what this unit shows from now on is the updated values."""
        self.reshard()
        self._forget_cpu_copy()
        if self.state is State.OFFLOADED:
            self.flat.allocate()
            self.state = State.UNSHARDED
            self.appearance.show_views()
        with self.collectives.together():
            for bucket in self.buckets:
                bucket.sync()
        if not self.sharded_at_rest and any(bucket.is_gathering for bucket in self.buckets):
            self.state = State.ARRIVING
            self.appearance.make_readers_wait()
            if not self.appearance.tells_readers:
                self.unshard()  # a class of the user's own: its readers cannot be made to wait, so we do
