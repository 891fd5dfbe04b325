"""Owns the answer to "did the user write to this unit's parameters?", and what follows from a write.

The optimizer writes to shards, and the user to unsharded parameters. The user's values go to the shards, and to master
weights, before the optimizer steps and before the unsharded values leave. Where ranks wrote different values, the
values of each element's owner count.

    trace of a write           found by
    a version counter          `Writes.collect`, at no cost
    another tensor as `.data`  `Writes.adopt_new_data`, by its address, shape and strides
    none (through `.data`)     `ParameterBucket.save_hidden_writes`, which compares values; only if the user may have read `.data`

Where a write through `.data` would be lost, a parameter records that its `.data` was read (`Watched` in classes.py). While
values are absent, a read of `.data` is refused like any other read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zeroshard.core.appearance import Appearance, nothing_of
from zeroshard.core.context import Context
from zeroshard.core.named_parameter import NamedParameter
from zeroshard.core.parameter_bucket import InCpuMemory, ParameterBucket
from zeroshard.errors import UsageError
from zeroshard.torch_private import (
    is_same_memory,
    past_torch_function,
    storage_users,
    version_of,
    writes_of,
)


class Writes:
    """The user's writes to a unit's parameters (see the module's docstring). Four verbs: look, keep, spread, refuse.

    Methods that compare or copy values need the unit unsharded.

    Args:
        appearance: the unit's parameters, and the tensors that they show.
        buckets: their buckets, to which written values go.
        in_cpu: their place, if they rest whole in CPU memory.
        context: the ranks, the policy, and the counts of the whole model.
        is_cut: whether the ranks of `Context.others` have different parts of them.
        trainable: whether they have master weights.
        has_address: whether the values are in real memory. A dry run only counts memory.

    Attributes:
        found: the parameters that the user has written to since the last `spread`, by index.
        own: for each parameter, the writes that its version counter counts, and that are not the user's.
    """

    def __init__(
        self, appearance: Appearance, buckets: Sequence[ParameterBucket], in_cpu: InCpuMemory | None, context: Context,
        *, is_cut: bool, trainable: bool, has_address: bool,
    ) -> None:  # fmt: skip
        self._appearance = appearance
        self._buckets = buckets
        self._cpu = in_cpu
        self._context = context
        self._is_cut = is_cut
        self._trainable = trainable
        self.found: set[int] = set()
        self._masters_wait = False
        """Whether parameters were written while master weights were parked."""
        self.own = [context.live.own_writes[id(parameter)] for parameter in self._appearance.users]
        self._versions: list[int] = []
        self._counted: list[int] = []
        """The version counters themselves, at the time of `_versions`. While they stay, nobody has written."""
        self._read_data: dict[int, Tensor] = {}
        """The `data` that was read since `watch`, by the parameter's `id`. Each has a version counter of its own."""
        # The memory, shapes and strides that parameters show, to see at once whether the user has assigned `data`.
        is_seen = has_address and not appearance.is_distributed
        self._watched = [parameter for parameter in appearance.users if is_seen and parameter.numel()]
        watched_views = [view for view in appearance.views if view.numel()]
        self._shapes = [view.shape for view in watched_views]
        self._strides = [view.stride() for view in watched_views]
        self._addresses: list[int] = []
        if self._watched:
            self._addresses = [view.data_ptr() for view in watched_views]
            self._first_view = watched_views[0]

    # ------------------------------------------------------------------ version counters

    def versions(self) -> list[int]:
        """Return a count for each parameter, which rises with each in-place write by the user."""
        return [count - own.updates - own.frees for count, own in zip(self._count(), self.own, strict=True)]

    def _count(self) -> list[int]:
        """Return the parameters' version counters."""
        count = writes_of if self._appearance.is_distributed else version_of
        with past_torch_function():  # counting reads nothing
            return [*map(count, self._appearance.users)]

    def record(self) -> None:
        """Take the counters of what the parameters show now as those without a write."""
        counted = self._count()
        if counted != self._counted or not self._versions:
            self._counted = counted
            self._versions = self.versions()

    def accept(self, versions: Sequence[int]) -> None:
        """Count the user's writes since `versions` as zeroshard's own: no outer block reports them."""
        now = self.versions()
        new = {id(own): (own, after - before) for own, before, after in zip(self.own, versions, now, strict=True)}
        for own, count in new.values():
            own.updates += count
        self._counted = []
        self._read_data.clear()
        self.record()

    @staticmethod
    def _increment(parameters: Sequence[Tensor]) -> None:
        with past_torch_function():
            torch.autograd.graph.increment_version(parameters)

    def outdate_graphs(self, indices: Sequence[int] | None = None) -> None:
        """Record that parameters (default: all) were updated, so that torch refuses to differentiate graphs that saved them before.

        torch does the same where an optimizer writes to the parameters themselves.
        """
        if indices is None:
            indices = range(len(self._appearance.users))
        if not indices:
            return
        self._increment([self._appearance.users[index] for index in indices])
        for index in indices:
            self.own[index].updates += 1
            self._counted[index] += 1

    def outdate_saved(self) -> None:
        """Outdate parameters that autograd saved outside our hooks, so that torch raises an error instead of reading NaN.

        Do not call it while the user has views: torch would rebuild their gradient functions from the present data.
        """
        self._increment(self._appearance.users)
        for own in self.own:
            own.frees += 1
        self._counted = [count + 1 for count in self._counted]

    # ------------------------------------------------------------------ look

    def look(self, *, scans: bool, before_copies: Callable[[], object] | None = None) -> bool:
        """Add the user's writes on this rank to `found`. Return whether any left a trace.

        Args:
            scans: whether to compare values if no write left a trace, and the user may have read `data`.
            before_copies: see `adopt_new_data`.
        """
        new = self.collect(before_copies)
        if scans and not new and self._context.live.data_was_read and not self._context.live.parked:
            for bucket in self._buckets:
                if bucket.save_hidden_writes():
                    self.found |= {piece.index for piece in bucket.layout.pieces}
        self.found |= new
        if self.found:
            self.outdate_cpu_copy()
        return bool(new)

    def collect(self, before_copies: Callable[[], object] | None = None) -> set[int]:
        """Return the indices of parameters that were written to in place or assigned new `.data` since the last call."""
        self.adopt_new_data(before_copies)
        if self._count() == self._counted:
            return set()
        written = self._since(self._versions)
        self.record()
        return written

    def since(self, versions: Sequence[int]) -> set[int]:
        """Return the indices of parameters that this rank wrote to since `versions`. If they are sharded, do not store writes."""
        self.adopt_new_data()
        written = self._since(versions)
        if written and self._context.policy.parameters.sharded:
            self.collect()
        return written

    def _since(self, versions: Sequence[int]) -> set[int]:
        """Return the indices of parameters that the user wrote to in place since `versions`."""
        now = self.versions()
        if now == versions:
            return set()
        return {index for index, version in enumerate(now) if version != versions[index]}

    def adopt_new_data(self, before_copies: Callable[[], object] | None = None) -> None:
        """Copy tensors assigned as `.data` into the parameters' memory: a write. Raise for another shape or dtype.

        Args:
            before_copies: called first if there may be such tensors. It may raise.
        """
        if self._shows_views():
            return
        if before_copies is not None:
            before_copies()
        for entry, view in self.given_data():
            data = entry.local
            if data.shape != view.shape or data.dtype != view.dtype:
                raise UsageError(
                    f"{entry.fqn} was given data of {tuple(data.shape)}, {data.dtype}, but had "
                    f"{tuple(view.shape)}, {view.dtype}. Shapes and dtypes are fixed when zeroshard takes the "
                    "model: convert it before, or pass precision=Precision(...) (in a config, bf16 or fp16)."
                )
            # `weight.data.t()` shows the view's own memory in another order.
            view.copy_(data.clone() if data.data_ptr() == view.data_ptr() else data)
            self._appearance.show_one(entry, view)
            self._increment([entry.parameter])

    def _shows_views(self) -> bool:
        """Return whether all parameters certainly show their views. It is a comparison of lists, since each step asks."""
        if not self._watched:
            return False
        moved = self._first_view.data_ptr() - self._addresses[0]
        if moved:  # the buffer has got other memory
            self._addresses = [address + moved for address in self._addresses]
        watched = self._watched
        return (
            [parameter.data_ptr() for parameter in watched] == self._addresses
            and [parameter.stride() for parameter in watched] == self._strides
            and [parameter.shape for parameter in watched] == self._shapes
        )

    def given_data(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        """Yield (parameter, view) for each tensor that was assigned as `.data`, and that `adopt_new_data` has not taken yet."""
        if self._shows_views():
            return
        for entry, view in zip(self._appearance.named, self._appearance.views, strict=True):
            shown = entry.local if self._appearance.is_distributed else entry.parameter
            if view.numel() and not self._is_shown(shown, view):
                yield entry, view

    def _is_shown(self, shown: Tensor, view: Tensor) -> bool:
        if shown.shape != view.shape or shown.stride() != view.stride():
            return False
        if self._appearance.separate:  # compare addresses: `model.share_memory()` moves a storage to other memory
            return shown.data_ptr() == view.data_ptr()
        return is_same_memory(shown, view)

    def watch(self, watches: bool) -> set[int]:
        """Watch writes through `data`, except while a forward or a backward runs, or end this.

        Returns:
            at the end, the indices of the parameters that were written to in this way.
        """
        if not self._appearance.watch(watches):
            return set()
        read = [self._read_data.get(id(one)) for one in self._appearance.users]
        written = {index for index, data in enumerate(read) if data is not None and version_of(data) > 0}
        self._read_data.clear()  # it would keep the memory
        for parameter in self._appearance.users:
            self._context.live.given_out.pop(id(parameter), None)
        return written

    def watched(self, parameter: Tensor, data: Tensor) -> Tensor:
        """Return a parameter's `data` as another tensor with the version counter of the first one that was read."""
        before = self._read_data.get(id(parameter))
        if before is None or not is_same_memory(before, data):
            before = self._read_data[id(parameter)] = data
        # The parameter may show the same memory in another order, after `p.data = p.data.t()`.
        shown = before.as_strided(data.shape, data.stride(), data.storage_offset()).detach()
        self._context.live.give_out(parameter, shown)
        return shown

    # ------------------------------------------------------------------ keep

    def keep(self, *, has_looked: bool) -> None:
        """Copy values that the user may have written: to their place at rest, and to the master weights.

        Args:
            has_looked: whether the step has looked for writes in the values that stay here: then all ranks have them.
        """
        if self._context.policy.parameters.sharded:
            if self.collect():
                self._save_rows()
            return
        may_be_hidden = self._context.live.data_was_read
        if has_looked and not may_be_hidden:
            return
        if not self._trainable and self._cpu is None:
            self.adopt_new_data()  # nothing else has their values
            return
        wrote = self.look(scans=True)
        if self._cpu is not None and may_be_hidden:
            # A write through `.data` leaves no trace. Frozen parameters, such as an EMA teacher's, may be updated in this way.
            self.outdate_cpu_copy()
            wrote = True
        if wrote:
            self._save_rows()

    def _save_rows(self) -> None:
        """Copy unsharded values to the slots and the master weights. Parked master weights get them in `unpark`."""
        for bucket in self._buckets:
            bucket.save_rows(masters=not self._context.live.parked)
        self._masters_wait |= bool(self._context.live.parked)

    def unpark(self) -> None:
        """Give the master weights what was written while they were parked."""
        if self._masters_wait:
            self._masters_wait = False
            for bucket in self._buckets:
                bucket.masters_from_rests()

    def outdate_cpu_copy(self) -> None:
        """Record that the values in CPU memory, if there are any, are no longer current."""
        if self._cpu is not None:
            self._cpu.is_current = False

    # ------------------------------------------------------------------ spread

    def spread(self) -> None:
        """Give all ranks the owner's value of each element, after a write on any rank. Every rank must call it."""
        self.collect()
        self.found.clear()
        self.outdate_cpu_copy()
        for bucket in self._buckets:
            label = f"all-gather of written {bucket.label}"
            self._context.collectives.all_gather(bucket.rows, bucket.number, label).wait()
            self._broadcast_first_replica(bucket)
            bucket.save_rows()
            bucket.broadcast_masters(None if self._is_cut else self._context.others)

    def spread_from(self, source: int) -> None:
        """Give rank `source`'s values to all ranks. Every rank must call it.

        Divided parameters get those of the ranks that divide the same model as `source`.
        """
        self.outdate_cpu_copy()
        self.collect()  # tensors that were assigned as `.data` are copied into the rows first
        places = self._context.places
        for bucket in self._buckets:
            self._broadcast_first_replica(bucket)
            self._context.collectives.broadcast(bucket.rows, places[source] if places else source)
            bucket.save_rows()

    def _broadcast_first_replica(self, bucket: ParameterBucket) -> None:
        """Broadcast whole parameters over the other dimensions, from the first rank of these."""
        if not self._is_cut:
            self._context.others.broadcast(bucket.rows)

    # ------------------------------------------------------------------ refuse

    def refuse_lost(self) -> None:
        """Raise if a parameter was written to while it showed a placeholder, so that the write was lost.

        Only this check finds `set_`, for which torch calls no `__torch_function__`.
        """
        if self._appearance.placeholders is None or not self._versions or self._count() == self._counted:
            return
        written = self._since(self._versions)
        if not written:
            return
        self._appearance.placeholders.fill_(nothing_of(self._appearance.placeholders.dtype))
        raise UsageError(
            "sharded parameters were written in place, and the write has no effect: "
            f"{', '.join(self._appearance.named[index].fqn for index in sorted(written))}. Write "
            "inside `with zeroshard.unsharded(module, modifier_rank=0):`."
        )

    def exchanged(self) -> tuple[list[str], dict[str, Tensor | None], bool]:
        """Return the fqns of parameters that were given other `data`, those whose own seems kept, and whether this is a swap.

        A swap keeps what each parameter showed. If parameters share a storage, only the `data` counts that the user read:
        transfers may use the storage, too. Of what a block of access gave out, one suffices. Otherwise the value of the dict is
        the tensor that the parameter showed. Its storage has other users: the user, or a graph.
        """
        if self._appearance.is_distributed:
            return [], {}, False
        given = [entry for entry, view in self.given_data() if entry.parameter.data_ptr() != view.data_ptr()]
        kept: dict[str, Tensor | None]
        if self._appearance.separate:
            alone = storage_users(torch.empty(1))
            # `model.share_memory()` moves a storage, and its parameter still uses it.
            shown = [(entry, self._appearance.own_storages[id(entry)]) for entry in given]
            shown = [(entry, own) for entry, own in shown if own.data_ptr() != entry.parameter.data_ptr()]
            given = [entry for entry, _ in shown]
            kept = {entry.fqn: own for entry, own in shown if storage_users(own) > alone}
        else:
            given_out = self._context.live.given_out
            kept = {
                entry.fqn: None
                for entry in given
                if any(one() is not None for one in given_out.get(id(entry.parameter), ()))
            }
        return [entry.fqn for entry in given], kept, self._appearance.watches and bool(kept)
