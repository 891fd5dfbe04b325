"""Owns the memory of operations on tensors without values: what each did, so that a repetition takes a tenth of the time.

A dry run repeats few operations: each layer's, at each step, for each preset. FakeTensorMode takes 50 microseconds to
find out what one returns. `Repeats` keeps it by the operation and by all that the result depends on: shapes, strides,
dtypes and places of its tensors, and its other arguments. Operations that are not plain go to FakeTensorMode each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.storage.transfers import CPU
from zeroshard.torch_private import FakeTensor, FakeTensorMode, inside_of_kernels, storage_id, tree_leaves

aten: Any = torch.ops.aten

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The types of arguments that a result depends on only by their value."""

_NEVER = {
    aten.lift_fresh.default, aten.lift_fresh_copy.default, aten._local_scalar_dense.default, aten.equal.default,
    aten.is_same_size.default,
}  # fmt: skip
"""Operations that keep or return values."""

_TAGS = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""The tags of operations that change an argument's shape, or whose result's shape depends on values."""

Replay = Callable[[Any, Any], tuple[Any, list[Tensor]]]
"""A function from an operation's arguments to its result, and the tensors in it that took memory."""


class _Unkept(Exception):
    """An argument is not plain."""


class Repeats:
    """What operations did. Several dry runs may share it, one after another.

    Attributes:
        mode: the mode of the current dry run's tensors. Results belong to it.
    """

    mode: FakeTensorMode

    def __init__(self) -> None:
        self._known: dict[Any, Replay | None] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Run an operation. Return its result, and the tensors in it that may have taken memory."""
        try:
            key = self._key(func, args, kwargs)
        except _Unkept:
            return _ran(func, args, kwargs)
        if key not in self._known:
            before = [tensor.shape for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
            out, made = _ran(func, args, kwargs)
            self._known[key] = self._learn(func, args, kwargs, out, before)
            return out, made
        replay = self._known[key]
        if replay is None:
            return _ran(func, args, kwargs)
        return replay(args, kwargs)

    # ------------------------------------------------------------------ keys

    def _key(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _NEVER or torch.is_inference_mode_enabled():
            raise _Unkept
        parts: list[Any] = [func, torch.get_default_dtype()]
        for value in args:
            self._describe(value, parts)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                self._describe(value, parts)
        return tuple(parts)

    def _describe(self, value: Any, parts: list[Any]) -> None:
        if isinstance(value, FakeTensor):
            if value.constant is not None or value.fake_device != CPU or value.layout is not torch.strided:
                raise _Unkept
            if value.fake_mode is not self.mode or value.is_complex():
                raise _Unkept
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            for one in value:
                self._describe(one, parts)
        elif type(value) in _PLAIN:
            parts += (type(value), value)
        else:
            raise _Unkept

    # ------------------------------------------------------------------ results

    def _learn(self, func: Any, args: Any, kwargs: Any, out: Any, before: list[torch.Size]) -> Replay | None:
        """Return a function that does the same again with other tensors; None for operations that are not plain."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace != "aten" or _TAGS & {*func.tags} or before != [tensor.shape for tensor in given]:
            return None
        if func._schema.is_mutable:
            return _returning(args, kwargs, out) if out is not None else lambda _args, _kwargs: (None, [])
        sequence = type(out) if isinstance(out, list | tuple) else None
        outs = list(out) if sequence else [out]
        owners = {storage_id(tensor) for tensor in given}
        if not all(_is_simple(one) for one in outs):
            return None
        if all(storage_id(one) not in owners and _is_alone(one) for one in outs):
            return self._making([(one.shape, one.stride(), one.dtype) for one in outs], sequence)
        is_view = len(given) == 1 and args and args[0] is given[0]
        if is_view and all(storage_id(one) in owners and one.dtype == given[0].dtype for one in outs):
            return self._viewing([(one.shape, one.stride(), one.storage_offset()) for one in outs], sequence)
        return None

    def _making(self, shapes: list[Any], sequence: type | None) -> Replay:

        def replay(_args: Any, _kwargs: Any) -> tuple[Any, list[Tensor]]:
            mode = self.mode
            with inside_of_kernels(mode):
                plain = [
                    torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in shapes
                ]
            made: list[Tensor] = [FakeTensor(mode, one, CPU) for one in plain]
            return _as_before(made, sequence), made

        return replay

    def _viewing(self, views: list[Any], sequence: type | None) -> Replay:

        def replay(args: Any, _kwargs: Any) -> tuple[Any, list[Tensor]]:
            whole = args[0]
            mode = self.mode
            with inside_of_kernels(mode):
                plain = [aten.as_strided.default(whole, *view) for view in views]
            made: list[Tensor] = [FakeTensor(mode, one, CPU) for one in plain]
            return _as_before(made, sequence), []

        return replay


def _as_before(made: list[Tensor], sequence: type | None) -> Any:
    return made[0] if sequence is None else sequence(made)


def _ran(func: Any, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    out = _grouped_product(args, kwargs) if func is aten._grouped_mm.default else func(*args, **kwargs)
    if func.namespace == "prim" or _is_view(func):
        return out, []
    return out, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _grouped_product(args: Any, kwargs: Any) -> Tensor:
    """Multiply matrices in groups, as mixtures of experts do. Without values, torch does so in bf16 only; kernels take fp32 too."""
    dtype = args[0].dtype
    if dtype is torch.bfloat16:
        return aten._grouped_mm.default(*args, **kwargs)  # type: ignore[no-any-return]
    in_bf16 = [one.bfloat16() if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
    out_dtype = kwargs.get("out_dtype") or dtype
    given = {**kwargs, "out_dtype": torch.bfloat16} if kwargs.get("out_dtype") else kwargs
    return aten._grouped_mm.default(*in_bf16, **given).to(out_dtype)  # type: ignore[no-any-return]


_VIEWS: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """Return whether an operation only creates a view, without allocating memory."""
    if func not in _VIEWS:
        returns = func._schema.returns
        is_alias = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        _VIEWS[func] = is_alias or func._overloadpacket is aten.detach
    return _VIEWS[func]


def _returning(args: Any, kwargs: Any, out: Any) -> Replay | None:
    """Return a function that returns the argument that an operation changed."""
    for place, value in enumerate(args):
        if value is out:
            return partial(_argument, place)
    for name, value in kwargs.items():
        if value is out:
            return partial(_argument, name)
    return None


def _argument(place: int | str, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    return (args[place] if isinstance(place, int) else kwargs[place]), []


def _is_simple(value: Any) -> bool:
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_complex():
        return False
    return value.constant is None and value.fake_device == CPU and not value.requires_grad


def _is_alone(tensor: Tensor) -> bool:
    """Return whether a tensor is alone in its memory, which is no larger than it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    numel = last if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == numel * tensor.itemsize
