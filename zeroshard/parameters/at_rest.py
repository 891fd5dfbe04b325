"""Owns which slots a bucket's parameters have at rest, by policy: their own, and those of master weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.parameters.context import BucketSpec, Context
from zeroshard.storage.base import Slot
from zeroshard.storage.storages import Storages


@dataclass(frozen=True)
class AtRest:
    """Where a bucket rests.

    Attributes:
        holders: the collectives over whose ranks the parameters are cut at rest.
        replicas: the collectives over the ranks that hold the same block, each of which updates a row of it; None if no other does.
        blocks: the unsharded rows, by holder.
        own_block: this rank's of these.
        block: the slot of the block at rest; None where the parameters are not sharded at rest.
        are_rows: whether the unsharded rows themselves are stored.
        held: the slots of the shards that this rank updates or holds, by number.
        rests: the shards among these that this rank updates.
        masters: the slots of their master weights; the same slot where one serves as both.
        copies: the master weights among these that rest beside the parameters, in slots of their own.
    """

    holders: Collectives
    replicas: Collectives | None
    blocks: Tensor
    own_block: Tensor
    block: Slot | None
    are_rows: bool
    held: dict[int, Slot]
    rests: dict[int, Slot]
    masters: dict[int, Slot]
    copies: dict[int, Slot]


def make_rests(spec: BucketSpec, rows: Tensor, whole: Tensor, whole_at_rest: Slot | None, context: Context) -> AtRest:
    """Make a bucket's slots, and fill them and the unsharded rows with the initial content. See `ParameterBucket`."""
    policy = context.policy
    storages = context.storages
    collectives = context.collectives
    whole = whole.view(rows.shape)
    rows.copy_(whole)
    holders = collectives.inside if policy.parameters.per_host else collectives
    replicas = None if holders is collectives else collectives.across
    blocks = rows.view(holders.world_size, -1)
    own_block = blocks[holders.shard]
    own_shard = collectives.shard
    has_masters = spec.trainable and spec.dtypes.master != spec.dtypes.param
    block: Slot | None = None
    if has_masters and policy.keeps_masters_only:
        block = _new_master(spec, whole[own_shard], context)
    elif policy.parameters.sharded:
        block = storages.parameter_slot(policy, spec.label, own_block.numel(), spec.dtypes.param)
        block.write(own_block)
        block.wait()
    if block is None:
        held = _whole_rows(spec, rows, whole_at_rest, context)
    elif replicas is None:
        held = {own_shard: block}
    else:
        held = _rows_of(block, spec, holders.shard, storages)
    updated = [own_shard] if policy.optimizer.sharded else held
    rests = {shard: held[shard] for shard in updated}
    masters: dict[int, Slot] = {}
    if spec.trainable:
        for shard, rest in rests.items():
            # In fp32 the shard at rest is the master: a second copy of the weights would be waste.
            is_master = rest.dtype == spec.dtypes.master
            masters[shard] = rest if is_master else _new_master(spec, whole[shard], context)
    copies = {shard: master for shard, master in masters.items() if master is not rests[shard]}
    are_rows = block is None and whole_at_rest is None
    return AtRest(holders, replicas, blocks, own_block, block, are_rows, held, rests, masters, copies)


def _whole_rows(spec: BucketSpec, rows: Tensor, whole_at_rest: Slot | None, context: Context) -> dict[int, Slot]:
    """Return the slots of parameters that are whole at rest: in CPU memory, or in the unsharded rows themselves."""
    shards = [context.collectives.shard] if context.policy.optimizer.sharded else range(spec.layout.world_size)
    if whole_at_rest is None:
        return {shard: context.storages.accelerator.around(spec.label, rows[shard]) for shard in shards}
    host = context.storages.host
    memory = whole_at_rest.memory_in(host)
    assert memory is not None
    at_rest = memory[spec.layout.start : spec.layout.stop].view_as(rows)
    return {shard: host.around(spec.label, at_rest[shard], whole_at_rest) for shard in shards}


def _rows_of(block: Slot, spec: BucketSpec, holder: int, storages: Storages) -> dict[int, Slot]:
    """Return the rows of a block that several hosts hold, as slots of their own."""
    place = next(one for one in (storages.accelerator, storages.host) if block.memory_in(one) is not None)
    memory = block.memory_in(place)
    assert memory is not None
    rows = memory.view(-1, spec.layout.shard_numel)
    first = holder * len(rows)
    return {first + number: place.around(spec.label, row, block) for number, row in enumerate(rows)}


def _new_master(spec: BucketSpec, values: Tensor, context: Context) -> Slot:
    home = context.storages.optimizer(context.policy)
    master = home.slot(f"master weights of {spec.label}", spec.layout.shard_numel, spec.dtypes.master)
    master.write(values)
    # no test can miss this wait: it bounds memory, and orders nothing. Every reader of the slot waits for the write,
    # which keeps its source. Without this wait the whole values of many units would be alive at start-up.
    master.wait()
    return master
