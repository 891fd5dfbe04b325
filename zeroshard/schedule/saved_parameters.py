"""Owns what autograd saves of sharded parameters, so that whoever reads it in a backward finds it whole. Called by hooks.

A forward saves views of parameters in its graph, and their storage is given back before the backward reads them. torch's hooks on
saved tensors see every tensor that is saved, by whichever operation, and every read: of a view of a flat buffer this keeps
the unit and
the geometry, and a read brings the unit together first. Nothing else is touched: other tensors are kept as they are, with
torch's own
check that nobody wrote to them; hooks of the user's own, or of activation checkpointing, get them as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.schedule.unit import Unit


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a unit's flat buffer."""

    unit: Unit
    index: int
    """Of the parameter that it begins in."""
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_whole: bool
    """It is all of that parameter, in its own shape."""


@dataclass(frozen=True, slots=True)
class _Theirs:
    """What another hook made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Any]


class SavedParameters:
    """Hooks on saved tensors for the units that are sharded at rest.

    Args:
        before_read: called with the unit of a saved parameter that is about to be read.
    """

    def __init__(self, units: Iterable[Unit], before_read: Callable[[Unit], None]) -> None:
        self._unit_of = {unit.flat.tensor.untyped_storage()._cdata: unit for unit in units if unit.sharded_at_rest}
        self._before_read = before_read
        self._depth = 0

    def push(self) -> None:
        """What is saved from now on, on this thread, comes here."""
        theirs = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if theirs is None:
            pack = self._pack
        else:  # a unit inside of another goes on with what that one put there
            pack = theirs[0] if theirs[1] == self._unpack else self._pack_after(*theirs)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, self._unpack)
        self._depth += 1

    def pop(self) -> None:
        """The end of the last `push`."""
        if self._depth:
            self._depth -= 1
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def recover(self, depth: int) -> None:
        """Forwards broke off without `pop` (an interrupt that modules do not see): take off what they left above `depth`."""
        while self._depth > depth:
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is None or top[1] != self._unpack:  # somebody else's lie above: they are popped first
                return
            self.pop()

    def _pack_after(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
        """As `_pack`, with other hooks in force for what is not ours."""

        def both(tensor: Tensor) -> Any:
            return self._view_of(tensor) or _Theirs(pack(tensor), unpack)

        return both

    def _pack(self, tensor: Tensor) -> Any:
        view = self._view_of(tensor)
        if view is not None:
            return view
        # Detached: an operation's own output would keep itself alive.
        return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version

    def _view_of(self, tensor: Tensor) -> _View | None:
        try:
            unit = self._unit_of.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without a storage, such as one of torch.func
            return None
        if unit is None:
            return None
        offset = int(tensor.storage_offset())
        index = unit.layout.parameter_at(offset * tensor.dtype.itemsize // unit.flat.tensor.dtype.itemsize)
        size, stride, version = tensor.size(), tensor.stride(), tensor._version - unit.appearance.hides
        like: Any = unit.named[index].parameter
        is_whole = (like.dtype, like.size(), like.stride()) == (tensor.dtype, size, stride)
        return _View(unit, index, version, tensor.dtype, size, stride, offset, is_whole)

    def _unpack(self, packed: Any) -> Any:
        kind = type(packed)
        if kind is tuple:
            tensor, version = packed
            _check(version, tensor._version, f"a tensor of shape {tuple(tensor.shape)}")
            return tensor
        if kind is _Theirs:
            return packed.unpack(packed.packed)
        unit, entry = packed.unit, packed.unit.named[packed.index]
        _check(packed.version, entry.parameter._version - unit.appearance.hides, entry.fqn)
        self._before_read(unit)
        if packed.is_whole and not entry.parameter.requires_grad:
            # Itself, as where no hooks are: an autograd function may ask what it is. Of one that is trained torch makes another.
            return entry.parameter
        flat = unit.flat.tensor
        if packed.dtype == flat.dtype:
            with torch.no_grad():
                return flat.as_strided(packed.size, packed.stride, packed.offset)
        other: Any = torch.empty(0, dtype=packed.dtype, device=flat.device)
        return other.set_(flat.untyped_storage(), packed.offset, packed.size, packed.stride)


def _check(then: int, now: int, what: str) -> None:
    """As torch does where no hooks are: what was saved is what is read."""
    if then != now:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at version "
            f"{now}; expected version {then} instead."
        )
