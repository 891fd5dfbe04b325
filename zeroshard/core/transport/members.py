"""Owns the membership of a group and creates process groups and names in the store for its members."""

from __future__ import annotations

import inspect
import json
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from zeroshard.core.named_parameter import EP
from zeroshard.errors import UsageError
from zeroshard.torch_private import outside_of_modes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def expert_mesh_of(group: object) -> DeviceMesh | None:
    """Return `group` if it is a mesh of two dimensions of which the ranks of one, named "ep", divide experts; else None.

    Raises:
        UsageError: the mesh does not have all ranks of the job.
    """
    if not isinstance(group, DeviceMesh) or group.ndim != 2 or EP not in (group.mesh_dim_names or ()):
        return None
    ranks = sorted(ranks_of_mesh(group))
    if ranks != list(range(dist.get_world_size())):
        raise UsageError(
            f"group= is a mesh of ranks {ranks}, but the ranks of experts and of dense parameters are all "
            f"{dist.get_world_size()} ranks of the job: make the mesh of all of them."
        )
    return group


def ranks_of_mesh(mesh: DeviceMesh) -> list[int]:
    """Return the ranks of a mesh, also inside modes such as a dry run's, in which tensors have no values."""
    with outside_of_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a mesh with one dimension, or of all ranks of `expert_mesh_of`. A group is returned unchanged.

    Raises:
        UsageError: the mesh has several dimensions, this rank is not in the group, or `group` is neither.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            "this rank is not in the group that was passed. If each rank has a group, make all groups on every rank, "
            "and pass the one with this rank; otherwise leave the call out here."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup | DeviceMesh):
        raise UsageError(
            f"group= is a {type(group).__name__}, not a process group or a mesh: pass the result of "
            'torch.distributed.new_group, or mesh["dp"].'
        )
    if not isinstance(group, DeviceMesh):
        return group
    if expert_mesh_of(group) is not None:
        return dist.group.WORLD
    if group.ndim != 1:
        raise UsageError(
            f"group is a mesh of {group.ndim} dimensions, {group.mesh_dim_names}, but zeroshard takes one: name it, as in "
            'group=mesh["dp"]. For experts over their own ranks, pass a mesh of two, named "dp" and "ep".'
        )
    return group.get_group()


def refuse_no_rank(call: str, rank: int, world_size: int) -> None:
    """Raise UsageError, which names the call, if the group has no such rank."""
    if not 0 <= rank < world_size:
        raise UsageError(f"{call}: the ranks are 0 to {world_size - 1}. Choose one of them.")


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks of a process group; None means the default group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


@dataclass(frozen=True)
class Members:
    """The ranks of one of the user's process groups.

    Attributes:
        ranks: the members' global ranks, in the group's order.
        rank: this process's place among them.
        world: the size of torch's WORLD.
        timeout: the time limit of a wait, as the user chose it.
        backend: the group's backend for one type of device.
        own_group: the user's own group, if it still exists. A strong reference would keep torch from destroying it.
        store: the group's store.
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
        """Return the members of a group, with its backend and timeout for this type of device."""
        # torch has no public reader of a group's timeout.
        known = [one for one in parent._device_types if one.type == device.type] or parent._device_types
        timeout: timedelta = parent._get_backend(known[0]).options._timeout
        config = dist.distributed_c10d.get_backend_config(parent)
        backends = dict(part.split(":") for part in config.split(",") if ":" in part)
        # Tensors on the CPU are sent over gloo, even if the group's backend serves only accelerators; those of an accelerator
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
        """The user's own group. Raises `UsageError` if it was destroyed."""
        group = self.own_group()
        if group is None:
            raise UsageError(
                "the process group was destroyed, so nothing can be sent. Call destroy_process_group() after the "
                "last use of the model."
            )
        return group

    @property
    def is_subgroup(self) -> bool:
        """Whether ranks outside the group exist."""
        return len(self.ranks) < self.world

    @property
    def own(self) -> int:
        """This process's global rank."""
        return self.ranks[self.rank]

    def only(self, places: Sequence[int]) -> Members:
        """Choose members by their places in this group, in this order. This process must be one of them."""
        return replace(self, ranks=tuple(self.ranks[place] for place in places), rank=list(places).index(self.rank))

    def counted_name(self, purpose: str) -> str:
        """Return a name for these members and this purpose, the same on each of them. Each call returns a new name."""
        family = f"zeroshard/{sha256(repr(self.ranks).encode()).hexdigest()[:16]}/{purpose}"
        number = self.store.add(f"{family}/count/{self.rank}", 1)
        return f"{family}/{number}"

    @property
    def host(self) -> str:
        """This process's host: ranks with equal values share one."""
        return host_id()

    def agree(self, store: PrefixStore, what: str, value: Any) -> list[Any]:
        """Return every member's `value`, converted by JSON, through the store. Every member must call it."""
        store.set(f"{what}/{self.rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(len(self.ranks))]
        store.wait(keys, self.timeout)
        return [json.loads(value) for value in values_of(store, keys)]

    def registered(self) -> dist.ProcessGroup:
        """Create a group with the members' own backend, registered with torch. Every member must call it."""
        options: dict[str, Any] = {}
        if list(self.ranks) != sorted(self.ranks):
            if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
                raise UsageError(
                    "this torch makes groups of sorted ranks only. Sort the ranks of the group, which are "
                    f"{self.ranks}."
                )
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


def values_of(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that exist, in one request if the store can."""
    extended: Any = store
    if keys and extended.has_extended_api():
        values: list[bytes] = extended.multi_get(list(keys))
        return values
    return [store.get(key) for key in keys]


def host_id() -> str:
    """Return an id of the boot and the network namespace (the scope of socket addresses); if unreadable, the host's name."""
    with suppress(OSError):
        return f"{_BOOT_ID.read_text(encoding='utf-8').strip()} {_NETWORK.stat().st_ino}"
    return socket.gethostname()


def hosts_of(members: Members) -> list[list[int]]:
    """Return each host's members, in the group's order. Every member must call it."""
    store = PrefixStore(members.counted_name("hosts"), members.store)
    return grouped(members.agree(store, "host", members.host))


def grouped(host_of: Sequence[str]) -> list[list[int]]:
    """Return the places of equal hosts, in the order of their first places."""
    return [[place for place, host in enumerate(host_of) if host == one] for one in dict.fromkeys(host_of)]


def refuse_split(members: Members) -> None:
    """Raise UsageError if torch would split the communicator of all ranks to serve these ranks: the split waits for every rank."""
    world = dist.group.WORLD
    if not members.is_subgroup or members.backend == "gloo" or world is None or world.bound_device_id is None:
        return
    backend = world._get_backend(world.bound_device_id)
    if getattr(backend, "supports_splitting", False):  # as torch checks before it splits
        raise UsageError(
            f"group= has {len(members.ranks)} of {members.world} ranks, and init_process_group was given device_id: "
            "torch would split the communicator of all ranks, and wait for those that are not in the group. Leave "
            "device_id out, and call torch.accelerator.set_device_index(local_rank) first."
        )
