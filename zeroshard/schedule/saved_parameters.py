"""Owns the sharded parameters that autograd saves, so that every reader in a backward finds them whole.

A forward saves views of parameters in its graph, and their storage is freed before the backward reads them. torch's hooks on
saved tensors get every tensor that any operation saves, and every read. Instead of a view of a flat buffer they keep the unit
and the view's geometry, and a read unshards the unit first. Other tensors are kept unchanged, with a check for writes like torch's,
or go to the hooks of the user or of activation checkpointing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.errors import UsageError
from zeroshard.schedule.unit import Unit
from zeroshard.torch_private import (
    disabled_torch_function,
    distributed_by,
    distribution_of,
    is_distributed,
    local_of,
    past_torch_function,
    saved_tensors_hooks_in_force,
    storage_id,
    tree_leaves,
    version_of,
    wrapper_tensor,
)


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a unit's flat buffer."""

    unit: Unit
    index: int
    """The index of the parameter in which the view begins."""
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    trained: bool
    shows_attributes: bool
    """Whether the view is a whole parameter with attributes, which a Python autograd function may read."""


class SavedParameters:
    """The hooks on saved tensors for the units that are sharded at rest.

    Args:
        before_read: called with the unit of a saved parameter that is about to be read.
    """

    def __init__(self, units: Sequence[Unit], before_read: Callable[[Unit], None]) -> None:
        self._unit_of = {storage_id(one.flat.tensor): one for one in units if one.sharded_at_rest and one.layout.order}
        self._placeholders = {
            storage_id(unit.appearance.placeholders): unit
            for unit in units
            if unit.sharded_at_rest and unit.appearance.placeholders is not None
        }
        self._has_distributed = any(unit.named[0].is_distributed for unit in units)
        self._before_read = before_read
        self._entered: list[tuple[object, saved_tensors_hooks]] = []
        """The callers of `push` whose hooks are still active, with these hooks."""
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
        pack: Callable[[Tensor], Any] = partial(self._pack, theirs)
        if theirs is not None and self._is_own(theirs[1]):  # a unit inside another uses that one's hooks
            pack = theirs[0]
        unpack = self._unpack
        if unseen:
            pack = torch.compiler.disable(pack)
            unpack = torch.compiler.disable(unpack)
        hooks = saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._entered.append((caller, hooks))

    def _is_own(self, unpack: Callable[[Any], Any]) -> bool:
        return getattr(unpack, "__wrapped__", unpack) == self._unpack

    def pop(self, caller: object, output: Any = None) -> None:
        """End the caller's `push`, if there was one, and each `push` of a call inside it that raised.

        Args:
            output: what the call returned, with tensors in any nesting.

        Raises:
            UsageError: torch computed the output with a parameter while its values were elsewhere.
        """
        while any(one is caller for one, _ in self._entered[self._base :]):
            if self._pop_last() is caller:
                break
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
        caller, hooks = self._entered.pop()
        hooks.__exit__()
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
            if top is None or not self._is_own(top[1]):  # foreign hooks are above: they are popped first
                left = [(None, hooks) for _, hooks in self._entered[self._base :]]
                self._entered[self._base :] = left
                return
            self._pop_last()

    def _pack(self, others: tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None, tensor: Tensor) -> Any:
        """Pack a tensor. A tensor outside the units goes to `others`, the hooks `(pack, unpack)` that are active outside these."""
        if self._has_distributed and is_distributed(tensor):
            local = self._view_of(local_of(tensor))
            if local is not None:
                return partial(self._distributed, local, distribution_of(tensor))
        else:
            with past_torch_function():  # a parameter whose values are elsewhere may be saved without being read
                view = self._view_of(tensor)
            if view is not None:
                return view
        if others is not None:
            return partial(others[1], others[0](tensor))
        # Detached: an operation's own output would keep itself alive.
        return (tensor if tensor.grad_fn is None else tensor.detach()), version_of(tensor)

    def _view_of(self, tensor: Tensor) -> _View | None:
        """Return the part of a unit that a tensor views; None if it views none."""
        try:
            storage = storage_id(tensor)
        except (RuntimeError, NotImplementedError):  # no storage, such as inside a torch.func transform
            return None
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
        offset = int(tensor.storage_offset())
        place = offset * tensor.dtype.itemsize // unit.flat.tensor.dtype.itemsize
        starts = unit.layout.starts
        order = unit.layout.order
        index = order[bisect_right(order, place, key=starts.__getitem__) - 1]
        size = tensor.size()
        stride = tensor.stride()
        entry = unit.named[index]
        like: Any = entry.parameter
        # Not the tensor's own count: `.data`, local tensors of DTensors and tensors that `_unpack` made have counters of their own.
        version = version_of(like) - unit.appearance.own_writes[index].frees
        itself = unit.appearance.views[index]
        is_itself = (itself.dtype, itself.size(), itself.stride()) == (tensor.dtype, size, stride)
        has_attributes = bool(vars(like)) or unit.appearance.whole_class is not nn.Parameter
        return _View(
            unit, index, version, tensor.dtype, size, stride, offset, like.requires_grad,
            shows_attributes=is_itself and has_attributes and not entry.is_distributed,
        )  # fmt: skip

    def _distributed(self, local: _View, distribution: Any) -> Tensor:
        with torch.no_grad():
            return distributed_by(distribution, self._unpack(local))

    def _unpack(self, packed: Any) -> Any:
        kind = type(packed)
        if kind is tuple:
            tensor, version = packed
            _check(version, version_of(tensor), f"a tensor of shape {tuple(tensor.shape)}")
            return tensor
        if kind is partial:
            return packed()
        unit = packed.unit
        entry = unit.named[packed.index]
        frees = unit.appearance.own_writes[packed.index].frees
        _check(packed.version, version_of(entry.parameter) - frees, entry.fqn)
        self._before_read(unit)
        if packed.shows_attributes and not packed.trained:
            return entry.parameter
        flat = unit.flat.tensor
        if packed.dtype == flat.dtype:
            with torch.no_grad():
                view = flat.as_strided(packed.size, packed.stride, packed.offset)
                return _Unpacked(view, entry.parameter) if packed.shows_attributes else view
        other: Any = torch.empty(0, dtype=packed.dtype, device=flat.device)
        return other.set_(flat.untyped_storage(), packed.offset, packed.size, packed.stride)


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
        copy = values.as_subclass(_Copy)
        copy.parameter = own.parameter
        return copy


class _Copy(Tensor):
    """A detached view of a parameter's values, with the parameter's attributes. Operations on it return ordinary tensors."""

    parameter: Tensor
    __torch_function__ = disabled_torch_function

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


def _check(then: int, now: int, what: str) -> None:
    """Raise, as torch does without hooks, if a saved tensor was changed before it is read."""
    if then != now:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} "
            f"is at version {now}; expected version {then} instead."
        )
