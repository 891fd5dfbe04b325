"""Owns what the multi-rank classes share: a process group of our own, transfers from rank to rank, and guarded waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.collectives.base import Collectives, Pending
from zeroshard.collectives.report import describe_failure
from zeroshard.errors import CollectiveError

_TRANSFER_TAG = (1 << 30) + 1
"""Transfers from one rank to another keep their order, so one tag does for all; no bucket has this number."""


class Grouped(Collectives):
    """What the two multi-rank classes share: a process group of our own, and the report when a wait fails."""

    _backend: str | None = None
    """Of the process group; None is that of the group it is made from."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, predivide_factor: float) -> None:
        super().__init__(predivide_factor)
        self._device = device
        self._ranks = dist.get_process_group_ranks(parent)
        # The group's own timeout is the user's word on how long to wait; torch has no public reader of it.
        known = [one for one in parent._device_types if one.type == device.type] or parent._device_types
        self._timeout: timedelta = parent._get_backend(known[0]).options._timeout
        self._group = self._new_group()
        self._store = self._group.get_group_store()
        self.rank = dist.get_rank(self._group)
        self.world_size = len(self._ranks)

    def _new_group(self) -> dist.ProcessGroup:
        """A group of our own: our tags and our order of collectives never meet the user's."""
        group: dist.ProcessGroup | None = dist.new_group(
            self._ranks,
            timeout=self._timeout,
            backend=self._backend,
            use_local_synchronization=self._is_subgroup,
        )
        assert group is not None
        return group

    @property
    def _is_subgroup(self) -> bool:
        return len(self._ranks) < dist.get_world_size()

    def _destroy(self, group: dist.ProcessGroup) -> None:
        # torch names a subgroup by how many groups there are: one that is gone gives its name, and its stale addresses in
        # the store, to the next. So subgroups stay until the process ends.
        if dist.is_initialized() and not self._is_subgroup:
            dist.destroy_process_group(group)

    def close(self) -> None:
        self._destroy(self._group)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        self.sent["broadcast"] += tensor.nbytes if self.rank == source else 0
        dist.broadcast(tensor, src=self._ranks[source], group=self._group)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        works: list[dist.Work | None] = []
        if self.rank == source:
            self.sent["transfer"] += tensor.nbytes
            works = [self._group.send([tensor], target, _TRANSFER_TAG)]
        elif self.rank == target:
            works = [self._group.recv([tensor], source, _TRANSFER_TAG)]
        return Transfer(self, works, "transfer", label)

    def guarded(self, wait: Callable[[], Any], label: str) -> None:
        try:
            wait()
        except RuntimeError as error:
            raise CollectiveError(self.report(label, error)) from error

    def report(self, label: str, error: RuntimeError) -> str:
        """What to tell the user of a wait that failed."""
        return describe_failure(self._store, self.rank, self.world_size, label, self._timeout, error)


class Transfer(Pending):
    """The works of one operation."""

    def __init__(self, collectives: Grouped, works: Sequence[dist.Work | None], kind: str, label: str) -> None:
        self._collectives, self._works, self._kind, self._label = collectives, works, kind, label

    def wait(self) -> None:
        works, self._works = self._works, ()
        with self._collectives.measure(self._kind):
            for work in works:
                if work is not None:
                    self._collectives.guarded(work.wait, self._label)
