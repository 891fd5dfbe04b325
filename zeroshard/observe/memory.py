"""Owns the count of bytes that live on this rank, and their peak, and what the ZeRO formulas say. Called by shard, engine, cli."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zeroshard.policy import DTypes, Policy
from zeroshard.schedule.unit import Unit
from zeroshard.storage.buffer_pool import BufferPool

STATES_PER_PARAMETER = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "RMSprop": 1, "Adagrad": 1,
    "SGD": 1,
}  # fmt: skip
"""Tensors of optimizer state for each parameter element (SGD: with momentum)."""


def memory_report(
    units: Sequence[Unit],
    states: Iterable[Tensor],
    pool: BufferPool,
    parked_nbytes: int = 0,
    emptied: Iterable[int] = (),
) -> dict[str, int]:
    """Bytes of live storage of the accelerator on this rank, each storage counted once.

    Args:
        states: what the optimizer keeps there.
        parked_nbytes: what units gave back and waits for the next one, and scratch that is not the pool's.
        emptied: addresses of storages that have no memory now.

    Returns:
        parameters: unsharded and sharded ones, in the dtype of the forward (in fp32 they are the master weights too).
        gradients: those kept between microbatches and steps, until `zero_grad`.
        optimizer: the optimizer's state, and master weights where they are tensors of their own.
        buffers: scratch for communication, and what is parked.
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
        "buffers": pool.nbytes + parked_nbytes,
    }


def _parameters(unit: Unit) -> Iterator[Tensor]:
    if unit.flat.nbytes:
        yield unit.flat.tensor
    for bucket in unit.buckets:
        yield from bucket.tensors("parameters")


def live_nbytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes of the storages of these tensors, but for those in `seen`, which learns the others. Asks for no address."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Python's identity of the wrapper is not stable.
        if storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def peak_nbytes(device: torch.device) -> int:
    """The most that this process has had at once: of the accelerator, by its allocator; on a CPU, of resident memory.

    0 where the accelerator's allocator does not count. Nobody waits for the device.
    """
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else 0


def formula(
    policy: Policy, dtypes: DTypes, numel: float, world_size: int, states: int = 2, ranks_per_host: int | None = None
) -> dict[str, float]:
    """Bytes per rank at rest, as in the ZeRO paper (arXiv:1910.02054, figure 1 and section 5).

    Args:
        numel: trainable parameters, all ranks' together.
        states: fp32 tensors of optimizer state for each parameter: 2 for Adam.
        ranks_per_host: over which parameters are sharded where each host has the whole; default: as many as the policy says.
    """
    if ranks_per_host is None:
        ranks_per_host = policy.within if isinstance(policy.within, int) else world_size

    def share(sharded: bool) -> float:
        return numel / world_size if sharded else numel

    ranks = ranks_per_host if policy.parameters.per_host else world_size
    parameters = numel / ranks if policy.parameters.sharded else numel

    # In fp32 the master weights are the parameters themselves, and only in 16 bits tensors of their own.
    master = 0 if dtypes.master == dtypes.param else dtypes.master.itemsize
    return {
        "parameters": dtypes.param.itemsize * parameters,
        "gradients": dtypes.accumulate.itemsize * share(policy.gradients.sharded),
        "optimizer": (master + states * dtypes.master.itemsize) * share(policy.optimizer.sharded),
    }
