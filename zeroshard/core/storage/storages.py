"""Owns the choice of a storage for each model state."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from zeroshard.core.storage.base import AcceleratorStorage, CpuStorage, MemoryStorage, Slot, Storage
from zeroshard.core.storage.buffers import FlatBuffer
from zeroshard.core.storage.disk import DirectFile, DiskStorage
from zeroshard.core.storage.transfers import Copies, Staging, aligned_bytes
from zeroshard.errors import PolicyError
from zeroshard.policy import Offload, Place, Policy

STAGING_COUNT, STAGING_SHARE = 2, 8
"""The number of buffers for gradients on their way from the accelerator to disk, and the divisor of `buffers_nbytes` that gives
their size in all."""


def buffers_nbytes(offload: Offload) -> int:
    """Return the bytes of all buffers in CPU memory for optimizer states that rest on disk."""
    return offload.buffer_count * offload.buffer_numel * torch.float32.itemsize


def is_cpu_memory(device: torch.device) -> bool:
    """Return whether the device's memory is CPU memory: then nothing is copied between the two places."""
    return device.type == "cpu"


class Storages:
    """The storages of one sharded model.

    Attributes:
        accelerator: the storage on the device that computes.
        host: the storage in CPU memory, the same as `accelerator` if the model computes on the CPU.
        pin: whether CPU memory for transfers to and from the accelerator is pinned.

    Args:
        param_itemsize: the bytes of one element of the parameters.
    """

    def __init__(self, policy: Policy, device: torch.device, param_itemsize: int = 4) -> None:
        self._policy = policy
        self._param_itemsize = param_itemsize
        used = (
            policy.offload_optimizer if policy.optimizer.place is not Place.ACCELERATOR else policy.offload_parameters
        )
        self.pin = used.pin_memory and device.type != "cpu"
        self._copies = self._make_copies(device)
        self.accelerator = self._make_accelerator(device)
        self.host: MemoryStorage = self._make_host(device)
        self._disks: dict[str, DiskStorage] = {}
        self._parameters_in_cpu = 0

    # A dry run overrides these methods.

    def scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the device that computes, for what a collective sends or receives, with undefined content."""
        return torch.empty(numel, dtype=dtype, device=self.accelerator.device)

    def _make_copies(self, device: torch.device) -> Copies:
        return Copies(device, pin=self.pin)

    def _make_accelerator(self, device: torch.device) -> AcceleratorStorage:
        return AcceleratorStorage(device, self._copies)

    def _make_host(self, device: torch.device) -> MemoryStorage:
        if is_cpu_memory(device):
            return self.accelerator
        return CpuStorage(self._copies, pin=self.pin)

    def _make_file(self, offload: Offload) -> DirectFile:
        if offload.path is None:
            raise PolicyError("the policy stores states on disk, but names no folder: pass Offload(path=...).")
        return DirectFile(offload.path, offload.block_nbytes, offload.requests, self.accelerator.device)

    def _make_staging(self, count: int, nbytes: int, *, pin: bool) -> Staging:
        return Staging(count, nbytes, partial(aligned_bytes, pin=pin))

    def _disk(self, offload: Offload, count: int, nbytes: int, *, pin: bool) -> DiskStorage:
        """Open a file and create the staging buffers for it: `count` of at least `nbytes`, in whole blocks of the file."""
        nbytes = -(-nbytes // offload.block_nbytes) * offload.block_nbytes
        return DiskStorage(self._make_file(offload), self._copies, self._make_staging(count, nbytes, pin=pin))

    def step(self, policy: Policy) -> Storage:
        """Return the storage in which the optimizer updates a bucket under `policy`: the CPU updates states on disk."""
        return self.accelerator if policy.optimizer.place is Place.ACCELERATOR else self.host

    def optimizer(self, policy: Policy) -> Storage:
        """Return the storage in which master weights and optimizer states of a bucket under `policy` rest."""
        return self._at(policy.optimizer.place, "optimizer")

    def gradient_slot(self, policy: Policy, label: str, numel: int, dtype: torch.dtype) -> Slot:
        """Create a slot for a shard of gradients. Its memory on the accelerator is freed while it is empty."""
        storage = self._at(policy.gradients.place, "optimizer")
        if storage is self.accelerator:
            return self.accelerator.transient_slot(label, numel, dtype)
        return storage.slot(label, numel, dtype)

    def parameter_slot(self, policy: Policy, label: str, numel: int, dtype: torch.dtype) -> Slot:
        """Create a slot for parameters at rest. Parameters for the disk stay in CPU memory up to the policy's limit."""
        storage = self._at(policy.parameters.place, "parameters")
        if (
            policy.parameters.place is Place.DISK
            and self._parameters_in_cpu + numel <= policy.offload_parameters.max_in_cpu_numel
        ):
            self._parameters_in_cpu += numel
            storage = self.host
        return storage.slot(label, numel, dtype)

    def _at(self, place: Place, states: str) -> Storage:
        if place is Place.ACCELERATOR:
            return self.accelerator
        if place is Place.CPU:
            return self.host
        if states not in self._disks:
            if states == "optimizer":
                # Sub-groups get the other buffers that the policy allows (see core/travelling.py).
                offload = self._policy.offload_optimizer
                count = STAGING_COUNT
                nbytes = max(buffers_nbytes(offload) // STAGING_SHARE // STAGING_COUNT, torch.float64.itemsize)
            else:
                offload = self._policy.offload_parameters
                count = offload.buffer_count
                nbytes = offload.buffer_numel * self._param_itemsize
            self._disks[states] = self._disk(offload, count, nbytes, pin=self.pin)
        return self._disks[states]

    def memory_under(self, label: str, tensor: Tensor) -> FlatBuffer:
        """Return the storage under a tensor as a buffer of bytes, which can be freed and allocated again."""
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        return FlatBuffer(label, memory)

    def open(self, place: Place, offload: Offload) -> Storage:
        """Open a storage that the caller closes. If the model already computes in `place`, return the accelerator's storage."""
        pin = offload.pin_memory and self.accelerator.device.type != "cpu"
        if place is Place.DISK:
            nbytes = offload.buffer_numel * torch.float32.itemsize
            return self._disk(offload, offload.buffer_count, nbytes, pin=pin)
        if place is Place.ACCELERATOR or self.host is self.accelerator:
            return self.accelerator
        return CpuStorage(self._copies, pin=pin)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that are not on the accelerator, in CPU memory (with buffers for transfers) and on disk."""
        at_rest = self.host.nbytes if self.host is not self.accelerator else 0
        disks = self._disks.values()
        buffers = self._copies.staging.nbytes
        buffers += sum(disk.staging.nbytes + disk.file.buffers_nbytes for disk in disks)
        return {"cpu": at_rest + buffers, "disk": sum(disk.nbytes for disk in disks)}

    def close(self) -> None:
        """Release files and threads."""
        for disk in self._disks.values():
            disk.close()
