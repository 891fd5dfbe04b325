"""Owns the conversion of optimizer state between shards and an unsharded optimizer's state dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.resident import runs_along
from zeroshard.core.transport.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.model.zero_redundancy.gathered_bucket import OwnView, finish_all, in_storage_order

_AT_ONCE = 64
"""The maximum number of tensors that are sent in one launch, if the backend supports that."""

State = dict[str, Any]


def consolidate(
    optimizer: torch.optim.Optimizer, views: Sequence[OwnView], pieces: Sequence[Sequence[int]], parameters: Sequence[Tensor],
    collectives: Collectives, to: int,
) -> dict[int, State] | None:  # fmt: skip
    """Return the complete state by parameter index, in CPU memory, on rank `to`; None on other ranks.

    Every rank must call it. All ranks first exchange JSON lists of their tensors. Then each tensor is sent to rank
    `to`.

    Args:
        pieces: [parameter index, start, stop] of each view.
    """
    held = [(piece, view) for piece, view in zip(pieces, views, strict=True) if optimizer.state.get(view.value)]
    described = [[*piece, _describe(optimizer.state[view.value], view)] for piece, view in held]
    whole: dict[int, State] = {}
    sent: list[tuple[Tensor | None, Tensor | None, int, torch.device]] = []  # own tensor, its target, source, device
    for source, entries in enumerate(collectives.exchange_json(described, "the description of optimizer state")):
        for number, (index, start, stop, description) in enumerate(entries):
            own = optimizer.state[held[number][1].value] if source == collectives.rank else {}
            state = whole.setdefault(index, {})
            for name, (kind, dtype, content) in description.items():
                target: Tensor | None = None
                if kind == "value":
                    state[name] = content if dtype is None else torch.tensor(content, dtype=getattr(torch, dtype))
                    continue
                if collectives.rank == to:
                    if name not in state and kind == "along":
                        state[name] = torch.empty_like(parameters[index], device="cpu", dtype=getattr(torch, dtype))
                    elif name not in state:
                        state[name] = torch.empty(content, dtype=getattr(torch, dtype))
                    target = in_storage_order(state[name])
                    if kind == "along":
                        target = target[start:stop]
                sent.append((own.get(name), target, source, parameters[index].device))
    for first in range(0, len(sent), _AT_ONCE):
        _send(sent[first : first + _AT_ONCE], to, collectives)
    return dict(sorted(whole.items())) if collectives.rank == to else None


def _describe(state: State, view: OwnView) -> dict[str, tuple[str, str | None, Any]]:
    """Return (kind, dtype, content) of each entry.

    The kind is "value" (content: the number or text), "along" (a tensor of the view's shape; content:
    None), or "apart" (a tensor of a different shape; content: that shape).
    """
    described: dict[str, tuple[str, str | None, Any]] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            if runs_along(value, name, view.value):
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


def _send(
    pieces: Sequence[tuple[Tensor | None, Tensor | None, int, torch.device]], to: int, collectives: Collectives
) -> None:
    """Transfer all pieces at once. Every rank must call it, with the same number of pieces."""
    label = "optimizer state on its way to one rank"
    landings: list[tuple[Tensor, Tensor]] = []
    works = []
    with collectives.together():
        for own, target, source, device in pieces:
            if own is not None and target is not None:
                target.copy_(in_storage_order(own))
            elif own is not None:
                works.append(collectives.transfer(in_storage_order(own), source, to, label))
            elif target is not None:
                landing = target if device.type == "cpu" else torch.empty_like(target, device=device)
                landings.append((landing, target))
                works.append(collectives.transfer(landing, source, to, label))
    finish_all(works)
    for landing, target in landings:
        if landing is not target:
            target.copy_(landing)


def load(
    optimizer: torch.optim.Optimizer, views: Sequence[OwnView], shards: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any],
) -> None:  # fmt: skip
    """Load the local optimizer's part of a complete state dict, or its own shards, and the options of its param groups.

    Args:
        shards: the description of this rank's shards.
    """
    saved = state_dict["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"the loaded state dict has param groups of {[len(group['params']) for group in saved]} parameters, and this "
            f"optimizer has groups of {[len(group['params']) for group in groups]}. Build it with the saved groups."
        )
    found = state_dict.get("zeroshard")
    if found is not None and any(found.get(key, own) != own for key, own in shards.items()):
        raise UsageError(
            f"the loaded state dict holds the shards of rank {found['rank']} of {found['world_size']}, and this rank needs "
            "others: call consolidate_state_dict before you save, and load what state_dict() then returns."
        )
    names = [name for group in saved for name in group["params"]]  # the keys of parameters in the saved state, by index
    numbers = {id(p): number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = {}
    for number, (view, (index, _, _)) in enumerate(zip(views, shards["pieces"], strict=True)):
        values = state_dict["state"].get(names[index] if found is None else number)
        if values:
            state[numbers[id(view.value)]] = {
                name: _part(value, name, view, is_shard=found is not None) for name, value in values.items()
            }
    local = [
        {**group, "params": [numbers[id(p)] for p in own["params"]]}
        for group, own in zip(saved, optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": local})


def _part(value: Any, name: str, view: OwnView, *, is_shard: bool) -> Any:
    """Copy a view's part of one entry of a parameter's state."""
    if not isinstance(value, Tensor):
        return value
    if is_shard or view.is_whole or name == "step":
        return value.clone()
    if value.shape != view.parameter.shape and value.ndim:
        raise UsageError(
            f"the loaded state {name!r} has shape {tuple(value.shape)} where its parameter has "
            f"{tuple(view.parameter.shape)}: it comes from an optimizer of whole parameters, and cannot be "
            "divided. Load it into that optimizer."
        )
    return (view.part(value) if value.shape == view.parameter.shape else value).clone()
