"""Owns the memory of operations on tensors without values: what each did, so that a repetition takes a tenth of the time.

A dry run repeats few operations: each layer's, at each step, for each preset. FakeTensorMode takes 50 microseconds to
find out what one returns. `Repeats` keeps it by the operation and by all that the result depends on: shapes, strides
and dtypes of its tensors, and its other arguments. Operations that are not plain go to FakeTensorMode each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.storage.transfers import CPU
from zeroshard.torch_private import (
    FakeTensor,
    FakeTensorMode,
    below_modes,
    inside_of_kernels,
    maker_of_fakes,
    storage_id,
    tree_leaves,
)

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

Replay = Callable[[Any, Any], tuple[Any, Sequence[Tensor]]]
"""A function from an operation's arguments to its result, and the tensors in it that took memory."""


class _Operation:
    """An operation of torch, and what it did, by its arguments.

    Attributes:
        is_plain: whether its result has no values.
        has_offset: whether it is told a position in memory. Otherwise its result does not depend on where arguments begin.
    """

    def __init__(self, func: Any) -> None:
        self.func = func
        self.is_plain = func not in _NEVER
        schema = getattr(func, "_schema", None)
        self.has_offset = schema is None or any(one.name == "storage_offset" for one in schema.arguments)
        self.known: dict[Any, Replay | None] = {}


class Repeats:
    """What operations did. Several dry runs may share it, one after another."""

    def __init__(self) -> None:
        self._operations: dict[int, _Operation] = {}  # by identity, since torch hashes an operation in Python
        self._mode: Any = None
        self._fake: Callable[[Tensor], Tensor]

    def begin(self, mode: FakeTensorMode) -> None:
        """Begin a dry run with tensors of `mode`, to which results belong from now on."""
        self._mode = mode
        self._fake = maker_of_fakes(mode, CPU)

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Sequence[Tensor]]:
        """Run an operation. Return its result, and the tensors in it that may have taken memory."""
        operation = self._operations.get(id(func))
        if operation is None:
            operation = self._operations[id(func)] = _Operation(func)
        parts: list[Any] = [torch.get_default_dtype()]
        if (
            not operation.is_plain
            or torch.is_inference_mode_enabled()
            or not self._describes(args, parts, has_offset=operation.has_offset)
        ):
            return _ran(func, args, kwargs)
        if kwargs:
            parts += kwargs
            if not self._describes(kwargs.values(), parts, has_offset=operation.has_offset):
                return _ran(func, args, kwargs)
        key = tuple(parts)
        if key not in operation.known:
            before = [tensor.shape for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
            out, made = _ran(func, args, kwargs)
            operation.known[key] = self._learn(func, args, kwargs, out, before)
            return out, made
        replay = operation.known[key]
        if replay is None:
            return _ran(func, args, kwargs)
        return replay(args, kwargs)

    def _describes(self, values: Iterable[Any], parts: list[Any], *, has_offset: bool) -> bool:
        """Add to `parts` all that a result depends on. Return False if a value is not plain."""
        mode = self._mode
        for value in values:
            if isinstance(value, FakeTensor):
                dtype = value.dtype
                if value.constant is not None or value.fake_mode is not mode or value.fake_device != CPU:
                    return False
                if value.layout is not torch.strided or dtype.is_complex:
                    return False
                parts += (value.shape, value.stride(), dtype)
                if has_offset:
                    parts.append(value.storage_offset())
            elif type(value) in _PLAIN:
                parts += (type(value), value if value == value else "nan")  # no nan equals another
            elif isinstance(value, list | tuple):
                parts.append(len(value))
                if not self._describes(value, parts, has_offset=has_offset):
                    return False
            else:
                return False
        return True

    # ------------------------------------------------------------------ results

    def _learn(self, func: Any, args: Any, kwargs: Any, out: Any, before: list[torch.Size]) -> Replay | None:
        """Return a function that does the same again with other tensors; None for operations that are not plain."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace != "aten" or _TAGS & {*func.tags} or before != [tensor.shape for tensor in given]:
            return None
        if func._schema.is_mutable:
            return _returning(args, kwargs, out) if out is not None else lambda _args, _kwargs: (None, ())
        if isinstance(out, torch.dtype):
            return lambda _args, _kwargs: (out, ())
        return self._learn_tensors(func, args, given, out)

    def _learn_tensors(self, func: Any, args: Any, given: list[Tensor], out: Any) -> Replay | None:
        sequence = type(out) if isinstance(out, list | tuple) else None
        outs = list(out) if sequence else [out]
        owners = {storage_id(tensor) for tensor in given}
        if not all(_is_simple(one) for one in outs):
            return None
        if all(storage_id(one) not in owners and _is_alone(one) for one in outs):
            return self._making([(one.shape, one.stride(), one.dtype) for one in outs], sequence)
        is_view = len(given) == 1 and args and args[0] is given[0]
        if not is_view or any(storage_id(one) not in owners for one in outs):
            return None
        if func is aten.view.dtype:
            return self._reading_as
        if all(one.dtype == given[0].dtype for one in outs):
            start = given[0].storage_offset()
            return self._viewing(
                func, [(one.shape, one.stride(), one.storage_offset() - start) for one in outs], sequence
            )
        return None

    def _making(self, shapes: list[Any], sequence: type | None) -> Replay:

        def replay(_args: Any, _kwargs: Any) -> tuple[Any, Sequence[Tensor]]:
            fake = self._fake
            with below_modes():
                made = [
                    fake(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
                    for shape, stride, dtype in shapes
                ]
            return _as_before(made, sequence), made

        return replay

    def _viewing(self, func: Any, views: list[Any], sequence: type | None) -> Replay:

        def replay(args: Any, kwargs: Any) -> tuple[Any, Sequence[Tensor]]:
            whole = args[0]
            fake = self._fake
            try:
                with below_modes():
                    start = whole.storage_offset()
                    made = [fake(torch.as_strided(whole, shape, stride, start + more)) for shape, stride, more in views]
            except RuntimeError:  # the memory was freed, and this operation may not look at it, as as_strided does
                return _ran(func, args, kwargs)
            return _as_before(made, sequence), ()

        return replay

    def _reading_as(self, args: Any, kwargs: Any) -> tuple[Any, Sequence[Tensor]]:
        """View a tensor in another dtype."""
        with inside_of_kernels(self._mode):
            plain = aten.view.dtype(*args, **kwargs)
        return self._fake(plain), ()


def _as_before(made: list[Tensor], sequence: type | None) -> Any:
    return made[0] if sequence is None else sequence(made)


def _ran(func: Any, args: Any, kwargs: Any) -> tuple[Any, Sequence[Tensor]]:
    out = _grouped_product(args, kwargs) if func is aten._grouped_mm.default else func(*args, **kwargs)
    if func.namespace == "prim" or _is_view(func):
        return out, ()
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


def _argument(place: int | str, args: Any, kwargs: Any) -> tuple[Any, Sequence[Tensor]]:
    return (args[place] if isinstance(place, int) else kwargs[place]), ()


def _is_simple(value: Any) -> bool:
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_complex():
        return False
    return value.constant is None and value.fake_device == CPU and not value.requires_grad


def _is_alone(tensor: Tensor) -> bool:
    """Return whether a tensor is alone in its memory, which is no larger than it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    numel = last if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == numel * tensor.itemsize
