"""Owns a dry run's cut sequences, and its tiled losses, MLPs and norms. `zeroshard.sequence` creates them, as in a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.collectives.sequence_ranks import SequenceRanks
from zeroshard.errors import UsageError
from zeroshard.planning.machine import Clock
from zeroshard.sequence import Sequences, tile
from zeroshard.sequence.tiles import chosen

_TILED = ("*.mlp", "*.feed_forward", "*.ffn", "*norm")
"""Patterns of the names of modules that run in tiles, if a model has them."""

MOST_TILES = 4
"""The maximum number of a tensor's tiles that are run. The first two show the sum of gradients, the third stands for all
that are left out, and the last may be shorter."""


@dataclass(frozen=True)
class LongSequences:
    """A planned run's settings for long sequences.

    Attributes:
        ranks: the number of ranks that hold one sequence together.
        tile_tokens: the number of tokens in a tile of the loss, each MLP and each norm; 0 means no tiles.
    """

    ranks: int = 1
    tile_tokens: int = 0

    def refuse(self, world_size: int) -> None:
        """Raise UsageError if the ranks cannot be divided into groups that each hold a sequence."""
        if self.ranks < 1 or self.tile_tokens < 0:
            raise UsageError(
                f"sequence_parallel is {self.ranks} and tile_tokens {self.tile_tokens}: the first is at least 1, and the second at "
                "least 0. Change them, or leave them out."
            )
        if world_size % self.ranks:
            raise UsageError(
                f"{world_size} ranks cannot be divided into groups of {self.ranks} that hold a sequence. Choose a number "
                "that divides them."
            )

    @contextmanager
    def wrapped(self, model: nn.Module, send: Callable[[int], None]) -> Iterator[nn.Module]:
        """Yield a module that takes a whole batch (`input_ids`, `labels`), runs the first rank's slice, and returns the loss.

        The end of the context detaches the model from its sequences: its config, which names its attention, may be the caller's
        own.

        Args:
            send: called with the bytes that an exchange sends to other ranks.

        Raises:
            UsageError: the model's sequences cannot be cut, or its modules cannot run in tiles.
        """
        sequences = Sequences(_Simulated(self.ranks, send)).attach(model)
        try:
            if self.tile_tokens:
                names = [name for name, _ in model.named_modules()]
                patterns = [pattern for pattern in _TILED if any(fnmatchcase(name, pattern) for name in names)]
                if patterns:
                    tile(model, patterns, self.tile_tokens)
            yield _Cut(model, sequences, self.tile_tokens)
        finally:
            sequences.detach(model)

    def shortened(self, clock: Clock) -> AbstractContextManager[None]:
        """Return a context in which at most MOST_TILES tiles of a tensor run, and the time of all is counted.

        The peak of memory is the same, since tiles run one by one.
        """

        def run(parts: Sequence[slice]) -> Iterator[slice]:
            alike = len(parts) - MOST_TILES + 1
            if alike <= 1:
                yield from parts
                return
            yield from parts[:2]
            with clock.times(alike):
                yield parts[2]
            yield parts[-1]

        return chosen(run)


class _Cut(nn.Module):
    def __init__(self, model: nn.Module, sequences: Sequences, tile_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.config = getattr(model, "config", None)
        self._sequences = sequences
        self._tile_tokens = tile_tokens

    def forward(self, **batch: Any) -> Tensor:
        cut = self._sequences.cut(batch)
        tokens = cut["shift_labels"].numel() if "shift_labels" in cut else 0
        tiles = -(-tokens // self._tile_tokens) if self._tile_tokens else 1
        return self._sequences.loss(self.model, cut, tiles=tiles)


class _Simulated(SequenceRanks):
    """The first rank of a group; the others are simulated."""

    def __init__(self, size: int, send: Callable[[int], None]) -> None:
        super().__init__()
        self.size = size
        self.rank = 0
        self.members = list(range(size))
        self._send = send

    def all_to_all(self, parts: Tensor) -> Tensor:
        self._send(self._count(parts))
        return torch.empty_like(parts)

    def sum(self, values: Tensor) -> Tensor:
        return values.detach().clone()

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value] * self.size
