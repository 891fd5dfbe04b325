"""Owns the mark of an optimizer's state dict that names its shards: it loads only into these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.step.shard_view import ShardView

SHARDS = "shards"
"""The key in the state dict."""


def names_of_shards(groups: Sequence[Sequence[Tensor]], views: Sequence[ShardView]) -> list[list[Any]]:
    """Return [fqn, first element, elements] of each view, in the order of param groups, in which the optimizer counts them."""
    view_of = {id(view.value): view for view in views}
    ordered = [view_of[id(value)] for group in groups for value in group]
    return [[view.named.fqn, view.parameter_start, view.numel] for view in ordered]


def refuse_other_shards(
    state_dict: Mapping[str, Any], groups: Sequence[Sequence[Tensor]], views: Sequence[ShardView]
) -> None:
    """Raise if a state dict belongs to other shards: torch numbers parameters, and would assign states to wrong ones."""
    own = names_of_shards(groups, views)
    if SHARDS not in state_dict and not _fits(state_dict, groups):
        raise UsageError(
            "this state dict is of an optimizer that zeroshard did not shard, and has states of whole parameters: a sharded "
            "optimizer takes its own state dicts only. Begin with new states, or load a checkpoint with sharded.load."
        )
    if state_dict.get(SHARDS, own) != own:
        raise UsageError(
            "this optimizer state dict is of other shards: it loads on the rank that made it, with the same world "
            "size, policy and frozen parameters. For any other, use sharded.save and load."
        )


def _fits(state_dict: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the groups are as long as this rank's, and each state of a shard has the shard's shape."""
    if [len(group["params"]) for group in state_dict["param_groups"]] != [len(group) for group in groups]:
        return False
    shards = [shard for group in groups for shard in group]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, shard in zip(numbers, shards, strict=True):
        for value in state_dict["state"].get(number, {}).values():
            if isinstance(value, Tensor) and value.ndim and value.shape != shard.shape:
                return False
    return True
