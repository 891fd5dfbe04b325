"""Owns the count of live bytes on this rank, their peak, and the ZeRO formulas."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zeroshard.policy import DTypes, Policy
from zeroshard.schedule.unit import Unit
from zeroshard.storage.buffers import BufferPool
from zeroshard.torch_private import storage_id


def memory_report(
    units: Sequence[Unit], states: Iterable[Tensor], pool: BufferPool, freed_nbytes: int = 0, emptied: Iterable[int] = (),
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of live storage of the accelerator on this rank, with each storage counted once.

    Args:
        states: the optimizer's tensors there.
        freed_nbytes: memory that units freed and that waits for the next one, and scratch outside the pool.
        emptied: addresses of storages that have no memory now.

    Returns:
        parameters: unsharded and sharded ones, in the dtype of the forward (in fp32 they are the master weights too). Where master
            weights are all that rests, these.
        gradients: those kept between microbatches and steps, until `zero_grad`.
        optimizer: the optimizer's state, and master weights where they are tensors of their own.
        buffers: scratch for communication, and freed memory that is kept for the next unit.
    """
    buckets = [bucket for unit in units for bucket in unit.buckets]
    seen: set[int] = set()
    gone = set(emptied)

    def live(tensors: Iterable[Tensor]) -> int:
        return live_nbytes((one for one in tensors if not gone or one.untyped_storage().data_ptr() not in gone), seen)

    return {
        "parameters": live(tensor for unit in units for tensor in _parameters(unit)),
        "gradients": live(tensor for unit in units for bucket in unit.gradients for tensor in bucket.tensors()),
        "optimizer": live([*(t for bucket in buckets for t in bucket.tensors("master")), *states]),
        "buffers": pool.nbytes + freed_nbytes,
    }


def kept_count(units: Sequence[Unit]) -> int:
    """Count how often memory of these units, or of their gradients, could not be freed, since user code, autograd
    or a collective still looked at it.
    """
    buffers = [unit.flat for unit in units]
    gradients = [bucket for unit in units for bucket in unit.gradients]
    slots = [shard.gradient for bucket in gradients for shard in bucket.shards]
    buffers += [slot.buffer for slot in slots if slot.buffer is not None]
    return sum(buffer.kept_count for buffer in buffers)


def _parameters(unit: Unit) -> Iterator[Tensor]:
    if unit.flat.nbytes:
        yield unit.flat.tensor
    for bucket in unit.buckets:
        yield from bucket.tensors("parameters")


def live_nbytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of the storages of these tensors that are not in `seen`, and add them to it. It reads no address."""
    total = 0
    for tensor in tensors:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes and storage_id(tensor) not in seen:
            seen.add(storage_id(tensor))
            total += nbytes
    return total


def peak_nbytes(device: torch.device) -> int:
    """Return the peak of this process: of the accelerator, by its allocator; on a CPU, of resident memory.

    0 if the accelerator's allocator does not count. It does not wait for the device.
    """
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return 0
    return int(module.max_memory_allocated(device))


def reserved_nbytes(device: torch.device) -> int:
    """Return the most bytes that the accelerator's allocator had taken from the driver; 0 on a CPU, or if the allocator
    does not count.
    """
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "max_memory_reserved"):
        return 0
    return int(module.max_memory_reserved(device))


def formula(
    policy: Policy, dtypes: DTypes, numel: float, world_size: int, states: int = 2, ranks_per_host: int | None = None
) -> dict[str, float]:
    """Return the bytes per rank at rest by the ZeRO paper (arXiv:1910.02054, figure 1 and section 5).

    Args:
        numel: trainable parameters of the whole model.
        states: fp32 tensors of optimizer state for each parameter: 2 for Adam.
        ranks_per_host: the ranks over which parameters are sharded if each host has the whole; default: the policy's
            `within`.
    """
    if ranks_per_host is None:
        ranks_per_host = policy.within if isinstance(policy.within, int) else world_size

    nbytes = {
        "parameters": dtypes.param.itemsize,
        "gradients": dtypes.accumulate.itemsize,
        "optimizer": states * dtypes.master.itemsize,
    }
    if policy.keeps_masters_only:
        nbytes["parameters"] = dtypes.master.itemsize
    elif dtypes.master != dtypes.param:  # in fp32 the master weights are the parameters themselves
        nbytes["optimizer"] += dtypes.master.itemsize
    found = {}
    for state, each in nbytes.items():
        residency = getattr(policy, state)
        ranks = 1
        if residency.sharded:
            ranks = ranks_per_host if residency.per_host else world_size
        found[state] = each * (numel / ranks)
    return found
