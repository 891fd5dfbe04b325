"""Owns runs for the host's work: threads, groups of some ranks, asynchronous saves, norms, and memory that users keep."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from insides import WRITE_BEHIND, units
from models import Stack

import zeroshard
from simgpu import device as simgpu
from simgpu import simccl
from simgpu.bodies import BF16, Training, folder_of_all
from simgpu.lead import WIDTH, Blocks
from zeroshard import Place, Policy
from zeroshard.core.replicas import digest_of, digests_as_bytes
from zeroshard.model.memory import kept_count


def group_beside_a_bound_world(rank: int, splits: bool) -> str:
    """Shard over two of three ranks, where torch would split the communicator of all."""
    group = dist.new_group([0, 1])
    world: Any = dist.group.WORLD
    world.bound_device_id = simgpu.device()
    backend: Any = simccl.SimCCL
    backend.supports_splitting = splits
    if rank == 2:
        return ""
    model = Stack().to(simgpu.device())
    try:
        zeroshard.shard(model, torch.optim.AdamW(model.parameters(), fused=True), Policy.stage(2), group=group)
    except zeroshard.UsageError as error:
        return str(error)
    return "sharded"


def threads_that_took_the_device(rank: int) -> set[str]:
    """Train from disk with an asynchronous save, and return the kinds of threads that chose this rank's device."""
    found = set()
    accelerator: Any = torch.accelerator
    before = accelerator.set_device_index

    def note(index: int) -> None:
        found.add(threading.current_thread().name.rstrip("_0123456789"))
        before(index)

    accelerator.set_device_index = note
    with folder_of_all() as folder:
        on_disk = Training(simgpu.device(), Policy.stage(2).offloaded(optimizer=Place.DISK, path=folder))
        on_disk.step()
        here = Training(simgpu.device(), Policy.stage(2))
        here.step()
        here.sharded.save(folder, "x", asynchronous=True)
        here.sharded.checkpoints.wait()
        on_disk.end()
        here.end()
    return found


def asynchronous_save(rank: int, stage: int) -> dict[str, Any]:
    """Return the host's waits and pageable copies in the first and the second asynchronous save."""
    training = Training(simgpu.device(), Policy.stage(stage), BF16)
    checkpoints: Any = training.sharded.checkpoints
    write_behind = getattr(checkpoints, WRITE_BEHIND)
    may_write = threading.Event()

    def write(*arguments: Any) -> None:
        may_write.wait()  # so that the waits of the writing thread are not counted
        write_behind(*arguments)

    setattr(checkpoints, WRITE_BEHIND, write)
    found = []
    with folder_of_all() as folder:
        for tag in ("one", "two"):
            training.step()
            checkpoints.wait()
            may_write.clear()
            training.backward()
            training.sharded.clip_grad_norm_(1.0)
            training.sharded.optimizer.step()
            training.sharded.optimizer.zero_grad()
            simgpu.reset_counts()
            training.sharded.save(folder, tag, asynchronous=True)
            counts = simgpu.counts()
            found.append({"waits": dict(counts.synchronisations), "pageable": dict(counts.pageable_copies)})
            may_write.set()
        checkpoints.wait()
    training.end()
    return {"saves": found}


def digests_of_gradients(rank: int) -> dict[str, int]:
    """Return the waits of the host for the digests of several gradients."""
    flats = [torch.full((10,), float(number), device=simgpu.device()) for number in range(4)]
    simgpu.reset_counts()
    digests = digests_as_bytes([digest_of(flat) for flat in flats])
    waits = dict(simgpu.counts().synchronisations)
    assert digests == digests_as_bytes([digest_of(flat.cpu()) for flat in flats])
    return waits


def norms_with_the_optimizer_in_cpu_memory(rank: int, stage: int) -> dict[str, Any]:
    """Return the norms and parameters of clipped steps, and the number of the host's waits while a norm was computed.

    Shards are larger than the CPU's unit of summation, so that its sums of squares have different bits than the device's.
    """
    torch.manual_seed(0)
    model = Blocks(blocks=2).to(simgpu.device())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sharded = zeroshard.shard(model, adamw, Policy.stage(stage).offloaded(optimizer=Place.CPU))
    norms: list[Any] = []
    waits = 0
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(16, WIDTH, generator=generator).to(simgpu.device())).square().mean().backward()
        simgpu.reset_counts()
        norms.append(sharded.clip_grad_norm_(None))
        waits += sum(simgpu.counts().synchronisations.values())
        norms.append(sharded.clip_grad_norm_(1e-3))
        norms.append(sharded.clip_grad_norm_(None))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    with zeroshard.unsharded(model):
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    sharded.remove()
    return {"norms": [float(norm) for norm in norms], "waits": waits, "parameters": flat}


def memory_of_parameters_in_cpu_memory_that_is_kept(rank: int, stage: int) -> int:
    """Return how often units kept memory that they should have freed, if the copies from it end early."""
    training = Training(simgpu.device(), Policy.stage(stage).offloaded(parameters=Place.CPU))
    training.step(4)
    count = kept_count(units(training.sharded))
    training.end()
    return count


def state_dict_in_storages(rank: int, stage: int, offloaded: bool) -> list[bool]:
    """Return whether each tensor of the state dict has a separate storage, and whether it has the parameter's values."""
    policy = Policy.stage(stage)
    training = Training(simgpu.device(), policy.offloaded(parameters=Place.CPU) if offloaded else policy, BF16)
    training.step(2)
    state = training.model.state_dict()
    are_alone = all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
    of = training.sharded.states.get
    are_right = all(torch.equal(value.cpu(), of(fqn).to(value.dtype).cpu()) for fqn, value in state.items())
    training.step(1)  # frees or overwrites the memory of the parameters
    training.end()
    return [are_alone, are_right]


def memory_that_is_kept(rank: int, stage: int) -> list[int]:
    """Return how often memory was not freed: in two steps, and in a third step while the user keeps a parameter's memory."""
    training = Training(simgpu.device(), Policy.stage(stage), BF16)
    found = []
    training.step(2)
    found.append(kept_count(units(training.sharded)))
    with zeroshard.unsharded(training.model):
        alias = training.model.get_parameter("blocks.1.up.weight").detach()
    training.step(1)
    found.append(kept_count(units(training.sharded)))
    del alias
    training.end()
    return found
