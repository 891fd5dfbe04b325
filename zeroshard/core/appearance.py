"""Owns the tensors that a unit's parameters show to the user, and the record of writes to them.

A user's parameter stays the same object. While its values are absent or arriving, or its gradient is in shards, its class is
one of those in classes.py.

Writes leave a trace in a parameter's version counter, at no cost. Writes through `.data` leave none. Where such a write would be
lost, a parameter records that its `.data` was read. While values are absent, a read of `.data` is refused like any other read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.classes import DATA, TakenGradient, classes_of
from zeroshard.core.context import Live
from zeroshard.core.named_parameter import NamedParameter
from zeroshard.core.quantised import quantised_kind
from zeroshard.core.storage.buffers import in_own_storage
from zeroshard.errors import UsageError
from zeroshard.torch_private import (
    distributed_class,
    is_same_memory,
    past_torch_function,
    storage_users,
    version_of,
    writes_of,
)


class Appearance:
    """The appearance of a unit's parameters to the user (see the module's docstring).

    Args:
        named: the unit's parameters.
        views: views of the flat buffer, one for each parameter, in its shape.
        owner: their unit, which is called for reads, and for gradients that the user sets.
        whole: the class of parameters that have their values; it differs for DTensors.
        live: the counts of each parameter, and the step's operations on gradients.
        separate: whether to show each view in a storage of its own, as libraries that write files expect. The flat buffer
            must then keep its memory as long as parameters show it.
        keeps_classes: whether the parameters, whose values never leave, are of classes of the user's own.
        has_address: whether the values are in real memory. A dry run only counts memory.

    Attributes:
        views: the views of the values, whose memory may be freed.
        placeholders: the data of parameters without values, one NaN for each, or 0 for bytes; None for integers, which
            never leave.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        views: Sequence[Tensor],
        owner: Any,
        whole: type[nn.Parameter],
        live: Live,
        *,
        separate: bool,
        keeps_classes: bool,
        has_address: bool,
    ) -> None:
        self._named = named
        self._users = [entry.parameter for entry in named]
        self._separate = separate
        self._keeps_classes = keeps_classes
        self.own_writes = [live.own_writes[id(entry.parameter)] for entry in named]
        self.whole_class = whole
        self._is_distributed = named[0].is_distributed
        self.views = list(views)
        self._ordinary: type[nn.Parameter] = nn.Parameter
        if self._is_distributed:
            # A DTensor holds a detached view, whose version counter counts the user's writes, but no all-gathers into the buffer.
            self.views = [view.data for view in views]
            kind = distributed_class()
            assert kind is not None
            self._ordinary = kind
        elif quantised_kind(self._users[0]):
            self._ordinary = type(self._users[0])
        self.taken: dict[int, TakenGradient] = {}
        """The gradients that `grad` shows at once (see `classes_of`)."""
        self._made: dict[int, TakenGradient] = {}
        """All gradients that `grad` has ever shown, by the parameter's `id`."""
        self._absent_class, self._taken_class, self._watched_class = classes_of(
            owner, live, self._made, self.taken, self.whole_class, self._ordinary
        )
        self.placeholders: Tensor | None = None
        self._absent_views: list[Tensor] = []
        if views[0].is_floating_point() or quantised_kind(self._users[0]):
            nothing = self.placeholders = views[0].new_full((len(named),), _nothing_of(views[0].dtype))
            self._absent_views = [nothing[index].expand(entry.shape) for index, entry in enumerate(named)]
        self._own_storages: dict[int, Tensor] = {}
        """What `separate` parameters show, by the `id` of their entry, to count who else uses it."""
        self._versions: list[int] = []
        self._counted: list[int] = []
        """The version counters themselves, at the time of `_versions`. While they stay, nobody has written."""
        self._shown_taken: set[int] = set()
        self._in_use = False
        self._live = live
        self._watches = False
        """Whether a block of access is open (see `watch`)."""
        self._read_data: dict[int, Tensor] = {}
        """The `data` that was read since then, by the parameter's `id`. Each has a version counter of its own."""
        # The memory, shapes and strides that parameters show, to see at once whether the user has assigned `data`.
        self._watched = [] if self._is_distributed or not has_address else [p for p in self._users if p.numel()]
        watched_views = [view for view in self.views if view.numel()]
        self._shapes = [view.shape for view in watched_views]
        self._strides = [view.stride() for view in watched_views]
        self._offsets: list[int] = []
        self._addresses: list[int] = []
        if self._watched:
            self._addresses = [view.data_ptr() for view in watched_views]
            self._offsets = [address - self._addresses[0] for address in self._addresses]
            self._first_view = watched_views[0]

    # ------------------------------------------------------------------ the tensors that parameters show

    def show_views(self) -> None:
        """Show the values again, instead of placeholders or tensors that the user assigned."""
        try:
            self.refuse_lost_writes()
        finally:
            self.show_current()

    def show_first(self) -> None:
        """Show the values for the first time. Data comes before the class: setting it ends a parameter of `sharded_init`."""
        for entry, view in zip(self._named, self.views, strict=True):
            self._show(entry, view)
        self.show_current()

    def show_current(self) -> None:
        """Show the values, as `show_views` does, whatever was written to the placeholders."""
        self._become(self.whole_class)
        if self._separate or self._is_distributed:
            for entry, view in zip(self._named, self.views, strict=True):
                self._show(entry, view)
        else:
            show = DATA.__set__
            for parameter, view in zip(self._users, self.views, strict=True):
                show(parameter, view)
        self._record_versions()

    def _show(self, entry: NamedParameter, view: Tensor) -> None:
        if self._separate:
            view = self._own_storages[id(entry)] = in_own_storage(view)
        entry.show(view)

    def end_wait(self) -> None:
        """End `make_readers_wait`: the values have arrived in the views that are shown."""
        self._become(self.whole_class)
        self._record_versions()

    def hide(self) -> None:
        """Show placeholders. Reads call the unit's `before_read`."""
        if not self._absent_views:
            raise UsageError(
                f"{self._named[0].fqn} is an integer parameter, which cannot be sharded; register it as a buffer."
            )
        self._own_storages.clear()  # they would keep the memory
        self._become(self.whole_class)  # first: in the other class, setting `data` would count as a read
        if self._is_distributed:
            for entry, view in zip(self._named, self._absent_views, strict=True):
                entry.show(view)
        else:
            show = DATA.__set__
            for parameter, view in zip(self._users, self._absent_views, strict=True):
                show(parameter, view)
        self._record_versions()
        self._become(self._absent_class)

    def outdate_saved(self) -> None:
        """Outdate parameters that autograd saved outside our hooks, so that torch raises an error instead of reading NaN.

        Do not call it while the user has views: torch would rebuild their gradient functions from the present data.
        """
        self._increment(self._users)
        for own in self.own_writes:
            own.frees += 1
        self._counted = [count + 1 for count in self._counted]

    @staticmethod
    def _increment(parameters: Sequence[Tensor]) -> None:
        with past_torch_function():
            torch.autograd.graph.increment_version(parameters)

    def make_readers_wait(self) -> None:
        """Make readers wait for values that arrive while Python continues."""
        self._become(self._absent_class)

    def show_taken(self, used: Iterable[int]) -> None:
        """Show a `TakenGradient` as `grad` of the `used` parameters, whose gradients were all taken, and of no others."""
        if self._shown_taken:
            self._exchange(self.whole_class)
        self._shown_taken = set(used)
        self.end_use()

    def show_all_taken(self) -> None:
        """Make `grad` show all taken gradients at once: each parameter has one, and nobody has replaced it."""
        self.taken.update(self._made)

    def begin_use(self) -> None:
        """Use `whole_class` while a forward or a backward runs: compiled modules are valid for one class of parameters."""
        self._in_use = True
        if self._shown_taken or self._watches:
            self._exchange(self.whole_class)

    def end_use(self) -> None:
        self._in_use = False
        if self._shown_taken or self._watches:
            self._exchange(self._watched_class if self._watches else self._taken_class)

    def watch(self, watches: bool) -> set[int]:
        """Watch writes through `data`, except while a forward or a backward runs, or end this.

        Returns:
            at the end, the indices of the parameters that were written to in this way.
        """
        if watches is self._watches:
            return set()
        if self._shown_taken or self._watches:
            self._exchange(self.whole_class)
        self._watches = watches
        if not self._in_use:
            self.end_use()
        read = [self._read_data.get(id(one)) for one in self._users]
        written = {index for index, data in enumerate(read) if data is not None and version_of(data) > 0}
        self._read_data.clear()  # it would keep the memory
        for parameter in self._users:
            self._live.given_out.pop(id(parameter), None)
        return written

    def watched(self, parameter: Tensor, data: Tensor) -> Tensor:
        """Return a parameter's `data` as another tensor with the version counter of the first one that was read."""
        before = self._read_data.get(id(parameter))
        if before is None or not is_same_memory(before, data):
            before = self._read_data[id(parameter)] = data
        # The parameter may show the same memory in another order, after `p.data = p.data.t()`.
        shown = before.as_strided(data.shape, data.stride(), data.storage_offset()).detach()
        self._live.give_out(parameter, shown)
        return shown

    def _exchange(self, cls: type[nn.Parameter]) -> None:
        """Change the class of parameters that have their values and may be of another class. Usually there are none."""
        if self._keeps_classes:
            return
        for index in range(len(self._users)) if self._watches else self._shown_taken:
            parameter = self._users[index]
            if type(parameter) is not self._absent_class:
                parameter.__class__ = cls

    def release(self) -> None:
        """Make the parameters ordinary again, each in a storage of its own."""
        self._shown_taken, self._watches = set(), False
        self._become(self._ordinary)
        for entry in self._named:
            entry.show(entry.local.clone())

    def _become(self, cls: type[nn.Parameter]) -> None:
        if self._keeps_classes:
            return
        for parameter in self._users:
            parameter.__class__ = cls
        if cls is self.whole_class and not self._in_use:
            self.end_use()

    # ------------------------------------------------------------------ the user's writes

    def versions(self) -> list[int]:
        """Return a count for each parameter, which rises with each in-place write by the user."""
        return [count - own.updates - own.frees for count, own in zip(self._count(), self.own_writes, strict=True)]

    def _count(self) -> list[int]:
        """Return the parameters' version counters."""
        count = writes_of if self._is_distributed else version_of
        with past_torch_function():  # counting reads nothing
            return [*map(count, self._users)]

    def _record_versions(self) -> None:
        counted = self._count()
        if counted != self._counted or not self._versions:
            self._counted = counted
            self._versions = self.versions()

    def accept_writes(self, versions: Sequence[int]) -> None:
        """Count the user's writes since `versions` as zeroshard's own: no outer block reports them."""
        now = self.versions()
        new = {
            id(own): (own, after - before) for own, before, after in zip(self.own_writes, versions, now, strict=True)
        }
        for own, count in new.values():
            own.updates += count
        self._counted = []
        self._read_data.clear()
        self._record_versions()

    def outdate_graphs(self, indices: Sequence[int] | None = None) -> None:
        """Record that parameters (default: all) were updated, so that torch refuses to differentiate graphs that saved them before.

        torch does the same where an optimizer writes to the parameters themselves.
        """
        if indices is None:
            indices = range(len(self._users))
        if not indices:
            return
        self._increment([self._users[index] for index in indices])
        for index in indices:
            self.own_writes[index].updates += 1
            self._counted[index] += 1

    def collect_written(self, before_copies: Callable[[], object] | None = None) -> set[int]:
        """Return the indices of parameters that were written to in place or assigned new `.data` since the last call."""
        self.adopt_new_data(before_copies)
        if self._count() == self._counted:
            return set()
        written = self.written_since(self._versions)
        self._record_versions()
        return written

    def written_since(self, versions: Sequence[int]) -> set[int]:
        """Return the indices of parameters that the user wrote to since `versions`."""
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
        for entry, view in self._given_data():
            data = entry.local
            if data.shape != view.shape or data.dtype != view.dtype:
                raise UsageError(
                    f"{entry.fqn} was given data of {tuple(data.shape)}, {data.dtype}, but had "
                    f"{tuple(view.shape)}, {view.dtype}. Shapes and dtypes are fixed when zeroshard takes the "
                    "model: convert it before, or pass precision=Precision(...) (in a config, bf16 or fp16)."
                )
            # `weight.data.t()` shows the view's own memory in another order.
            view.copy_(data.clone() if data.data_ptr() == view.data_ptr() else data)
            self._show(entry, view)
            self._increment([entry.parameter])

    def exchanged(self) -> tuple[list[str], dict[str, Tensor | None], bool]:
        """Return the fqns of parameters that were given other `data`, those whose own seems kept, and whether this is a swap.

        A swap keeps what each parameter showed. If parameters share a storage, only the `data` counts that the user read:
        transfers may use the storage, too. Of what a block of access gave out, one suffices. Otherwise the value of the dict is
        the tensor that the parameter showed. Its storage has other users: the user, or a graph.
        """
        if self._is_distributed or self._shows_views():
            return [], {}, False
        given = [entry for entry, view in self._given_data() if entry.parameter.data_ptr() != view.data_ptr()]
        kept: dict[str, Tensor | None]
        if self._separate:
            alone = storage_users(torch.empty(1))
            # `model.share_memory()` moves a storage, and its parameter still uses it.
            shown = [(entry, self._own_storages[id(entry)]) for entry in given]
            shown = [(entry, own) for entry, own in shown if own.data_ptr() != entry.parameter.data_ptr()]
            given = [entry for entry, _ in shown]
            kept = {entry.fqn: own for entry, own in shown if storage_users(own) > alone}
        else:
            given_out = self._live.given_out
            kept = {
                entry.fqn: None
                for entry in given
                if any(one() is not None for one in given_out.get(id(entry.parameter), ()))
            }
        return [entry.fqn for entry in given], kept, self._watches and bool(kept)

    def has_new_data(self) -> bool:
        """Return whether the user has assigned a tensor as `.data` that `adopt_new_data` has not taken yet."""
        return not self._shows_views() and next(self._given_data(), None) is not None

    def _shows_views(self) -> bool:
        """Return whether all parameters certainly show their views. It is a comparison of lists, since each step asks."""
        if not self._watched:
            return False
        first = self._first_view.data_ptr()
        if first != self._addresses[0]:  # the buffer has got other memory
            self._addresses = [first + offset for offset in self._offsets]
        watched = self._watched
        return (
            [parameter.data_ptr() for parameter in watched] == self._addresses
            and [parameter.stride() for parameter in watched] == self._strides
            and [parameter.shape for parameter in watched] == self._shapes
        )

    def _given_data(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        """Yield (parameter, view) for each parameter whose data is no longer its view of the flat buffer."""
        for entry, view in zip(self._named, self.views, strict=True):
            shown = entry.local if self._is_distributed else entry.parameter
            if view.numel() and not self._is_shown(shown, view):
                yield entry, view

    def _is_shown(self, shown: Tensor, view: Tensor) -> bool:
        if shown.shape != view.shape or shown.stride() != view.stride():
            return False
        if self._separate:  # compare addresses: `model.share_memory()` moves a storage to other memory
            return shown.data_ptr() == view.data_ptr()
        return is_same_memory(shown, view)

    def refuse_unfrozen(self, optimized: set[int]) -> None:
        """Raise if a frozen parameter of the optimizer now takes gradients, which would not be reduced.

        (A parameter that required a gradient from the start is frozen only if the optimizer does not list it.)
        """
        for entry in self._named:
            if entry.parameter.requires_grad and id(entry.parameter) in optimized:
                raise UsageError(
                    f"{entry.fqn} was unfrozen, and would not train: call update_trainable() (on every rank) after "
                    "changing requires_grad."
                )

    def refuse_lost_writes(self) -> None:
        """Raise if a parameter was written to while it showed a placeholder, so that the write was lost.

        Only this check finds `set_`, for which torch calls no `__torch_function__`.
        """
        if self.placeholders is None or not self._versions or self._count() == self._counted:
            return
        now = self.versions()
        if now == self._versions:
            return
        self.placeholders.fill_(_nothing_of(self.placeholders.dtype))
        named = zip(self._named, self._versions, now, strict=True)
        written = [entry.fqn for entry, before, after in named if before != after]
        raise UsageError(
            f"sharded parameters were written in place, and the write has no effect: {', '.join(written)}. Write "
            "inside `with zeroshard.unsharded(module, modifier_rank=0):`."
        )


def _nothing_of(dtype: torch.dtype) -> float:
    """Return the value of placeholders."""
    return math.nan if dtype.is_floating_point else 0
