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
    """Raise where a state dict was made of other shards: torch counts parameters, and would take states for others'."""
    own = names_of_shards(groups, views)
    if state_dict.get(SHARDS, own) != own:
        raise UsageError(
            "this optimizer state dict is of other shards: it loads on the rank that made it, with the same world "
            "size, policy and frozen parameters. For any other, use sharded.save and load."
        )
