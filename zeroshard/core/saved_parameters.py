"""Owns the parameters of units that come and go, where autograd saves them, so that every reader in a backward finds them whole.

A forward saves views of parameters in its graph, and their storage is freed before the backward reads them. torch's hooks on
saved tensors get every tensor that any operation saves, and every read. Instead of a view of a flat buffer they keep the unit
and the view's geometry, and a read unshards the unit first. Other tensors are kept unchanged, with a check for writes like torch's,
or go to the hooks of the user or of activation checkpointing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.core.context import OwnWrites
from zeroshard.core.unit import Unit
from zeroshard.errors import UsageError
from zeroshard.torch_private import (
    disabled_torch_function,
    distributed_by,
    distribution_of,
    is_distributed,
    local_of,
    number_of_storage,
    past_torch_function,
    saved_tensors_hooks_in_force,
    storage_id,
    tree_leaves,
    version_of,
    wrapper_tensor,
)

Read = Callable[[], Any]
"""A saved tensor: a function that returns it."""


class _Place(NamedTuple):
    """The place of views of a unit's flat buffer. Each step saves the same places, so each is made once."""

    unit: Unit
    parameter: Tensor
    """The parameter in which the views begin."""
    own_writes: OwnWrites
    """The writes to it that are not the user's."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    shows_attributes: bool
    """Whether they are a whole parameter with attributes, which a Python autograd function may read."""


class SavedParameters:
    """The hooks on saved tensors for the units that come and go.

    Args:
        before_read: called with the unit of a saved parameter that is about to be read.
    """

    def __init__(self, units: Sequence[Unit], before_read: Callable[[Unit], None]) -> None:
        leaving = [unit for unit in units if unit.comes_and_goes]
        self._unit_of = {storage_id(unit.flat.tensor): unit for unit in leaving if unit.layout.order}
        self._placeholders = {
            storage_id(unit.appearance.placeholders): unit
            for unit in leaving
            if unit.appearance.placeholders is not None
        }
        self._owners = self._unit_of.keys() | self._placeholders.keys()
        self._places: dict[Unit, dict[Any, _Place]] = {unit: {} for unit in leaving}
        whole = {unit.appearance.whole_class for unit in units if not unit.named[0].is_distributed}
        self._ordinary = {Tensor, nn.Parameter, *whole}  # a DTensor's values are in its local tensor
        """Classes of tensors whose operations call nothing of ours."""
        self._has_distributed = any(unit.named[0].is_distributed for unit in units)
        self._before_read = before_read
        self._pack_alone = self._pack_of(None)
        self._entered: list[tuple[object, saved_tensors_hooks, Callable[[Any], Any] | None]] = []
        """The callers of `push` whose hooks are still active, with these, and the `unpack` that is in force again after them."""
        self._base = 0
        """The number of callers, counted from the first, whose hooks `pop` does not remove."""
        self._saved_as_nan: str | None = None
        """The fqn of a parameter that was saved while its values were elsewhere, since the last `pop`."""

    def push(self, caller: object, *, unseen: bool) -> None:
        """Pack all tensors that autograd saves on this thread from now on, until the same caller calls `pop`.

        Args:
            unseen: whether compiled code is running: torch.compile must not trace these hooks where that code calls them.
        """
        theirs = saved_tensors_hooks_in_force()
        pack = self._pack_alone
        if theirs is not None:  # a unit inside another uses that one's hooks
            pack = theirs[0] if self._is_own(theirs[1]) else self._pack_of(theirs)
        unpack = self._unpack
        if unseen:
            pack = torch.compiler.disable(pack)
            unpack = torch.compiler.disable(unpack)
        hooks = saved_tensors_hooks(pack, unpack)
        self._entered.append((caller, hooks, None))  # before they are in force: an interrupt in between leaves a trace
        hooks.__enter__()
        if theirs is not None:
            self._entered[-1] = (caller, hooks, theirs[1])

    @property
    def others_are_in_force(self) -> bool:
        """Whether autograd calls hooks of other code now, such as those of torch's activation checkpointing."""
        theirs = saved_tensors_hooks_in_force()
        if theirs is None:
            return False
        unpack = getattr(theirs[1], "__wrapped__", theirs[1])
        return not isinstance(
            getattr(unpack, "__self__", None), SavedParameters
        )  # another sharded model's pass ours on

    def _is_own(self, unpack: Callable[[Any], Any]) -> bool:
        return getattr(unpack, "__wrapped__", unpack) == self._unpack

    def pop(self, caller: object, output: Any = None) -> None:
        """End the caller's `push`, if there was one, and each `push` of a call inside it that raised.

        Args:
            output: what the call returned, with tensors in any nesting.

        Raises:
            UsageError: torch computed the output with a parameter while its values were elsewhere.
        """
        if len(self._entered) > self._base and self._entered[-1][0] is caller:  # the usual case
            self._entered[-1][1].__exit__()
            self._entered.pop()
        elif any(one[0] is caller for one in self._entered[self._base :]):
            while self._pop_last() is not caller:
                pass
        fqn, self._saved_as_nan = self._saved_as_nan, None
        if fqn is None:
            return
        # A Python autograd function may save a parameter without reading it; then the output is not NaN.
        if any(isinstance(one, Tensor) and one.isnan().any() for one in tree_leaves(output)):
            raise UsageError(  # an error in `_pack` would lose its message inside torch.jit.script
                f"{fqn} is sharded at rest, and was read past torch's overrides (by torch.jit.script?): the result is NaN. Read it "
                "inside `with zeroshard.unsharded(module):`, or call zeroshard.borrow(module, parameter) once, before training."
            )

    def _pop_last(self) -> object:
        """Return the last caller, and remove its hooks, unless an interrupt kept them from being in force, or from this list.

        After an interrupt, other code that ended may have removed them in place of its own: then those are removed.
        """
        caller, hooks, below = self._entered[-1]
        top = saved_tensors_hooks_in_force()
        if top is not None and (top[1] is hooks.unpack_hook or top[1] is below):  # each `push` makes another object
            hooks.__exit__()
        self._entered.pop()
        return caller

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the present hooks active through all forwards inside the block."""
        before = self._base
        self._base = len(self._entered)
        try:
            yield
        finally:
            self._base = before

    def recover(self) -> None:
        """Remove hooks that forwards left when they ended without `pop`, as after an interrupt."""
        while len(self._entered) > self._base:
            top = saved_tensors_hooks_in_force()
            is_left = top is not None and top[1] is self._entered[-1][2]
            if top is not None and not is_left and not self._is_own(top[1]):
                # Foreign hooks are above: they are popped first.
                left = [(None, hooks, below) for _, hooks, below in self._entered[self._base :]]
                self._entered[self._base :] = left
                return
            self._pop_last()

    # [Note: hooks on saved tensors]
    # torch calls these two for each tensor that autograd saves, about 30 times for a block of a model. There is no other way to
    # learn of a read, since outputs may escape, and a parameter that is read without its memory ends the process. Together they
    # take 2 microseconds for a tensor that is not of a unit, two thirds of them torch's, and 5 for one that is.

    def _pack_of(self, others: tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None) -> Callable[[Tensor], Any]:
        """Return the hook that packs tensors.

        Args:
            others: the hooks `(pack, unpack)` that are active outside these, which get tensors outside the units.
        """
        ordinary = self._ordinary
        owners = self._owners
        storage_of = Tensor.untyped_storage

        def pack(tensor: Tensor) -> Any:
            # One frame, which calls only C for tensors outside the units.
            packed = None
            if type(tensor) in ordinary:
                try:
                    storage = number_of_storage(storage_of(tensor))
                except (RuntimeError, NotImplementedError):  # no storage, such as inside a torch.func transform
                    storage = 0
                if storage in owners:
                    packed = self._view_of(tensor, storage)
            else:
                packed = self._pack(tensor)
            if packed is not None:
                return packed
            if others is not None:
                return partial(others[1], others[0](tensor))
            # Detached: an operation's own output would keep itself alive.
            return (tensor if tensor.is_leaf else tensor.detach()), version_of(tensor)

        return pack

    def _pack(self, tensor: Tensor) -> Read | None:
        """Pack a tensor of another class, which may be of a unit. Return None if it is not."""
        divided = self._has_distributed and is_distributed(tensor)
        with past_torch_function():  # a parameter whose values are elsewhere may be saved without being read
            local = local_of(tensor) if divided else tensor
            try:
                storage = storage_id(local)
            except (RuntimeError, NotImplementedError):
                return None
            read = self._view_of(local, storage)
        return partial(self._distributed, read, distribution_of(tensor)) if divided and read is not None else read

    def _view_of(self, tensor: Tensor, storage: int) -> Read | None:
        """Return a function that reads the part of a unit that a tensor views; None if it views none.

        Args:
            storage: the number of the tensor's storage.
        """
        unit = self._unit_of.get(storage)
        if unit is None:
            unit = self._placeholders.get(storage)
            if unit is None:
                return None
            # Its values are elsewhere, and the backward reads them from the unit.
            index = int(tensor.storage_offset())
            self._saved_as_nan = unit.named[index].fqn
            if tensor.shape != unit.named[index].shape:
                return None
            tensor = unit.appearance.views[index]
        key = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        places = self._places[unit]
        place = places.get(key)
        if place is None:
            place = places[key] = self._place_of(unit, tensor)
        parameter = place.parameter
        # Not the tensor's own count: `.data`, local tensors of DTensors and tensors that `_read` made have counters of their own.
        return partial(self._read, place, version_of(parameter) - place.own_writes.frees, parameter.requires_grad)

    def _place_of(self, unit: Unit, tensor: Tensor) -> _Place:
        offset = int(tensor.storage_offset())
        start = offset * tensor.dtype.itemsize // unit.flat.tensor.dtype.itemsize
        order = unit.layout.order
        index = order[bisect_right(order, start, key=unit.layout.starts.__getitem__) - 1]
        size = tensor.size()
        stride = tensor.stride()
        entry = unit.named[index]
        itself = unit.appearance.views[index]
        is_itself = (itself.dtype, itself.size(), itself.stride()) == (tensor.dtype, size, stride)
        return _Place(
            unit, unit.parameters[index], unit.writes.own[index], tensor.dtype, size, stride, offset,
            shows_attributes=is_itself and not entry.is_distributed,
        )  # fmt: skip

    def _distributed(self, read: Read, distribution: Any) -> Tensor:
        with torch.no_grad():
            return distributed_by(distribution, read())

    def _unpack(self, packed: Any) -> Any:
        if type(packed) is partial:
            return packed()
        tensor, version = packed
        if version_of(tensor) != version:
            _refuse_changed(version, version_of(tensor), f"a tensor of shape {tuple(tensor.shape)}")
        return tensor

    def _read(self, place: _Place, version: int, is_trained: bool) -> Any:
        """Return a saved view of a unit, with its values."""
        unit, parameter, own_writes, dtype, size, stride, offset, is_whole = place
        now = version_of(parameter) - own_writes.frees
        if now != version:
            _refuse_changed(version, now, unit.named[unit.index_of[id(parameter)]].fqn)
        self._before_read(unit)
        shows_attributes = is_whole and (vars(parameter) or unit.appearance.whole_class is not nn.Parameter)
        if shows_attributes and not is_trained:
            return parameter
        flat = unit.flat.tensor
        if dtype == flat.dtype:
            if not torch.is_grad_enabled():  # the usual case, in which a context would take longer than the view
                view = flat.as_strided(size, stride, offset)
            else:
                with torch.no_grad():
                    view = flat.as_strided(size, stride, offset)
            return _Unpacked(view, parameter) if shows_attributes else view
        other: Any = torch.empty(0, dtype=dtype, device=flat.device)
        return other.set_(flat.untyped_storage(), offset, size, stride)


class _Unpacked(Tensor):
    """A view of a trained parameter that is returned to the autograd function that saved it.

    TRL's losses need it: the backward of their autograd functions reads `ds_status` of the head's weight.

    With hooks in force, torch gives the function a detached copy of the unpacked tensor and lets its class make the
    copy. So the copy can have the parameter's attributes, as without hooks.
    """

    whole: Tensor
    parameter: Tensor
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, view: Tensor, parameter: Tensor) -> _Unpacked:
        made: _Unpacked = wrapper_tensor(cls, view.size(), strides=view.stride(), dtype=view.dtype, device=view.device)
        made.whole = view
        made.parameter = parameter
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0]
        if func is not torch.ops.aten.detach.default:  # no code of the user's has this tensor
            raise NotImplementedError(f"{func} of a saved parameter that was not detached")
        values = own.whole.detach()
        if type(values) is not Tensor:  # in a dry run, tensors without values are subclasses already
            return values
        copy = values.as_subclass(_AttributeCopy)
        copy.parameter = own.parameter
        return copy


class _AttributeCopy(Tensor):
    """A detached view of a parameter's values, with the parameter's attributes. Operations on it return ordinary tensors."""

    parameter: Tensor
    __torch_function__ = disabled_torch_function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


def _refuse_changed(then: int, now: int, what: str) -> NoReturn:
    """Raise, as torch does without hooks, since a saved tensor was changed before it is read."""
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} "
        f"is at version {now}; expected version {then} instead."
    )
