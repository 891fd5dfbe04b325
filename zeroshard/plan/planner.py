"""Owns `plan`: whether a config fits, where its memory goes, and how fast it is, before anything is queued. Called by users."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import UsageError
from zeroshard.plan.dry_run import Job, dry_run, parted
from zeroshard.plan.machine import Machine, machine_of
from zeroshard.plan.result import Plan, limits


def plan(
    model_factory: Callable[[], nn.Module],
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int,
    batch: Callable[[int], Any] | Any,
    machine: str | Machine = "h100",
    memory: int | None = None,
    host_memory: int | None = None,
    hosts: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    micro_batch: int | None = None,
    sharded_init: bool = False,
    timeline: bool = False,
) -> Plan:
    """Run two steps of a config dry: the engine itself, on tensors without values, as one rank of many. No accelerator is needed.

    Args:
        model_factory: builds the model, and reads no weights. It is called where tensors take no memory.
        config: as `initialize` takes it.
        world_size: data-parallel ranks.
        batch: `batch(n)` gives the arguments of one call of the model for n samples: a tuple, a mapping of keywords, or a tensor.
            Or such arguments themselves, of which shapes and dtypes count.
        machine: the name of a known one (h100, a100-80gb, ...), a file of `zeroshard doctor --profile`, or your own.
        memory, host_memory: bytes of an accelerator and of a host, where they differ from the machine's.
        hosts: over which the ranks are spread; default: as few as the machine's accelerators allow.
        loss: the loss in what the model returns; default: itself, its `loss`, or its first element.
        optimizer: makes one from parameters, where the config names none; default: AdamW.
        micro_batch: samples of one call, where the config names none.
        sharded_init: the model will be built inside of `sharded_init`: what start-up takes without it does not count.
        timeline: keep what was live after each operation, for `draw`.

    Raises:
        ConfigError, UsageError: the config, or the model, would be refused; or the model could not be built without values.
    """
    made, samples = (batch, micro_batch) if callable(batch) else (lambda _: batch, micro_batch or _samples(batch))
    job = job_of(model_factory, made, world_size, machine, hosts, loss, optimizer, sharded_init=sharded_init)
    told = parted(config)[1]
    return Plan(
        job, dry_run(job, config, samples, draws=timeline), **limits(job.machine, memory, host_memory), told=told
    )


def job_of(
    model_factory: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    world_size: int,
    machine: str | Machine,
    hosts: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    *,
    sharded_init: bool = False,
) -> Job:
    """What is to be trained, and on what; see `plan`.

    Raises:
        UsageError: there are no ranks, or fewer than hosts, or there is no such machine.
    """
    known = machine if isinstance(machine, Machine) else machine_of(machine)
    if world_size < 1:
        raise UsageError(f"world_size is at least 1, not {world_size}.")
    if hosts is not None and not 1 <= hosts <= world_size:
        raise UsageError(f"{world_size} ranks cannot be spread over {hosts} hosts: each host has one rank at least.")
    spread = hosts or -(-world_size // known.accelerators)
    return Job(model_factory, batch, world_size, spread, known, loss, optimizer, sharded_init)


def _samples(batch: Any) -> int | None:
    """The first dimension of the first tensor of a batch."""
    first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return None if first is None else first.shape[0]
