"""Owns the loader over this rank's part of a dataset, whose position can be saved.

The order of samples depends only on the epoch. Rank r takes every world_size-th sample, so global batches of one size
hold the same samples at any world size, except at an epoch's end. A position counts samples over all ranks, so it is
valid at any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from zeroshard.errors import UsageError


class ShardedSampler(Sampler[int]):
    """A sampler of every world_size-th sample of a shuffled epoch.

    All ranks get the same number of samples. Without `drop_last`, some of the first samples may repeat.
    """

    def __init__(self, length: int, rank: int, world_size: int, *, drop_last: bool) -> None:
        self.epoch = 0
        self.position = 0
        self.length = length
        self._rank = rank
        self._world_size = world_size
        self._drop_last = drop_last
        self.total = length - length % world_size
        if not drop_last and length % world_size:
            self.total += world_size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        order = (order * -(-self.total // max(self.length, 1)))[: self.total]
        rest = order[self.position :]
        uneven = len(rest) % self._world_size  # if the position was saved at another world size
        if uneven and self._drop_last:
            rest = rest[:-uneven]
        elif uneven:
            rest += order[: self._world_size - uneven]
        yield from rest[self._rank :: self._world_size]

    def __len__(self) -> int:
        return self.total // self._world_size


class StatefulLoader(DataLoader[Any]):
    """A DataLoader over this rank's part of a dataset, which shuffles each epoch and resumes from a saved position.

    Its state follows torchdata's convention: `state_dict()` and `load_state_dict(state)`. The position is counted in
    samples over all ranks. The first iteration after a load continues at that position. Any other iteration starts the
    epoch from its beginning.

    Attributes:
        state_of_step: the state at the beginning of the current step.

    Raises:
        UsageError: the data cannot be divided over ranks.
    """

    def __init__(
        self, data: Dataset[Any], batch_size: int, rank: int, world_size: int, *, drop_last: bool,
        collate_fn: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(data, DataLoader):
            raise UsageError(
                "training_data takes a dataset, not a DataLoader, whose batches cannot be divided over ranks. Pass "
                "training_data=loader.dataset and auto={'train_micro_batch_size_per_gpu': loader.batch_size}, or iterate "
                "over the loader yourself."
            )
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UsageError(
                f"training_data ({type(data).__name__}) has no length or cannot be indexed, so it cannot be divided over "
                "ranks. Iterate over it yourself, a part of it on each rank."
            )
        self._shard = ShardedSampler(len(data), rank, world_size, drop_last=drop_last)  # type: ignore[arg-type]
        self._world_size = world_size
        self._is_loaded = False
        self.state_of_step = self.state_dict()
        generator = torch.Generator()  # the seeds of workers must not consume random numbers of the training run
        super().__init__(
            data, batch_size, sampler=self._shard, collate_fn=collate_fn, drop_last=drop_last, generator=generator
        )

    def __iter__(self) -> Any:
        if not self._is_loaded:
            self._shard.position = 0
        self._is_loaded = False
        # Count the batches that the caller received, not those that workers have prefetched.
        samples = (self.batch_size or 1) * self._world_size
        for batch in super().__iter__():
            self._shard.position += samples
            yield batch
        self._shard.position = 0
        self._shard.epoch += 1

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data."""
        return {"epoch": self._shard.epoch, "position": self._shard.position, "length": self._shard.length}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position, at any world size. Raise a UsageError if the dataset has a different length."""
        if state["length"] != self._shard.length:
            raise UsageError(
                f"the position was saved over {state['length']} samples, but this dataset has "
                f"{self._shard.length}. Resume with the same dataset, or start from its beginning."
            )
        self._shard.epoch = state["epoch"]
        self._shard.position = state["position"]
        self._is_loaded = True
        self.state_of_step = self.state_dict()
