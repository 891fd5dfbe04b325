"""The comparison of param groups' options over ranks, in the step's small message.

Ranks that update shards at different rates train no model that one rank would train, and unsharded models drift apart.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError

DIGEST_NBYTES = 8


class GroupOptions:
    """The numbers in the param groups of the user's optimizers: those that the optimizers' constructors take."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], collectives: Collectives) -> None:
        self._optimizers = [(optimizer, tuple(dict.fromkeys(["lr", *optimizer.defaults]))) for optimizer in optimizers]
        self._collectives = collectives
        self._values: list[Any] = []
        self._has_tensors = False
        self._digest = bytes(DIGEST_NBYTES)

    def digest(self) -> bytes:
        """Return a digest of this rank's options as they are now."""
        values = [
            group.get(key) for optimizer, keys in self._optimizers for group in optimizer.param_groups for key in keys
        ]
        # Options rarely change, but a tensor may change in place.
        if self._has_tensors or values != self._values:
            numbers = array("d", chain.from_iterable(map(_numbers, values)))
            self._digest = hashlib.blake2b(numbers.tobytes(), digest_size=DIGEST_NBYTES).digest()
            self._values = values
            self._has_tensors = any(isinstance(value, Tensor) for value in values)
        return self._digest

    def refuse_different(self, digests: Sequence[bytes]) -> None:
        """Raise if ranks have different options. Every rank must call it, with all ranks' digests.

        Raises:
            UsageError: names the first option that differs, and its values.
        """
        if digests.count(digests[0]) == len(digests):
            return
        everyone = self._collectives.exchange_json([*self._named()], "the options of param groups")
        for rank, other in enumerate(everyone):
            for (name, first), (_, value) in zip(everyone[0], other, strict=False):
                if first != value:
                    raise UsageError(
                        f"{name} is {first} on rank 0 and {value} on rank {rank}: every rank must step with the same. A scheduler "
                        "that looks at losses (ReduceLROnPlateau) needs their mean: pass "
                        "sharded.sum_over_ranks(loss) / sharded.world_size."
                    )
        raise UsageError("the ranks' optimizers have different param groups: make the same groups on every rank.")

    def _named(self) -> Iterator[tuple[str, str]]:
        for optimizer, keys in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for key in keys:
                    numbers = [*_numbers(group.get(key))]
                    yield f"{key} of param group {number} of {type(optimizer).__name__}", ", ".join(map(repr, numbers))


def _numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of an option, except those on an accelerator: a read would wait for it."""
    if isinstance(value, float | int):
        yield float(value)
    elif isinstance(value, tuple):
        yield from (float(one) for one in value if isinstance(one, float | int))
    elif isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu":
        yield float(value)
