"""The promise: every policy uses one layout, so an optimizer's kernel gets the same views under each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from ranks import on_ranks
from twin import STAGES, TRANSPORTS, as_set, build, step


class Noting(torch.optim.SGD):
    """An optimizer that notes the tensors which it updates: their shapes, and their places between lines of 64 bytes."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        self.seen = [
            (tuple(p.shape), p.data_ptr() % 64, p.grad.data_ptr() % 64) for p in parameters if p.grad is not None
        ]
        return super().step(closure)


def test_every_policy_hands_the_optimizer_the_same_views() -> None:
    """Those of a rank's shards; stage 0 hands every rank the views of all shards."""

    def body(rank: int) -> dict[str, list[Any]]:
        seen = {}
        for name, setting in (STAGES | TRANSPORTS).items():
            with as_set(setting):
                model, sharded = build(setting.policy, make_optimizer=lambda p: Noting(p, lr=0.1), elementwise=True)
                step(model, sharded, rank, 0)
                seen[name] = sharded.optimizer.seen
        return seen

    ranks = on_ranks(body, 2)
    for name in STAGES | TRANSPORTS:
        for rank in ranks:
            if name.startswith("stage 0"):
                assert Counter(rank[name]) == Counter(ranks[0]["stage 1"] + ranks[1]["stage 1"]), name
            else:
                assert rank[name] == rank["stage 1"], name
    assert len(ranks[0]["stage 1"]) > 10
