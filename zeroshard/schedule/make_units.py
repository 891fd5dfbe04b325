"""Owns the way from groups of parameters to units: which policy, dtypes, buckets and memory each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zeroshard.gradients.gradient_bucket import GradientBucket
from zeroshard.layout.bucketing import Group
from zeroshard.layout.layout import UnitLayout, lay_out, lay_out_whole
from zeroshard.parameters.context import BucketSpec, Context
from zeroshard.parameters.parameter_bucket import InCpuMemory, ParameterBucket
from zeroshard.policy import DTypes, Place, Policy, Residency
from zeroshard.schedule.unit import Unit
from zeroshard.storage.base import Slot


def make_units(groups: Sequence[Group], context: Context, first_bucket: int = 0) -> list[Unit]:
    """Make a unit for each group, with buckets numbered from `first_bucket` on. Every rank must call it."""
    units = list[Unit]()
    trained = [sum(entry.shape.numel() for entry in group.named) if group.trainable else 0 for group in groups]
    left = context.policy.offload_optimizer.ratio * sum(trained)
    for group, numel in zip(groups, trained, strict=True):
        dtypes = context.dtypes(group.dtype)
        left -= numel
        own = replace(context, policy=_policy_of(group, context.policy, leaves=left >= 0))
        unit = _make_unit(group, dtypes, first_bucket, own)
        units.append(unit)
        first_bucket += len(unit.buckets)
    return units


def _make_unit(group: Group, dtypes: DTypes, first_bucket: int, context: Context) -> Unit:
    world_size = context.collectives.world_size
    label = group.label + group.kind
    numels = [entry.shape.numel() for entry in group.named]
    if context.whole_parameters:
        layout = lay_out_whole(numels, world_size)
    else:
        layout = lay_out(numels, world_size, context.bucket_numel)
    whole = _collect(group, layout, dtypes.master, context)
    flat = context.storages.accelerator.flat_buffer(
        f"parameters of {label}", layout.numel, dtypes.param, comes_and_goes=context.policy.parameters.sharded
    )
    cpu_slot = _cpu_slot(label, layout.numel, dtypes.param, context)
    buckets: list[ParameterBucket] = []
    gradients: list[GradientBucket] = []
    for number, part in enumerate(layout.buckets, start=first_bucket):
        spec = BucketSpec(number, f"{label} [bucket {number}]", part, dtypes, group.trainable)
        rows = flat.rows(part.start, part.numel, world_size)
        buckets.append(ParameterBucket(spec, rows, whole[part.start : part.stop], cpu_slot, context))
        if group.trainable:
            gradients.append(GradientBucket(spec, buckets[-1], context))
    cpu = None if cpu_slot is None else InCpuMemory(flat, cpu_slot)
    return Unit(group, layout, flat, buckets, gradients, cpu, context)


def _collect(group: Group, layout: UnitLayout, dtype: torch.dtype, context: Context) -> Tensor:
    """Return rank 0's values of the parameters, packed [layout.numel]. Start-up needs the memory of one whole unit."""
    device = group.named[0].parameter.device
    whole = torch.zeros(layout.numel, dtype=dtype, device=device)
    for start, entry in zip(layout.starts, group.named, strict=True):
        values = entry.local if entry.is_distributed else entry.parameter.detach()
        whole[start : start + entry.shape.numel()].copy_(values.reshape(-1))
    context.collectives.broadcast(whole)
    return whole


def _cpu_slot(label: str, numel: int, dtype: torch.dtype, context: Context) -> Slot | None:
    """Return the slot for unsharded parameters between steps; None if they rest on the accelerator."""
    residency = context.policy.parameters
    storages = context.storages
    if residency.sharded or residency.place is Place.ACCELERATOR or storages.host is storages.accelerator:
        return None
    return storages.host.slot(label, numel, dtype)


def _policy_of(group: Group, policy: Policy, *, leaves: bool) -> Policy:
    """Return a group's policy. Small parameters, and optimizer states beyond the offloaded ratio, stay on the accelerator."""
    here = Place.ACCELERATOR
    if group.persistent:
        policy = replace(policy, parameters=Residency(sharded=False, place=here))
    if not leaves:
        optimizer = replace(policy.optimizer, place=here)
        gradients = replace(policy.gradients, place=here)
        policy = replace(policy, optimizer=optimizer, gradients=gradients)
    return policy
