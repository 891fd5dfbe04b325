"""The host around its device: threads, groups that would hang, waits for nothing, and memory if the host is far ahead."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import WRITE_BEHIND, units
from models import Stack
from simgpu import device as simgpu
from simgpu import server, simccl
from simgpu.bodies import BF16, Training, folder_of_all
from simgpu.server import simulated
from torch import Tensor, nn
from twin import refusal, whole

import zeroshard
from zeroshard import Place, Policy, Precision
from zeroshard.core.replicas import digest_of, digests_as_bytes
from zeroshard.engine.recompute.checkpointer import Checkpointer, Checkpointing
from zeroshard.model.memory import kept_count

pytestmark = pytest.mark.full

BLOCKS, WIDTH = 24, 256
HOUR_MS = 3_600_000


class Blocks(nn.Module):
    """Equal blocks, each of which is a unit, and much larger than its activations."""

    def __init__(self, blocks: int = BLOCKS, layers: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))) for _ in range(blocks)
        )
        self.checkpoint: Callable[..., Any] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return x


def sharded_blocks(policy: Policy, *, blocks: int = BLOCKS, layers: int = 1, **options: Any) -> tuple[Blocks, Any]:
    torch.manual_seed(0)
    model = Blocks(blocks, layers).to(simgpu.device())
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, zeroshard.shard(model, adamw, policy, **options)


# ---------------------------------------------------------------------- threads and groups


@pytest.mark.parametrize("splits", [True, False])
@simulated(ranks=3)
def test_a_group_of_some_ranks_beside_a_bound_world_is_refused(rank: int, splits: bool) -> None:
    """torch would split the communicator of all ranks for it, which waits for the third."""
    group = dist.new_group([0, 1])
    world: Any = dist.group.WORLD
    world.bound_device_id = simgpu.device()
    backend: Any = simccl.SimCCL
    backend.supports_splitting = splits
    if rank == 2:
        return
    model = Stack().to(simgpu.device())
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    if splits:
        said = refusal(lambda: zeroshard.shard(model, adamw, 2, group=group))
        assert "group= has 2 of 3 ranks" in said and "device_id" in said, said
    else:
        zeroshard.shard(model, adamw, 2, group=group)


@simulated()
def test_threads_take_the_device_of_their_rank(rank: int) -> None:
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
    assert found >= {"zeroshard watch", "zeroshard disk", "zeroshard checkpoint"}, found


# ---------------------------------------------------------------------- what the host waits for


@pytest.mark.parametrize("stage", [2, 3])
@simulated(mode="all late")
def test_an_asynchronous_save_waits_for_no_copy(rank: int, stage: int) -> None:
    """The right values are saved: see the body `asynchronous_checkpoints`."""
    training = Training(simgpu.device(), Policy.stage(stage), BF16)
    checkpoints: Any = training.sharded.checkpoints
    write_behind = getattr(checkpoints, WRITE_BEHIND)
    may_write = threading.Event()

    def write(*arguments: Any) -> None:
        may_write.wait()  # so that the waits of the writing thread are not counted
        write_behind(*arguments)

    setattr(checkpoints, WRITE_BEHIND, write)
    with folder_of_all() as folder:
        for tag in ("one", "two"):
            training.step()
            checkpoints.wait()
            may_write.clear()
            training.step()
            simgpu.reset_counts()
            training.sharded.save(folder, tag, asynchronous=True)
            counts = simgpu.counts()
            assert not counts.synchronisations and not counts.pageable_copies, counts
            may_write.set()
        checkpoints.wait()
    training.end()


@simulated()
def test_the_host_waits_once_for_the_digests_of_all_gradients(rank: int) -> None:
    flats = [torch.full((10,), float(number), device=simgpu.device()) for number in range(4)]
    simgpu.reset_counts()
    digests = digests_as_bytes([digest_of(flat) for flat in flats])
    assert simgpu.counts().synchronisations.total() == 1
    assert digests == digests_as_bytes([digest_of(flat.cpu()) for flat in flats])


@simulated(mode="all late")
def test_norms_are_summed_where_the_gradients_lie(rank: int) -> None:
    """With the optimizer in CPU memory, unsharded gradients lie on the device: stage 2's bits, and no wait for a copy.

    Shards are larger than the CPU's unit of summation, so that its sums of squares have different bits than the device's.
    """
    found = []
    for stage in (1, 2):
        model, sharded = sharded_blocks(Policy.stage(stage).offloaded(optimizer=Place.CPU), blocks=2)
        norms: list[Any] = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(16, WIDTH, generator=generator).to(simgpu.device())).square().mean().backward()
            simgpu.reset_counts()
            norms.append(sharded.clip_grad_norm_(None))
            assert not simgpu.counts().synchronisations
            norms += [sharded.clip_grad_norm_(1e-3), sharded.clip_grad_norm_(None)]
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        found.append(([float(norm) for norm in norms], whole(model)))
        sharded.remove()
    (norms, parameters), (of_stage_2, expected) = found
    assert norms == of_stage_2
    assert all(torch.equal(value, expected[fqn]) for fqn, value in parameters.items())


def stalls_in_backward(rank: int, stage: int, bits: int, declared: bool = True, room: bool = True) -> dict[str, Any]:
    """Return how often the computing stream waits for a copy in each microbatch's backward, in the second step.

    Args:
        declared: whether the last microbatch of a step is declared.
        room: whether the device has free memory.
    """
    simgpu.native().set_patience(HOUR_MS)  # the host stays ahead of the device even on a busy machine
    if not room:
        accelerator: Any = importlib.import_module("zeroshard.core.storage.base")
        accelerator.FREE_SHARE = 2.0  # only in this rank's process
    dtype = torch.bfloat16 if bits == 16 else torch.float32
    # Each parameter is a separate bucket, as large parameters are.
    model, sharded = sharded_blocks(
        Policy.stage(stage).offloaded(optimizer=Place.CPU), blocks=6, layers=6, precision=Precision(dtype),
        bucket_numel=WIDTH * WIDTH,
    )  # fmt: skip
    found: list[int] = []
    norms = []
    for _ in range(2):
        found.clear()
        for microbatch in range(3):
            with sharded.accumulate(declared and microbatch < 2):
                data = torch.full((4, WIDTH), 1.0 + microbatch, device=simgpu.device())
                loss = model(data.to(dtype)).float().square().mean()
                simgpu.reset_counts()
                loss.backward()
                stalls = simgpu.native().stalls()
            # Without other ranks, only copies run on other streams.
            found.append(sum(count for (waits, other), count in stalls.items() if waits == 0 and other != 0))
        norms.append(float(sharded.clip_grad_norm_(1.0)))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    return {"stalls": found, "norms": norms, "parameters": {fqn: value.cpu() for fqn, value in whole(model).items()}}


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_waits_for_no_copy_of_gradients(stage: int, bits: int) -> None:
    """In the first microbatch and in later ones, whether the last is declared or not; and the bits do not depend on room."""
    first, undeclared, full = (
        server.call(stalls_in_backward, ranks=1, mode="all late", stage=stage, bits=bits, **options)[0]
        for options in ({}, {"declared": False}, {"room": False})
    )
    assert first["stalls"] == undeclared["stalls"] == [0, 0, 0]
    assert sum(full["stalls"]) > 0, "the counter sees no wait"
    for other in (undeclared, full):
        assert other["norms"] == first["norms"]
        assert all(torch.equal(value, first["parameters"][fqn]) for fqn, value in other["parameters"].items())


# ---------------------------------------------------------------------- memory


def reserved(rank: int, kind: str, lockstep: bool) -> tuple[float, float]:
    """Return the memory that a forward, and a forward with its backward, reserve, as a multiple of what rests in CPU memory.

    That is a unit's parameters, or the input of a checkpointed block. In lockstep, the host waits for the device before and after
    each block.
    """
    simgpu.native().set_patience(HOUR_MS)
    rows, size = (1, WIDTH * WIDTH * 4) if kind == "parameters" else (1024, 1024 * WIDTH * 4)
    if kind == "parameters":
        model, _ = sharded_blocks(Policy.stage(3).offloaded(parameters=Place.CPU))
    else:
        model = Blocks().to(simgpu.device())
        model.checkpoint = Checkpointer(Checkpointing(cpu_checkpointing=True)).checkpoint
    for block in model.blocks if lockstep else ():
        block.register_forward_pre_hook(lambda *_: torch.accelerator.synchronize())
        block.register_forward_hook(lambda *_: torch.accelerator.synchronize())
        block.register_full_backward_hook(lambda *_: torch.accelerator.synchronize())
    size = rows * WIDTH * 4
    data = torch.ones(
        1 if kind == "parameters" else rows, WIDTH, device=simgpu.device(), requires_grad=kind == "inputs"
    )
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_reserved()
    loss = model(data).sum()
    forward = torch.accelerator.memory_reserved()
    loss.backward()
    return (forward - before) / size, (torch.accelerator.memory_reserved() - before) / size


@pytest.mark.parametrize(("kind", "more"), [("parameters", 1.5), ("inputs", 2.0)])
def test_a_host_that_is_far_ahead_reserves_little_more(kind: str, more: float) -> None:
    """A unit takes the memory that the one before gave back, and of 24 inputs two may still be on their way to CPU memory.

    The allocator cannot see that a late copy is over; streams can be ordered.
    """
    in_step, ahead = (
        server.call(reserved, ranks=1, mode="all late", kind=kind, lockstep=lockstep)[0] for lockstep in (True, False)
    )
    assert ahead[0] <= in_step[0] + more and ahead[1] <= in_step[1] + more
    assert kind == "parameters" or max(in_step) < BLOCKS / 2


@pytest.mark.parametrize("stage", [2, 3])
@simulated()
def test_memory_that_a_user_keeps_is_counted(rank: int, stage: int) -> None:
    training = Training(simgpu.device(), Policy.stage(stage), BF16)
    training.step(2)
    assert kept_count(units(training.sharded)) == 0
    with zeroshard.unsharded(training.model):
        alias = training.model.get_parameter("blocks.1.up.weight").detach()
    training.step(1)
    assert (kept_count(units(training.sharded)) > 0) == (stage == 3)
    del alias
    training.end()


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@simulated(mode="all late")
def test_a_state_dict_has_a_storage_for_each_tensor(rank: int, stage: int, offloaded: bool) -> None:
    policy = Policy.stage(stage)
    training = Training(simgpu.device(), policy.offloaded(parameters=Place.CPU) if offloaded else policy, BF16)
    training.step(2)
    state = training.model.state_dict()
    of = training.sharded.states.get
    for fqn, value in state.items():
        assert value.untyped_storage().nbytes() == value.nbytes, fqn
        assert torch.equal(value.cpu(), of(fqn).to(value.dtype).cpu()), fqn
    training.step(1)  # frees or overwrites the memory of the parameters
    training.end()


@pytest.mark.parametrize("stage", [1, 2])
@simulated()
def test_memory_whose_copies_are_over_early_is_freed(rank: int, stage: int) -> None:
    """A copy that ends before somebody waits for it holds its memory no longer."""
    training = Training(simgpu.device(), Policy.stage(stage).offloaded(parameters=Place.CPU))
    training.step(4)
    assert kept_count(units(training.sharded)) == 0
    training.end()
