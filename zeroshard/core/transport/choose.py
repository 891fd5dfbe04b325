"""Chooses the transport for a process group and a device."""

from __future__ import annotations

import logging
import weakref
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist

from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.composed import OneHost, OverHosts, TwoLevel, Within, cut
from zeroshard.core.transport.grouped import Grouped, PointToPoint
from zeroshard.core.transport.members import Members, refuse_split
from zeroshard.core.transport.native import Native
from zeroshard.core.transport.shared_memory import TURNED_OFF, NotShared, SharedMemory
from zeroshard.core.transport.watch import Watch
from zeroshard.launch import mark_use, notice_seconds


def create_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    what: str | None = None,
    *,
    lasting: bool = True,
    within: Within | None = None,
) -> Collectives:
    """Create the collectives for `group` (None: all ranks, or only this one when torch.distributed is not initialised).

    Every rank of the group must call it.

    Args:
        what: the operation that needs them, such as "shard()", for the error if a rank is missing.
        lasting: False for a few operations at points where the user's collectives could run too. A backend with expensive
            communicators then uses those of the user's group and does not create or close any.
        within: the policy's `within`: sums are computed host by host.

    Raises:
        CollectiveError: some ranks did not make the call; the message names them.
        UsageError: the ranks cannot be divided by `within`, torch would split the communicator of all ranks for `group`, or
            an environment variable has a value that cannot be used.
    """
    mark_use()
    parent = None
    if dist.is_available() and dist.is_initialized():
        parent = group if group is not None else dist.group.WORLD
        assert parent is not None
    if parent is None or dist.get_world_size(parent) == 1:
        cut(1, within or 1)
        return Alone()
    members = Members.of(parent, device)
    refuse_split(members)
    watch = Watch(members.root, members.ranks, members.own, notice_seconds(), device)

    try:
        with watch.operation(what) if what else nullcontext():
            collectives: Grouped | None = None
            if within is not None:
                with suppress(OneHost):
                    collectives = TwoLevel(members, device, watch, within, _best)
            collectives = collectives or _best(members, device, watch, lasting=lasting)
    except BaseException:
        watch.close()
        raise
    collectives.end_watch = weakref.finalize(collectives, watch.close)
    return collectives


def _best(members: Members, device: torch.device, watch: Watch, *, lasting: bool = True) -> Grouped:
    if members.backend != "gloo":
        return Native(members, device, watch, lasting=lasting)
    if device.type == "cpu":
        try:
            return SharedMemory(members, device, watch)
        except NotShared as why_not:
            hosts = why_not.hosts
            if not hosts and members.rank == 0 and str(why_not) != TURNED_OFF:
                logging.getLogger("zeroshard").warning(
                    "the ranks of this host do not share memory, and communicate over gloo, which is slower: %s",
                    why_not,
                )
        size = len(hosts[0]) if hosts else 1
        starts = range(0, len(members.ranks), size)
        # All hosts have the same number of ranks, and the ranks of each are consecutive.
        if size > 1 and hosts == [list(range(start, start + size)) for start in starts]:
            return OverHosts(members, device, watch, hosts, _best)
    return PointToPoint(members, device, watch)
