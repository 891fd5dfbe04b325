"""Owns the count of live bytes on this rank, memory peaks, and the ZeRO paper's formulas."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroshard.core.eight_bits import CODES, NBYTES
from zeroshard.core.unit import Unit
from zeroshard.policy import DTypes, Policy
from zeroshard.torch_private import storage_id


def memory_report(units: Sequence[Unit], states: Iterable[Tensor], scratch_nbytes: int) -> dict[str, int]:
    """Return the bytes of live storage on this rank's accelerator, with each storage counted once.

    Args:
        states: the optimizer's tensors on the accelerator.
        scratch_nbytes: the bytes of communication scratch.

    Returns:
        parameters: unsharded and sharded parameters in the dtype of the forward. In fp32, they are also the master
            weights. If a policy stores only master weights, those master weights count as parameters.
        gradients: gradients kept between microbatches and steps, until `zero_grad`.
        optimizer: the optimizer's states, and master weights that are separate tensors.
        buffers: scratch for communication.
    """
    seen: set[int] = set()

    def live(tensors: Iterable[Tensor]) -> int:
        return live_nbytes(tensors, seen)

    buckets = [bucket for unit in units for bucket in unit.buckets]
    parameters = [unit.flat.tensor for unit in units if unit.flat.nbytes]
    parameters += [tensor for bucket in buckets for tensor in bucket.tensors("parameters")]
    gradients = [tensor for unit in units for bucket in unit.gradients for tensor in bucket.tensors()]
    masters = [tensor for bucket in buckets for tensor in bucket.tensors("master")]
    return {
        "parameters": live(parameters),
        "gradients": live(gradients),
        "optimizer": live([*masters, *states]),
        "buffers": scratch_nbytes,
    }


def kept_count(units: Sequence[Unit]) -> int:
    """Return the number of times that these units could not free memory that user code, autograd or a collective still used."""
    buffers = [unit.flat for unit in units]
    gradients = [bucket for unit in units for bucket in unit.gradients]
    slots = [shard.gradient for bucket in gradients for shard in bucket.shards]
    buffers += [slot.buffer for slot in slots if slot.buffer is not None]
    return sum(buffer.kept_count for buffer in buffers)


def live_nbytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of the tensors' storages that are not in `seen`, and add these storages to `seen`."""
    total = 0
    for tensor in tensors:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes and storage_id(tensor) not in seen:
            seen.add(storage_id(tensor))
            total += nbytes
    return total


def peak_nbytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: the accelerator's allocated memory, or resident memory on a CPU.

    The result is 0 if the allocator keeps no count. The call does not wait for the device.
    """
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module = torch.get_device_module(device)
    if not hasattr(module, "max_memory_allocated"):
        return 0
    return int(module.max_memory_allocated(device))


def reserved_nbytes(device: torch.device) -> int:
    """Return the most bytes that the accelerator's allocator has reserved; 0 on a CPU, or if it keeps no count."""
    module = torch.get_device_module(device)
    if device.type == "cpu" or not hasattr(module, "max_memory_reserved"):
        return 0
    return int(module.max_memory_reserved(device))


def formula(
    policy: Policy, dtypes: DTypes, numel: float, world_size: int, states: int = 2, ranks_per_host: int = 1
) -> dict[str, float]:
    """Return each model state's bytes per rank at rest, as in the ZeRO paper (arXiv:1910.02054, figure 1, section 5).

    Args:
        numel: the number of trainable parameters of the whole model.
        states: the number of optimizer states per parameter; 2 for Adam.
        ranks_per_host: the number of ranks over which `per_host` parameters are sharded; needed only for these.
    """
    nbytes = {
        "parameters": dtypes.param.itemsize,
        "gradients": dtypes.accumulate.itemsize,
        "optimizer": states * (dtypes.state.itemsize if dtypes.state != CODES else NBYTES),
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
