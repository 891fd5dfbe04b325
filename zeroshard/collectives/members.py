"""Owns who belongs to a group, and the making of engines (process groups of our own) for them. Called by grouped."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zeroshard.errors import UsageError


@dataclass(frozen=True)
class Members:
    """The ranks of a process group of the user's.

    Attributes:
        ranks: of all ranks, in the group's order.
        rank: this process's place among them.
        world: how many ranks there are in all.
        timeout: the user's word on how long to wait.
        backend: of the group, for one type of device.
        own_group: the user's own, as long as it is there: whoever holds it keeps torch from destroying it.
        store: of the group.
        root: the store of all ranks.
    """

    ranks: tuple[int, ...]
    rank: int
    world: int
    timeout: timedelta
    backend: str
    own_group: weakref.ref[dist.ProcessGroup]
    store: Store
    root: Store

    @classmethod
    def of(cls, parent: dist.ProcessGroup, device: torch.device) -> Members:
        """Look at a group."""
        # torch has no public reader of a group's timeout.
        known = [one for one in parent._device_types if one.type == device.type] or parent._device_types
        timeout: timedelta = parent._get_backend(known[0]).options._timeout
        config = dist.distributed_c10d.get_backend_config(parent)
        backends = dict(part.split(":") for part in config.split(",") if ":" in part)
        # Tensors on the CPU travel over gloo, also where the group's backend serves accelerators alone; those of an accelerator
        # that the group does not serve pass through CPU memory.
        through_cpu = device.type == "cpu" or "gloo" in backends.values()
        backend = backends.get(device.type, "gloo" if through_cpu else config)
        ranks = tuple(dist.get_process_group_ranks(parent))
        world = dist.group.WORLD
        assert world is not None
        return cls(
            ranks,
            dist.get_rank(parent),
            world.size(),
            timeout,
            backend,
            weakref.ref(parent),
            parent.get_group_store(),
            world.get_group_store(),
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The user's own.

        Raises:
            UsageError: it was destroyed.
        """
        group = self.own_group()
        if group is None:
            raise UsageError("the process group was destroyed: nothing can be sent any more.")
        return group

    @property
    def is_subgroup(self) -> bool:
        """Whether there are other ranks."""
        return len(self.ranks) < self.world

    @property
    def own(self) -> int:
        """This process's rank among all."""
        return self.ranks[self.rank]

    def only(self, places: Sequence[int]) -> Members:
        """Some of them, this process among them, in this order; by their places here."""
        return replace(self, ranks=tuple(self.ranks[place] for place in places), rank=list(places).index(self.rank))

    def gloo(self) -> dist.ProcessGroupGloo:
        """Connections over gloo, which go when the object goes. Every member must call it; it waits for them.

        torch keeps a register of process groups, and names one by how many there are: ranks that made groups in different
        number would wait for each other under different names, and what a subgroup holds is never given back. The store
        counts instead, for these members and each of them, so any ranks may make groups in any order.
        """
        return dist.ProcessGroupGloo(self.counted_store("gloo"), self.rank, len(self.ranks), self.timeout)

    def counted_store(self, purpose: str) -> PrefixStore:
        """A part of the store that is for these members, this purpose and this time alone."""
        family = f"zeroshard/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}/{purpose}"
        number = self.store.add(f"{family}/count/{self.rank}", 1)
        return PrefixStore(f"{family}/{number}", self.store)

    def registered(self) -> dist.ProcessGroup:
        """A group of the members' own backend, which torch makes and registers. Every member must call it."""
        options: dict[str, Any] = {}
        if list(self.ranks) != sorted(self.ranks):
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise UsageError(f"this torch makes groups of sorted ranks alone, and the group's are {self.ranks}.")
            options["sort_ranks"] = False
        group: dist.ProcessGroup | None = dist.new_group(
            list(self.ranks),
            timeout=self.timeout,
            backend=self.backend,
            use_local_synchronization=self.is_subgroup,
            **options,
        )
        assert group is not None
        return group
