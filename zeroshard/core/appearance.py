"""Owns the tensors that a unit's parameters show to the user.

A user's parameter stays the same object. While its values are absent or arriving, or its gradient is in shards, its class is
one of those in classes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.classes import DATA, TakenGradient, classes_of
from zeroshard.core.context import Live
from zeroshard.core.named_parameter import NamedParameter
from zeroshard.core.quantised import quantised_kind
from zeroshard.core.storage.buffers import in_own_storage
from zeroshard.errors import UsageError
from zeroshard.torch_private import distributed_class


class Appearance:
    """The appearance of a unit's parameters to the user (see the module's docstring).

    Args:
        named: the unit's parameters.
        views: views of the flat buffer, one for each parameter, in its shape.
        owner: their unit, which is called for reads, and for gradients that the user sets.
        whole: the class of parameters that have their values; it differs for DTensors.
        live: the step's operations on gradients.
        separate: whether to show each view in a storage of its own, as libraries that write files expect. The flat buffer
            must then keep its memory as long as parameters show it.
        keeps_classes: whether the parameters always show their values, in a class of the user's own or of bitsandbytes.

    Attributes:
        named, users: the parameters.
        is_distributed: whether they are DTensors.
        views: the views of the values, whose memory may be freed.
        own_storages: what `separate` parameters show, by the `id` of their entry, to count who else uses it.
        watches: whether a block of access is open (see `watch`).
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
    ) -> None:
        self.named = named
        self.users = [entry.parameter for entry in named]
        self.separate = separate
        self.keeps_classes = keeps_classes
        self.whole_class = whole
        self.is_distributed = named[0].is_distributed
        self.views = list(views)
        self._ordinary: type[nn.Parameter] = nn.Parameter
        if self.is_distributed:
            # A DTensor holds a detached view, whose version counter counts the user's writes, but no all-gathers into the buffer.
            self.views = [view.data for view in views]
            kind = distributed_class()
            assert kind is not None
            self._ordinary = kind
        elif quantised_kind(self.users[0]):
            self._ordinary = type(self.users[0])
        self.taken: dict[int, TakenGradient] = {}
        """The gradients that `grad` shows at once (see `classes_of`)."""
        self._made: dict[int, TakenGradient] = {}
        """All gradients that `grad` has ever shown, by the parameter's `id`."""
        self._absent_class, self._taken_class, self._watched_class = classes_of(
            owner, live, self._made, self.taken, self.whole_class, self._ordinary
        )
        self.placeholders: Tensor | None = None
        self._absent_views: list[Tensor] = []
        if views[0].is_floating_point() or quantised_kind(self.users[0]):
            nothing = self.placeholders = views[0].new_full((len(named),), nothing_of(views[0].dtype))
            self._absent_views = [nothing[index].expand(entry.shape) for index, entry in enumerate(named)]
        self.own_storages: dict[int, Tensor] = {}
        self.watches = False
        self._shown_taken: set[int] = set()
        self._in_use = False

    # ------------------------------------------------------------------ the tensors that parameters show

    def show(self) -> None:
        """Show the values again, instead of placeholders or tensors that the user assigned."""
        self._become(self.whole_class)
        if self.separate or self.is_distributed:
            for entry, view in zip(self.named, self.views, strict=True):
                self.show_one(entry, view)
        else:
            show = DATA.__set__
            for parameter, view in zip(self.users, self.views, strict=True):
                show(parameter, view)

    def show_one(self, entry: NamedParameter, view: Tensor) -> None:
        """Show one parameter's values."""
        if self.separate:
            view = self.own_storages[id(entry)] = in_own_storage(view)
        entry.show(view)

    def hide(self) -> None:
        """Show placeholders. Reads call the unit's `before_read`."""
        if not self._absent_views:
            raise UsageError(
                f"{self.named[0].fqn} is an integer parameter, which cannot be sharded; register it as a buffer."
            )
        self.own_storages.clear()  # they would keep the memory
        self._become(self.whole_class)  # first: in the other class, setting `data` would count as a read
        if self.is_distributed:
            for entry, view in zip(self.named, self._absent_views, strict=True):
                entry.show(view)
        else:
            show = DATA.__set__
            for parameter, view in zip(self.users, self._absent_views, strict=True):
                show(parameter, view)
        self._become(self._absent_class)

    def make_readers_wait(self, waits: bool) -> None:
        """Make readers wait for values that arrive, while Python continues, in the views that are shown, or end this."""
        self._become(self._absent_class if waits else self.whole_class)

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
        if self._shown_taken or self.watches:
            self._exchange(self.whole_class)

    def end_use(self) -> None:
        self._in_use = False
        if self._shown_taken or self.watches:
            self._exchange(self._watched_class if self.watches else self._taken_class)

    def watch(self, watches: bool) -> bool:
        """Begin or end to show a class that records reads of `data`, except in a forward or backward. Return whether it is new."""
        if watches is self.watches:
            return False
        if self._shown_taken or self.watches:
            self._exchange(self.whole_class)
        self.watches = watches
        if not self._in_use:
            self.end_use()
        return True

    def _exchange(self, cls: type[nn.Parameter]) -> None:
        """Change the class of parameters that have their values and may be of another class. Usually there are none."""
        if self.keeps_classes:
            return
        for index in range(len(self.users)) if self.watches else self._shown_taken:
            parameter = self.users[index]
            if type(parameter) is not self._absent_class:
                parameter.__class__ = cls

    def release(self) -> None:
        """Make the parameters ordinary again, each in a storage of its own."""
        self._shown_taken, self.watches = set(), False
        self._become(self._ordinary)
        for entry in self.named:
            entry.show(entry.local.clone())

    def _become(self, cls: type[nn.Parameter]) -> None:
        if self.keeps_classes:
            return
        for parameter in self.users:
            parameter.__class__ = cls
        if cls is self.whole_class and not self._in_use:
            self.end_use()


def nothing_of(dtype: torch.dtype) -> float:
    """Return the value of placeholders."""
    return math.nan if dtype.is_floating_point else 0
