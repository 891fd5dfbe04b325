"""Owns what an optimizer's state dict says of the shards that it is of: it loads into these alone. Called by sharded_optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroshard.errors import UsageError
from zeroshard.step.shard_view import ShardView

SHARDS = "shards"
"""The key in the state dict."""


def names_of_shards(inner: torch.optim.Optimizer, views: Sequence[ShardView]) -> list[list[Any]]:
    """[fqn, first element, elements] of each view, in the order in which the inner optimizer counts them."""
    view_of = {id(view.value): view for view in views}
    ordered = [view_of[id(value)] for group in inner.param_groups for value in group["params"]]
    return [[view.named.fqn, view.parameter_start, view.numel] for view in ordered]


def refuse_other_shards(
    state_dict: Mapping[str, Any], inner: torch.optim.Optimizer, views: Sequence[ShardView]
) -> None:
    """Raise where a state dict was made of other shards: torch counts parameters, and would take states for others'."""
    own = names_of_shards(inner, views)
    if state_dict.get(SHARDS, own) != own:
        raise UsageError(
            "this optimizer state dict is of other shards: it loads on the rank that made it, with the same world size, policy "
            "and frozen parameters. For any other, use sharded.save and load."
        )
