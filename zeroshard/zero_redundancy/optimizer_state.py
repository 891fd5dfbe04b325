"""Owns the conversion of optimizer state between shards and an unsharded optimizer's state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives, Work
from zeroshard.errors import UsageError
from zeroshard.layout.layout import Span
from zeroshard.zero_redundancy.parameter_bucket import OwnView, in_storage_order

_AT_ONCE = 64
"""The maximum number of tensors that are sent in one launch, if the backend supports that."""

State = dict[str, Any]


class _Transfer(NamedTuple):
    """A transfer of one tensor to the rank that consolidates.

    Attributes:
        own: the tensor, on the rank that has it; elsewhere None.
        target: the memory for the tensor, on the rank that consolidates; elsewhere None.
        source: the rank that has the tensor.
        device: the device of its parameter.
    """

    own: Tensor | None
    target: Tensor | None
    source: int
    device: torch.device


# ---------------------------------------------------------------------- all shards -> one rank


def consolidate(
    optimizer: torch.optim.Optimizer, views: Sequence[OwnView], indices: Mapping[int, int], parameters: Sequence[Tensor],
    collectives: Collectives, to: int,
) -> dict[int, State] | None:  # fmt: skip
    """Return the complete state by parameter index, in CPU memory, on rank `to`; None on other ranks.

    Every rank must call it. All ranks first exchange JSON lists of their tensors. Then each tensor is sent to rank
    `to`.
    """
    held = [view for view in views if optimizer.state.get(view.value)]
    described = [
        [indices[id(view.parameter)], view.start, view.stop, _describe(optimizer.state[view.value], view)]
        for view in held
    ]
    whole: dict[int, State] = {}
    pieces = list[_Transfer]()
    for source, entries in enumerate(collectives.exchange_json(described, "the description of optimizer state")):
        for number, (index, start, stop, description) in enumerate(entries):
            own: State = {}
            if source == collectives.rank:
                own = optimizer.state[held[number].value]
            for name, (kind, dtype, content) in description.items():
                if kind == "value":
                    if collectives.rank == to:
                        if dtype is not None:
                            content = torch.tensor(content, dtype=getattr(torch, dtype))  # noqa: PLW2901
                        whole.setdefault(index, {})[name] = content
                    continue
                target: Tensor | None = None
                if collectives.rank == to:
                    target = _home(
                        whole.setdefault(index, {}), name, kind, dtype, content, parameters[index], start, stop
                    )
                pieces.append(_Transfer(own.get(name), target, source, parameters[index].device))
    for first in range(0, len(pieces), _AT_ONCE):
        _send(pieces[first : first + _AT_ONCE], to, collectives)
    if collectives.rank != to:
        return None
    return dict(sorted(whole.items()))


def _describe(state: State, view: OwnView) -> dict[str, tuple[str, str | None, Any]]:
    """Return (kind, dtype, content) of each entry.

    The kind is "value" (content: the number or text), "along" (a tensor of the view's shape; content:
    None), or "apart" (a tensor of a different shape; content: that shape).
    """
    described: dict[str, tuple[str, str | None, Any]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if value.shape == view.value.shape and name != "step":
                described[name] = ("along", dtype, None)
            elif value.ndim == 0:
                described[name] = ("value", dtype, value.item())
            else:
                described[name] = ("apart", dtype, list(value.shape))
        elif value is None or isinstance(value, bool | int | float | str):
            described[name] = ("value", None, value)
        else:
            raise UsageError(
                f"the optimizer keeps {name!r} as {type(value).__name__}: only tensors, numbers and strings can be "
                "consolidated. Save each rank's own state_dict() instead."
            )
    return described


def _home(
    state: State, name: str, kind: str, dtype: str, shape: list[int] | None, parameter: Tensor, start: int, stop: int
) -> Tensor:
    """Return the part of the complete state that a piece fills, 1-D. The first call for a state allocates all of it."""
    if kind == "along":
        if name not in state:
            state[name] = torch.empty_like(parameter, device="cpu", dtype=getattr(torch, dtype))
        return in_storage_order(state[name])[start:stop]
    if name not in state:
        state[name] = torch.empty(shape or [], dtype=getattr(torch, dtype))
    whole: Tensor = state[name]
    return whole.view(-1)


def _send(pieces: Sequence[_Transfer], to: int, collectives: Collectives) -> None:
    """Transfer all pieces at once. Every rank must call it, with the same number of pieces."""
    label = "optimizer state on its way to one rank"
    arriving: list[tuple[Tensor, Tensor, Work]] = []
    sending: list[Work] = []
    with collectives.together():
        for own, target, source, device in pieces:
            if own is not None and target is not None:
                target.copy_(in_storage_order(own))
            elif own is not None:
                sending.append(collectives.transfer(in_storage_order(own), source, to, label))
            elif target is not None:
                landing = target
                if device.type != "cpu":
                    landing = torch.empty_like(target, device=device)
                arriving.append((landing, target, collectives.transfer(landing, source, to, label)))
    for landing, target, pending in arriving:
        pending.wait()
        if landing is not target:
            target.copy_(landing)
    for pending in sending:
        pending.wait()


# ---------------------------------------------------------------------- a state dict -> this rank's shards


def load(
    optimizer: torch.optim.Optimizer, views: Sequence[OwnView], indices: Mapping[int, int],
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any],
) -> None:  # fmt: skip
    """Load the local optimizer's part of a complete or sharded state dict, and the options of its param groups."""
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"the loaded state dict has param groups of {[len(group['params']) for group in saved]} parameters, and this "
            f"optimizer has groups of {[len(group['params']) for group in groups]}. Build it with the saved groups."
        )
    names = [name for group in saved for name in group["params"]]  # the keys of parameters in the saved state, by index
    if "zeroshard" in state_dict:
        find = _find_in_shards(state_dict)
    else:
        find = _find_in_whole(state_dict, names)
    state = {}
    numbers = {id(p): number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    for view in views:
        found = find(indices[id(view.parameter)], view)
        if found:
            state[numbers[id(view.value)]] = found
    local = [
        {**group, "params": [numbers[id(p)] for p in own["params"]]}
        for group, own in zip(saved, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": local})


Find = Callable[[int, OwnView], State | None]


def _find_in_whole(state_dict: Mapping[str, Any], names: Sequence[Any]) -> Find:
    def find(index: int, view: OwnView) -> State | None:
        whole = state_dict["state"].get(names[index])
        if not whole:
            return None
        return {name: _part(value, name, view) for name, value in whole.items()}

    return find


def _part(value: Any, name: str, view: OwnView) -> Any:
    """Copy a view's part of one entry of a parameter's complete state."""
    if not isinstance(value, Tensor):
        return value
    if name == "step" or view.is_whole:
        return value.clone()
    if value.shape == view.parameter.shape:
        return view.part(value).clone()
    if value.ndim == 0:
        return value.clone()
    raise _not_divisible(name, value, view)


def _not_divisible(name: str, value: Tensor, view: OwnView) -> UsageError:
    return UsageError(
        f"the loaded state {name!r} has shape {tuple(value.shape)} where its parameter has "
        f"{tuple(view.parameter.shape)}: it comes from an optimizer of whole parameters, and cannot be "
        "divided. Load it into that optimizer."
    )


def _find_in_shards(state_dict: Mapping[str, Any]) -> Find:
    described = state_dict["zeroshard"]
    saved: dict[int, list[tuple[Span, State]]] = {}
    for number, (index, start, stop) in enumerate(described["pieces"]):
        saved.setdefault(index, []).append((Span(str(index), start, stop), state_dict["state"].get(number, {})))

    def find(index: int, view: OwnView) -> State | None:
        # The pieces may differ from the saved ones: take parts of several saved spans, in order.
        needed: list[tuple[slice, int, State]] = []
        found_numel = 0
        for span, state in sorted(saved.get(index, []), key=lambda one: one[0].start):
            common = span.intersect(view.start, view.stop)
            if common is not None:
                needed.append((common.within(span.start), span.numel, state))
                found_numel += common.numel
        if found_numel != view.stop - view.start:
            raise UsageError(
                f"the loaded state dict holds the shards of rank {described['rank']} of {described['world_size']}, and this "
                "rank needs others: call consolidate_state_dict before you save, and load what state_dict() then returns."
            )
        found: State = {}
        _, numel, first = needed[0]
        for name, value in first.items():
            is_divided = isinstance(value, Tensor) and value.ndim and name != "step"
            if is_divided and value.numel() == numel:  # from an elementwise or a whole-parameter optimizer
                found[name] = torch.cat([state[name].reshape(-1)[part] for part, _, state in needed])
                if view.is_whole:
                    found[name] = found[name].view(view.parameter.shape)
            elif is_divided and not view.is_whole:
                raise _not_divisible(name, value, view)
            elif isinstance(value, Tensor):
                found[name] = value.clone()
            else:
                found[name] = value
        return found

    return find
