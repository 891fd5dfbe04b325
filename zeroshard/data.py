"""Owns the loader over this rank's part of a dataset, whose position can be saved. Made by initialize.

The order of samples depends on the seed and the epoch alone: rank r takes every world_size-th, so a global batch holds the same
samples at any world size, and a position, counted in samples over all ranks, means the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from zeroshard.errors import UsageError


class ShardedSampler(Sampler[int]):
    """Every world_size-th sample of a shuffled epoch, from a position on. Ranks get equally many: the first ones are repeated."""

    def __init__(self, length: int, rank: int, world_size: int, *, drop_last: bool, seed: int = 0) -> None:
        self.epoch, self.position = 0, 0
        self.length, self._rank, self._world_size, self._seed = length, rank, world_size, seed
        per_rank = length // world_size if drop_last else -(-length // world_size)
        self.total = per_rank * world_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        order = (order * -(-self.total // max(self.length, 1)))[: self.total]
        yield from order[self.position + self._rank :: self._world_size]

    def __len__(self) -> int:
        return self.total // self._world_size


class StatefulLoader(DataLoader[Any]):
    """A DataLoader over this rank's part of a dataset that shuffles anew each epoch and goes on where its state says.

    Its state follows torchdata's convention: `state_dict()` and `load_state_dict(state)`, counted in samples over all ranks. The
    first iteration after a load goes on there; any other begins the epoch.
    """

    def __init__(
        self, data: Dataset[Any], batch_size: int, rank: int, world_size: int, *, drop_last: bool,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self._shard = ShardedSampler(len(data), rank, world_size, drop_last=drop_last)  # type: ignore[arg-type]
        self._world_size = world_size
        self._is_loaded = False
        # A generator of its own: what it draws for workers must not be missing from the training's random numbers.
        super().__init__(
            data,
            batch_size,
            sampler=self._shard,
            collate_fn=collate_fn,
            drop_last=drop_last,
            generator=torch.Generator(),
        )

    def __iter__(self) -> Any:
        if not self._is_loaded:
            self._shard.position = 0
        self._is_loaded = False
        # What was handed out counts, not what workers have fetched ahead.
        samples = (self.batch_size or 1) * self._world_size
        for batch in super().__iter__():
            self._shard.position += samples
            yield batch
        self._shard.position = 0
        self._shard.epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"epoch": self._shard.epoch, "position": self._shard.position, "length": self._shard.length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there, at any world size."""
        if state["length"] != self._shard.length:
            raise UsageError(
                f"the position was saved over {state['length']} samples, and this dataset has {self._shard.length}."
            )
        self._shard.epoch, self._shard.position, self._is_loaded = state["epoch"], state["position"], True
