"""Owns the names and shapes that a transformers model has in files, where these differ from those in memory.

transformers 5 converts names and tensors when it loads a model, and reverts that when it saves one: its mixtures of
experts hold all experts of a layer in one tensor, and files hold one tensor for each expert. This module lets
transformers convert tensors without values and records where each element comes from. So every conversion that only
moves elements is known, and values are read and written range by range.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from zeroshard.core import blocks as moves
from zeroshard.core.blocks import Blocks, Target, TensorBlock
from zeroshard.core.named_parameter import name_of
from zeroshard.torch_private import TorchDispatchMode, is_saved, own_buffers, own_parameters

REMEDY = "Load and save this model with its from_pretrained and save_pretrained."


class NotOnlyMoved(Exception):
    """A conversion computes values, or is of another kind that cannot be followed."""


def transformers_model(model: nn.Module) -> Any:
    """Return the model as one of transformers 5, without a wrapper of torch.compile; None for other models."""
    transformers: Any = sys.modules.get("transformers")
    inner = getattr(model, "_orig_mod", model)
    if transformers is None or int(transformers.__version__.split(".")[0]) < 5:
        return None
    return inner if isinstance(inner, transformers.PreTrainedModel) else None


def targets_in_files(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], names: Sequence[str] | None = None
) -> list[Target] | None:
    """List what `save_pretrained` writes, in its order; None if the model is not of transformers.

    Args:
        model: the model.
        shapes: the shapes of its parameters and persistent buffers, by first name.
        names: their order; default: that of its state dict.

    Raises:
        NotOnlyMoved: the conversion cannot be followed.
    """
    known = transformers_model(model)
    if known is None:
        return None
    loading: Any = importlib.import_module("transformers.core_model_loading")
    names = _names(known) if names is None else names
    lost = shapes.keys() - set(names)
    if lost:
        raise NotOnlyMoved(f"its state dict lacks {min(lost)}")
    left_out = set(known._keys_to_ignore_on_save or ())
    with Trace() as trace:
        state = {name: trace.tensor(name, shapes[name]) for name in names if name in shapes and name not in left_out}
        state = _followed(loading.revert_weight_conversion, known, state)
    return [trace.target(name, tensor) for name, tensor in state.items()]


def targets_in_model(
    model: nn.Module, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Target], list[Any]] | None:
    """Find what `from_pretrained` makes of files' tensors, by name in the model; None if the model is not of transformers.

    Args:
        model: the model.
        shapes: the shapes of the files' tensors, by name.

    Returns:
        The targets, and the conversions that were used.

    Raises:
        NotOnlyMoved: a conversion cannot be followed, or fails. The message names the tensor.
    """
    known = transformers_model(model)
    if known is None:
        return None
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(known)
    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    wanted = dict.fromkeys(_names(known, all_names=True), True)
    prefix = known.base_model_prefix
    found: dict[str, Target] = {}
    with Trace() as trace:
        loads: dict[str, Any] = {}
        for key in sorted(shapes, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, pattern = loading.rename_source_key(key, [], [], prefix, wanted)
            if name not in wanted:
                continue
            if pattern is None:
                loads.setdefault(name, loading.WeightRenaming(key, name))
                pattern = key
            elif name not in loads:
                loads[name] = copy.deepcopy(of_pattern[pattern])
            if pattern in loads[name].source_patterns:  # not if the file has the name in two forms: the first counts
                loads[name].add_tensor(name, key, pattern, trace.tensor(key, shapes[key]))
        for first, load in loads.items():
            for name, tensor in _followed(load.convert, first, model=known, config=known.config).items():
                found[name] = trace.target(name, tensor[0] if isinstance(tensor, list) else tensor)
    return found, [one for one in conversions if one.was_used()]


def is_ignored(model: nn.Module, name: str) -> bool:
    """Return whether a transformers model says that it lacks a file's tensor on purpose (of a head that it has not)."""
    known = transformers_model(model)
    return known is not None and any(re.search(one, name) for one in known._keys_to_ignore_on_load_unexpected or ())


def _names(model: nn.Module, *, all_names: bool = False) -> list[str]:
    """List the names of a state dict, in its order."""
    found = []
    seen = set[int]()
    for prefix, module in model.named_modules(remove_duplicate=False):
        saved = [(name, one) for name, one in own_buffers(module).items() if is_saved(module, name)]
        for name, one in (*own_parameters(module).items(), *saved):
            if one is not None and (all_names or id(one) not in seen):
                seen.add(id(one))
                found.append(name_of(f"{prefix}.{name}".lstrip(".")))
    return found


def _followed(convert: Callable[..., dict[str, Any]], *args: Any, **options: Any) -> dict[str, Any]:
    try:
        with torch.no_grad():
            return convert(*args, **options)
    except NotOnlyMoved:
        raise
    except Exception as error:  # of a conversion: the shapes in the file do not fit
        raise NotOnlyMoved(
            f"transformers' conversion of {args[0] if isinstance(args[0], str) else 'its weights'} fails ({error})"
        ) from error


# ---------------------------------------------------------------------- manifests


class ConvertedRow(BaseModel):
    """One or several targets in a manifest: experts' tensors differ only by a number in the name and by their place.

    Attributes:
        name: the target's name, or, if `count` is given, the names' common start.
        end: the names' common end, after the number.
        source: the tensor that the target is, if it is a whole one; then all of the following are left out.
        step: the distance, in elements of the source, from one target's block to the next one's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    end: str = ""
    source: str = ""
    shape: tuple[int, ...] = ()
    blocks: tuple[TensorBlock, ...] = ()
    group: int = 0
    count: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    step: int = 0

    @classmethod
    def of(cls, target: Target) -> ConvertedRow:
        if target.is_whole:
            return cls(name=target.name, source=target.blocks[0].source)
        return cls(name=target.name, shape=target.shape, blocks=target.blocks, group=target.group)

    def with_next(self, target: Target) -> ConvertedRow | None:
        """Return a row that has the target too, if it goes on with the row's series, or None."""
        if self.source or len(self.blocks) != 1 or len(target.blocks) != 1:
            return None
        (first,), (new,) = self.blocks, target.blocks
        row = self
        if not self.count:  # a series begins
            pairs = enumerate(zip(self.name, target.name, strict=False))
            place = next((place for place, (a, b) in pairs if a != b), len(self.name))
            if self.name[place : place + 1] != "0":
                return None
            start, end = self.name[:place], self.name[place + 1 :]
            row = self.model_copy(update={"name": start, "end": end, "count": 1, "step": new.offset - first.offset})
        expected = first._replace(offset=first.offset + row.count * row.step)
        if (target.name, new) != (f"{row.name}{row.count}{row.end}", expected):
            return None
        if (target.shape, target.group) != (self.shape, self.group):
            return None
        return row.model_copy(update={"count": row.count + 1})

    def targets(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[Target]:
        """Yield the row's targets, of tensors with these shapes, or raise `ValueError`."""
        if self.source:
            if self.source not in shapes:
                raise ValueError(f"it names {self.source}, which the checkpoint lacks")
            yield Target.whole(self.name, self.source, shapes[self.source])
            return
        for number in range(self.count or 1):
            name = f"{self.name}{number}{self.end}" if self.count else self.name
            blocks = tuple(one._replace(offset=one.offset + number * self.step) for one in self.blocks)
            for one in blocks:
                numbers = (one.offset, *one.starts, *one.strides)
                fits = len(one.strides) == len(one.starts) == len(one.shape) == len(self.shape) and min(numbers) >= 0
                fits = fits and all(a + b <= c for a, b, c in zip(one.starts, one.shape, self.shape, strict=True))
                if (
                    not fits
                    or one.source not in shapes
                    or min(one.shape, default=1) < 1
                    or one.stop > prod(shapes[one.source])
                ):
                    raise ValueError(f"{name} has a part outside its tensor or of {one.source}")
            if sum(prod(one.shape) for one in blocks) != prod(self.shape):
                raise ValueError(f"{name} lacks parts")
            yield Target(name, self.shape, blocks, self.group)


def rows_of(targets: Iterable[Target]) -> list[ConvertedRow]:
    """Describe targets in as few rows as a model has tensors, about."""
    rows: list[ConvertedRow] = []
    for target in targets:
        longer = rows[-1].with_next(target) if rows else None
        if longer is not None:
            rows[-1] = longer
        else:
            rows.append(ConvertedRow.of(target))
    return rows


# ---------------------------------------------------------------------- records of operations

_Outputs = list[Blocks]


def _cut(trace: Trace, outs: Sequence[Tensor], tensor: Tensor, *args: Any, dim: int = 0) -> _Outputs:
    dim = (args[1] if len(args) > 1 else dim) % tensor.ndim
    start, found = 0, []
    for out in outs:
        found.append(moves.narrowed(trace.blocks(tensor), dim, start, start + out.shape[dim]))
        start += out.shape[dim]
    return found


def _unbind(trace: Trace, outs: Sequence[Tensor], tensor: Tensor, dim: int = 0) -> _Outputs:
    return [_select(trace, outs, tensor, dim, index)[0] for index in range(len(outs))]


def _select(trace: Trace, _outs: Sequence[Tensor], tensor: Tensor, dim: int, index: int) -> _Outputs:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]
    return [moves.without_dimension(moves.narrowed(trace.blocks(tensor), dim, index, index + 1), dim)]


def _slice(
    trace: Trace,
    _outs: Sequence[Tensor],
    tensor: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> _Outputs:
    if step != 1:
        raise NotOnlyMoved("it takes every other element")
    dim = dim % tensor.ndim
    begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return [moves.narrowed(trace.blocks(tensor), dim, begin, stop)]


def _transpose(trace: Trace, _outs: Sequence[Tensor], tensor: Tensor, first: int = 0, second: int = 1) -> _Outputs:
    dims = list(range(tensor.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return [moves.permuted(trace.blocks(tensor), dims)]


def _permute(trace: Trace, _outs: Sequence[Tensor], tensor: Tensor, dims: Sequence[int]) -> _Outputs:
    return [moves.permuted(trace.blocks(tensor), [dim % tensor.ndim for dim in dims])]


def _reshape(trace: Trace, outs: Sequence[Tensor], tensor: Tensor, *_: Any, **__: Any) -> _Outputs:
    return [moves.reshaped(trace.blocks(tensor), tensor.shape, outs[0].shape)]


def _cat(trace: Trace, outs: Sequence[Tensor], tensors: Sequence[Tensor], dim: int = 0) -> _Outputs:
    dim, start, found = dim % outs[0].ndim, 0, list[TensorBlock]()
    for tensor in tensors:
        found += moves.moved(trace.blocks(tensor), dim, start)
        start += tensor.shape[dim]
    return [tuple(found)]


def _stack(trace: Trace, outs: Sequence[Tensor], tensors: Sequence[Tensor], dim: int = 0) -> _Outputs:
    dim, found = dim % outs[0].ndim, list[TensorBlock]()
    for index, tensor in enumerate(tensors):
        found += moves.moved(moves.with_dimension(trace.blocks(tensor), dim), dim, index)
    return [tuple(found)]


def _same(trace: Trace, _outs: Sequence[Tensor], tensor: Tensor, **_: Any) -> _Outputs:
    return [trace.blocks(tensor)]


_FOLLOWED: dict[str, Callable[..., _Outputs]] = {
    "split": _cut, "split_with_sizes": _cut, "unbind": _unbind, "select": _select, "slice": _slice, "transpose": _transpose,
    "t": _transpose, "permute": _permute, "view": _reshape, "_unsafe_view": _reshape, "reshape": _reshape, "squeeze": _reshape,
    "unsqueeze": _reshape, "cat": _cat, "stack": _stack, "clone": _same, "detach": _same, "alias": _same,
}  # fmt: skip
_NEW_MEMORY = {"cat", "stack", "clone"}


class Trace(TorchDispatchMode):
    """A record of the blocks of tensors without values, and of those that share memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._known: dict[int, tuple[Tensor, Blocks, int]] = {}  # the tensor is kept, so that its id stays its own

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor without values that stands for a whole source."""
        tensor = torch.empty(tuple(shape), device="meta")
        self._shapes[name] = tuple(shape)
        self._known[id(tensor)] = (tensor, (TensorBlock.whole(name, shape),), len(self._known))
        return tensor

    def blocks(self, tensor: Tensor) -> Blocks:
        if id(tensor) not in self._known:
            raise NotOnlyMoved("it adds values")
        return self._known[id(tensor)][1]

    def target(self, name: str, tensor: Tensor) -> Target:
        blocks = self.blocks(tensor)
        source = blocks[0].source
        if blocks == (TensorBlock.whole(source, self._shapes[source]),):
            return Target.whole(name, source, tensor.shape)
        return Target(name, tuple(tensor.shape), blocks, self._known[id(tensor)][2])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else [arg])]
        known = [one for one in inputs if id(one) in self._known]
        if not known:
            return out
        name = func.overloadpacket.__name__
        if name not in _FOLLOWED:
            raise NotOnlyMoved(f"it computes {name}")
        outs = list(out) if isinstance(out, (list, tuple)) else [out]
        group = len(self._known) if name in _NEW_MEMORY else self._known[id(known[0])][2]
        for tensor, found in zip(outs, _FOLLOWED[name](self, outs, *args, **(kwargs or {})), strict=True):
            self._known[id(tensor)] = (tensor, found, group)
        return out
