"""Owns the two ways in which a unit's parameters are away from the flat buffer: sharded between uses; whole, in CPU memory, between
steps. Called by unit, which has one of them, or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from zeroshard.collectives.base import Collectives
from zeroshard.parameters.context import Live
from zeroshard.parameters.parameter_bucket import ParameterBucket
from zeroshard.storage.base import Slot
from zeroshard.storage.flat_buffer import FlatBuffer
from zeroshard.storage.transfers import LANDED, Transfer


class Away(ABC):
    """How parameters come back to the flat buffer, and leave it."""

    @abstractmethod
    def start(self, *, to_compute: bool) -> None:
        """Start to bring them together. The flat buffer takes its storage, or does in `land`.

        Args:
            to_compute: they may be rounded on their way.
        """

    @abstractmethod
    def land(self) -> None:
        """Block until what `start` began has arrived; the buckets' all-gathers are waited for elsewhere."""

    @abstractmethod
    def leave(self, *, changed: bool) -> None:
        """Bring them to where they rest, if they `changed` since they came, and give the storage back."""


@final
class ShardedAway(Away):
    """Between uses every rank has its shard alone."""

    def __init__(
        self, flat: FlatBuffer, buckets: Sequence[ParameterBucket], live: Live, collectives: Collectives
    ) -> None:
        self._flat, self._buckets, self._live, self._collectives = flat, buckets, live, collectives
        self._is_late = False
        live.numel += flat.tensor.numel()

    def start(self, *, to_compute: bool) -> None:
        # Where the others read what rests here, and nothing arrives by itself, the memory is taken no earlier than it is used.
        self._is_late = all(bucket.can_be_read_at_rest for bucket in self._buckets)
        try:
            if not self._is_late:
                self._flat.allocate()
                for bucket in self._buckets:
                    bucket.start_reload()
            with self._collectives.together():
                for bucket in self._buckets:
                    bucket.unshard(is_late=self._is_late, to_compute=to_compute)
        except BaseException:
            for bucket in self._buckets:
                bucket.abandon_unshard()
            raise
        self._live.numel += self._flat.tensor.numel()

    def land(self) -> None:
        if self._is_late:
            self._flat.allocate()
            for bucket in self._buckets:
                bucket.reload()
            self._is_late = False

    def leave(self, *, changed: bool) -> None:
        assert not changed  # each bucket took its own row before
        self._flat.free()
        self.dismiss()

    def dismiss(self) -> None:
        """What is unsharded will not be given back: it is the user's."""
        self._live.numel -= self._flat.tensor.numel()


@final
class InCpuMemory(Away):
    """Between steps all of them rest in CPU memory, on every rank; whoever reads one brings them back, without other ranks.

    Attributes:
        slot: where they rest.
        is_current: what rests there is what the parameters were when the step ended.
    """

    def __init__(self, flat: FlatBuffer, slot: Slot) -> None:
        self._flat, self.slot, self.is_current = flat, slot, False
        self._reloading: Transfer = LANDED

    def start(self, *, to_compute: bool) -> None:
        self._flat.allocate()
        self._reloading = self.slot.read(self._flat.tensor)

    def land(self) -> None:
        self._reloading.wait(self._flat.tensor.device)
        self._reloading = LANDED

    def leave(self, *, changed: bool) -> None:
        if changed:
            self.slot.write(self._flat.tensor)
            self.is_current = True
        self._flat.free()
