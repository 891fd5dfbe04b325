"""Owns what the optimizer is given of a bucket: one shard of its parameters, master weights and gradient.

Made by gradient_bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zeroshard.layout.layout import Piece
from zeroshard.storage.base import Slot, Storage


@dataclass(frozen=True)
class Places:
    """Where the optimizer's side of a bucket is.

    Attributes:
        step: where the optimizer steps.
        home: where its states rest.
    """

    step: Storage
    home: Storage


@dataclass(eq=False)
class Shard:
    """One shard of a bucket, as the optimizer sees it: slots of [shard_numel].

    Attributes:
        number: which of the bucket's.
        rest: the parameters at rest, in the dtype of the forward.
        master: what the optimizer updates; `rest` itself where the dtype is the same.
        gradient: the mean over ranks.
        is_shown: the master weights are what the user sees and may write to.
        squares: the sum of squares of the gradient, where that left the accelerator and was not changed since.
    """

    number: int
    pieces: tuple[Piece, ...]
    rest: Slot
    master: Slot
    gradient: Slot
    places: Places
    is_shown: bool
    squares: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.master.numel

    @property
    def step(self) -> Storage:
        """Where the optimizer steps."""
        return self.places.step

    @property
    def home(self) -> Storage:
        """Where its states rest."""
        return self.places.home
