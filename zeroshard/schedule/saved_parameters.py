"""Owns what autograd saves of sharded parameters, so that whoever reads it in a backward finds it whole. Called by hooks.

A forward saves views of parameters in its graph, and their storage is given back before the backward reads them. torch's hooks on
saved tensors see every tensor that is saved, by whichever operation, and every read: of a view of a flat buffer this keeps
the unit and
the geometry, and a read brings the unit together first. Nothing else is touched: other tensors are kept as they are, with
torch's own
check that nobody wrote to them; hooks of the user's own, or of activation checkpointing, get them as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
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
    is_itself: bool
    """It is all of that parameter, in its own shape, and an autograd function of Python saved it, which may ask what it is."""
    trained: bool


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

    def push(self, *, unseen: bool = False) -> None:
        """What is saved from now on, on this thread, comes here.

        Args:
            unseen: compiled code runs, and torch.compile would read these hooks wherever that calls them: it is not to.
        """
        theirs = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if theirs is None:
            pack = self._pack
        else:  # a unit inside of another goes on with what that one put there
            pack = theirs[0] if self._is_own(theirs[1]) else self._pack_after(*theirs)
        unpack = self._unpack
        if unseen:
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._depth += 1

    def _is_own(self, unpack: Callable[[Any], Any]) -> bool:
        return getattr(unpack, "__wrapped__", unpack) == self._unpack

    def pop(self) -> None:
        """The end of the last `push`."""
        if self._depth:
            self._depth -= 1
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def recover(self, depth: int) -> None:
        """Forwards broke off without `pop` (an interrupt that modules do not see): take off what they left above `depth`."""
        while self._depth > depth:
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is None or not self._is_own(top[1]):  # somebody else's lie above: they are popped first
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
        is_itself = _saves(sys._getframe(2)) and (like.dtype, like.size(), like.stride()) == (
            tensor.dtype,
            size,
            stride,
        )
        return _View(unit, index, version, tensor.dtype, size, stride, offset, is_itself, like.requires_grad)

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
        if packed.is_itself and not packed.trained:
            return entry.parameter
        flat = unit.flat.tensor
        if packed.dtype == flat.dtype:
            with torch.no_grad():
                view = flat.as_strided(packed.size, packed.stride, packed.offset)
                return _Unpacked(view, entry.parameter) if packed.is_itself else view
        other: Any = torch.empty(0, dtype=packed.dtype, device=flat.device)
        return other.set_(flat.untyped_storage(), packed.offset, packed.size, packed.stride)


class _Unpacked(Tensor):
    """A view of a trained parameter, on its way to the autograd function that saved it.

    Where hooks are in force, torch gives the function a detached copy of what was unpacked, and asks the class of this what that
    copy is: one that has the parameter's attributes, as where no hooks are.
    """

    whole: Tensor
    parameter: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: Tensor, parameter: Tensor) -> _Unpacked:
        made: _Unpacked = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, view.size(), strides=view.stride(), dtype=view.dtype, device=view.device
        )
        made.whole, made.parameter = view, parameter
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = args[0]
        if func is not torch.ops.aten.detach.default:  # nobody but torch has it
            raise NotImplementedError(f"{func} of a saved parameter that was not detached")
        copy = own.whole.detach().as_subclass(_Copy)
        copy.parameter = own.parameter
        return copy


class _Copy(Tensor):
    """A parameter's values, and its attributes. What is computed from it is an ordinary tensor."""

    parameter: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""What runs, as seen from a hook, while an autograd function of Python saves its tensors."""


def _saves(caller: FrameType) -> bool:
    """Whether the caller of a hook is an autograd function of Python; what keeps torch.compile away may lie between."""
    between = caller.f_back if caller.f_code.co_filename.endswith("_dynamo/eval_frame.py") else None
    return (between or caller).f_code is _APPLY


def _check(then: int, now: int, what: str) -> None:
    """As torch does where no hooks are: what was saved is what is read."""
    if then != now:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at version "
            f"{now}; expected version {then} instead."
        )
