"""Owns the tensors that a unit's parameters show to the user, and the record of writes to them.

A user's parameter stays the same object. While its values are absent or arriving, or its gradient is in shards, its class is
one of those in classes.py.

Writes leave a trace in a parameter's version counter, at no cost. Writes through `.data` leave none. Where such a write would be
lost, a parameter records that its `.data` was read. While values are absent, a read of `.data` is refused like any other read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.named_parameter import NamedParameter
from zeroshard.parameters.classes import classes_of
from zeroshard.parameters.context import OwnWrites
from zeroshard.storage.buffers import in_own_storage
from zeroshard.torch_private import distributed_class, is_same_memory, past_torch_function, version_of, writes_of


class Appearance:
    """The appearance of a unit's parameters to the user (see the module's docstring).

    Args:
        named: the unit's parameters.
        views: views of the flat buffer, one for each parameter, in its shape.
        owner: their unit, which is called for reads, and for gradients that the user sets.
        whole: the class of parameters that have their values; it differs for DTensors.
        own_writes: the counts of each parameter.
        separate: whether to show each view in a storage of its own, as libraries that write files expect. The flat buffer
            must then keep its memory as long as parameters show it.
        keeps_classes: whether the parameters, whose values never leave, are of classes of the user's own.

    Attributes:
        views: the views of the values, whose memory may be freed.
        placeholders: the data of parameters without values, one NaN for each; None for integers, whose values never leave.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        views: Sequence[Tensor],
        owner: Any,
        whole: type[nn.Parameter],
        own_writes: Sequence[OwnWrites],
        *,
        separate: bool,
        keeps_classes: bool,
    ) -> None:
        self._named = named
        self._separate = separate
        self._keeps_classes = keeps_classes
        self.own_writes = own_writes
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
        self._absent_class, self._taken_class = classes_of(owner, self.whole_class, self._ordinary)
        self.placeholders: Tensor | None = None
        self._absent_views: list[Tensor] = []
        if views[0].is_floating_point():
            nan = torch.full((len(named),), math.nan, dtype=views[0].dtype, device=views[0].device)
            self.placeholders = nan
            self._absent_views = [nan[index].expand(entry.shape) for index, entry in enumerate(named)]
        self._versions: list[int] = []
        self._shown_taken: set[int] = set()
        self._in_use = False

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
        for entry, view in zip(self._named, self.views, strict=True):
            self._show(entry, view)
        self._versions = self.versions()

    def _show(self, entry: NamedParameter, view: Tensor) -> None:
        entry.show(in_own_storage(view) if self._separate else view)

    def end_wait(self) -> None:
        """End `make_readers_wait`: the values have arrived in the views that are shown."""
        self._become(self.whole_class)
        self._versions = self.versions()

    def hide(self) -> None:
        """Show placeholders. Reads call the unit's `before_read`."""
        if not self._absent_views:
            raise UsageError(
                f"{self._named[0].fqn} is an integer parameter, which cannot be sharded; register it as a buffer."
            )
        self._become(self.whole_class)  # first: in the other class, setting `data` would count as a read
        for entry, view in zip(self._named, self._absent_views, strict=True):
            entry.show(view)
        self._versions = self.versions()
        self._become(self._absent_class)

    def outdate_saved(self) -> None:
        """Outdate parameters that autograd saved outside our hooks, so that torch raises an error instead of reading NaN.

        Do not call it while the user has views: torch would rebuild their gradient functions from the present data.
        """
        for entry, own in zip(self._named, self.own_writes, strict=True):
            torch.autograd.graph.increment_version(entry.parameter)
            own.frees += 1

    def make_readers_wait(self) -> None:
        """Make readers wait for values that arrive while Python continues."""
        self._become(self._absent_class)

    def show_taken(self, used: Iterable[int]) -> None:
        """Show a `TakenGradient` as `grad` of the `used` parameters, whose gradients were all taken, and of no others."""
        self._exchange(self._taken_class, self.whole_class)
        self._shown_taken = set(used)
        self.end_use()

    def begin_use(self) -> None:
        """Use `whole_class` while a forward or a backward runs: compiled modules are valid for one class of parameters."""
        self._in_use = True
        self._exchange(self._taken_class, self.whole_class)

    def end_use(self) -> None:
        self._in_use = False
        self._exchange(self.whole_class, self._taken_class)

    def _exchange(self, before: type[nn.Parameter], after: type[nn.Parameter]) -> None:
        """Change the class of the parameters that `show_taken` shows. Usually there are none."""
        for index in self._shown_taken:
            parameter = self._named[index].parameter
            if type(parameter) is before:
                parameter.__class__ = after

    def release(self) -> None:
        """Make the parameters ordinary again, each in a storage of its own."""
        self._shown_taken = set()
        self._become(self._ordinary)
        for entry in self._named:
            entry.show(entry.local.clone())

    def _become(self, cls: type[nn.Parameter]) -> None:
        if self._keeps_classes:
            return
        for index, entry in enumerate(self._named):
            is_taken = cls is self.whole_class and index in self._shown_taken and not self._in_use
            entry.parameter.__class__ = self._taken_class if is_taken else cls

    # ------------------------------------------------------------------ the user's writes

    def versions(self) -> list[int]:
        """Return a count for each parameter, which rises with each in-place write by the user."""
        count = writes_of if self._is_distributed else version_of
        with past_torch_function():  # counting reads nothing
            return [
                count(entry.parameter) - own.updates - own.frees
                for entry, own in zip(self._named, self.own_writes, strict=True)
            ]

    def accept_writes(self, versions: Sequence[int]) -> None:
        """Count the user's writes since `versions` as zeroshard's own: no outer block reports them."""
        now = self.versions()
        new = {
            id(own): (own, after - before) for own, before, after in zip(self.own_writes, versions, now, strict=True)
        }
        for own, count in new.values():
            own.updates += count
        self._versions = self.versions()

    def outdate_graphs(self, indices: Iterable[int] | None = None) -> None:
        """Record that parameters (default: all) were updated, so that torch refuses to differentiate graphs that saved them before.

        torch does the same where an optimizer writes to the parameters themselves.
        """
        if indices is None:
            indices = range(len(self._named))
        for index in indices:
            with past_torch_function():
                torch.autograd.graph.increment_version(self._named[index].parameter)
            self.own_writes[index].updates += 1

    def collect_written(self) -> set[int]:
        """Return the indices of parameters that were written to in place or assigned new `.data` since the last call."""
        self.adopt_new_data()
        written = self.written_since(self._versions)
        self._versions = self.versions()
        return written

    def written_since(self, versions: Sequence[int]) -> set[int]:
        """Return the indices of parameters that the user wrote to since `versions`."""
        now = self.versions()
        if now == versions:
            return set()
        return {index for index, version in enumerate(now) if version != versions[index]}

    def adopt_new_data(self) -> None:
        """Copy tensors assigned as `.data` into the parameters' memory: a write. Raise for another shape or dtype."""
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
            with past_torch_function():
                torch.autograd.graph.increment_version(entry.parameter)

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
        now = self.versions()
        if self.placeholders is None or not self._versions or now == self._versions:
            return
        self.placeholders.fill_(math.nan)
        named = zip(self._named, self._versions, now, strict=True)
        written = [entry.fqn for entry, before, after in named if before != after]
        raise UsageError(
            f"sharded parameters were written in place, and the write has no effect: {', '.join(written)}. Write "
            "inside `with zeroshard.unsharded(module, modifier_rank=0):`."
        )
