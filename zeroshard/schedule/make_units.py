"""Owns the way from groups of parameters to units: which policy and dtypes each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeroshard.layout.bucketing import Group
from zeroshard.parameters.context import Context
from zeroshard.policy import Place, Policy, Residency
from zeroshard.schedule.unit import Unit


def frozen_names(units: Sequence[Unit]) -> set[str]:
    """Return the fqns of the parameters that take no gradient now."""
    return {entry.fqn for unit in units for entry in unit.named if not entry.parameter.requires_grad}


def make_units(groups: Sequence[Group], context: Context, first_bucket: int = 0) -> list[Unit]:
    """Make a unit for each group, with buckets numbered from `first_bucket` on. Every rank must call it."""
    units = list[Unit]()
    trained = [sum(entry.shape.numel() for entry in group.named) if group.trainable else 0 for group in groups]
    left = context.policy.offload_optimizer.ratio * sum(trained)
    for group, numel in zip(groups, trained, strict=True):
        dtypes = context.dtypes(group.dtype)
        left -= numel
        own = replace(context, policy=_policy_of(group, context.policy, leaves=left >= 0))
        unit = Unit(group, dtypes, first_bucket, own)
        units.append(unit)
        first_bucket += len(unit.buckets)
    return units


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
