"""Owns the training runs of ranks on the simulated accelerator, which are called bodies, and the comparison of their bits.

In fp32, results equal the CPU's: the device uses the CPU's operators, and simccl sums in rank order as zeroshard does. In 16 bits,
communication rounds, so policies are compared with each other.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from insides import frames_between_steps, sharded_of
from models import MODELS, Frozen, Residual, Stack, Untied, muon_with_adamw, tokens
from torch import Tensor, nn
from twin import Boom

import zeroshard
from simgpu import device as simgpu
from zeroshard import (
    Offload,
    Place,
    Policy,
    Precision,
    Sharded,
    ZeroRedundancyOptimizer,
)
from zeroshard.core.storage.storages import Storages
from zeroshard.engine.recompute.checkpointer import Checkpointer, Checkpointing

CPU = torch.device("cpu")
BF16, FP16 = Precision(torch.bfloat16), Precision(torch.float16)
BUCKET_NUMEL = 256
"""Elements of a bucket, so that each unit has several buckets."""


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Training:
    """A small model under one policy, and its steps. Tokens are in CPU memory until a forward."""

    def __init__(
        self, device: torch.device, policy: Policy, precision: Precision | None = None,
        make: Callable[[], nn.Module] = Stack, optimizer: Callable[..., torch.optim.Optimizer] = adamw, *,
        overlap: bool = True, born: bool = False, microbatches: int = 2, max_norm: float | None = 0.5,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        # A real accelerator draws different random numbers than the CPU, so its model is made on the CPU. The simulated one draws
        # the same, so its model is made on it: `Module.to` keeps parameters tied only for torch's own devices.
        made_on = device if born or device.type == "simgpu" else CPU
        with zeroshard.sharded_init(enabled=born), made_on:
            self.model = make()
        if made_on != device:
            self.model.to(device)
        self.device, self.microbatches, self.max_norm, self.step_number = device, microbatches, max_norm, 0
        self.sharded: Sharded = zeroshard.shard(
            self.model, optimizer(self.model.parameters()), policy, precision=precision,
            bucket_numel=BUCKET_NUMEL, overlap=overlap,
        )  # fmt: skip
        self.losses: list[Tensor] = []
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def batch(self, number: int) -> Tensor:
        return tokens(self.rank, number)[0].to(self.device)

    def backward(self, scale: float = 1.0) -> None:
        for microbatch in range(self.microbatches):
            with self.sharded.accumulate(microbatch < self.microbatches - 1):
                loss = self.model(self.batch(self.microbatches * self.step_number + microbatch))
                (loss * scale).backward()
            self.losses.append(loss.detach())

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.backward()
            if self.max_norm is not None:
                self.sharded.clip_grad_norm_(self.max_norm)
            self.update()

    def update(self) -> None:
        """Take an optimizer step, and clear the gradients."""
        self.sharded.optimizer.step()
        self.sharded.optimizer.zero_grad()
        self.step_number += 1

    def end(self) -> tuple[Tensor, Tensor]:
        """End the sharding, and return the losses and all parameters, in CPU memory."""
        self.sharded.remove()
        flat = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().cpu()
        return torch.stack([loss.float().cpu() for loss in self.losses]), flat


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    assert all(value.isfinite().all() for value in one), "a value was read before it was there"
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


Run = Callable[[Training], None]


def three_steps(training: Training) -> None:
    training.step(3)


def trained(device: torch.device, policy: Policy, run: Run = three_steps, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the losses and parameters of a training."""
    training = Training(device, policy, **options)
    run(training)
    return training.end()


def on_both(policy: Policy, run: Run = three_steps, **options: Any) -> None:
    """Train on the CPU and on the simulated device, and expect the same bits."""
    expected, found = (trained(device, policy, run, **options) for device in (CPU, simgpu.device()))
    expect_the_cpus(found, expected, f"other bits than on the CPU: {policy}")


def on_both_offloaded(
    stage: int, optimizer: Place | None, parameters: Place | None = None, run: Run = three_steps,
    how: Mapping[str, Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Train `on_both` with these states in CPU memory or on disk. `how` has options of `Offload`."""
    with tempfile.TemporaryDirectory() as folder:
        on_both(offloaded(stage, folder, optimizer, parameters, **how or {}), run, **options)


def expect_one_result(policies: Iterable[Policy], run: Run = three_steps, **options: Any) -> None:
    """Train on the device under each policy, and expect equal results."""
    results = [trained(simgpu.device(), policy, run, **options) for policy in policies]
    assert all(same(one, results[0]) for one in results), "policies differ"


def expect_the_cpus(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], message: str) -> None:
    """Expect the CPU's bits on the simulated device, and close values on a real device, whose kernels round differently."""
    if simgpu.device().type == "simgpu":
        assert same(found, expected), message
        return
    for real, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(real, wanted, rtol=1e-2, atol=1e-2, msg=lambda why: f"{message}: {why}")


def offloaded(
    stage: int, folder: str, optimizer: Place | None = None, parameters: Place | None = None, **how: Any
) -> Policy:
    offload = Offload(path=folder, block_nbytes=4096, **how)
    return Policy.stage(stage).offloaded(optimizer=optimizer, parameters=parameters, offload=offload)


# ---------------------------------------------------------------------- bodies


def stages(rank: int) -> None:
    """Train in fp32 at every stage."""
    for stage in range(4):
        on_both(Policy.stage(stage), make=Untied)


def stages_in_16_bits(rank: int) -> None:
    """Train in bf16 at every stage, with gradients reduced once a step, and expect equal results."""
    expect_one_result(map(Policy.stage, range(4)), precision=BF16, make=Untied, microbatches=1)


def states_in_16_bits(rank: int) -> None:
    """Train with optimizer states that rest in bf16, in each place. The accelerator's frames are freed after each step."""
    precision = Precision(state_dtype=torch.bfloat16)

    def run(training: Training) -> None:
        for _ in range(3):
            training.step()
            if training.device.type != "cpu" and training.sharded.policy.optimizer.place is Place.ACCELERATOR:
                assert frames_between_steps(training.sharded) == (0, 0)

    for stage in (0, 2, 3):
        on_both(Policy.stage(stage), run, precision=precision)
    for place in (Place.CPU, Place.DISK):
        on_both_offloaded(3, place, run=run, how={"buffer_numel": 40_000}, precision=precision)

    def parked(training: Training) -> None:
        training.step(2)
        if training.device != CPU:
            training.sharded.offload_states(("optimizer",))
            training.sharded.reload_states()
        training.step()

    on_both(Policy.stage(2), parked, precision=precision)


class Wider(Stack):
    """A stack with two parameters that are large enough for states in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Residual(350))


def states_in_8_bits(rank: int) -> None:
    """Train with optimizer states that rest in 8 bits, in each place."""
    precision = Precision(state_dtype=torch.uint8)
    for stage in (0, 3):
        on_both(Policy.stage(stage), make=Wider, precision=precision)
    for place in (Place.CPU, Place.DISK):
        on_both_offloaded(2, place, how={"buffer_numel": 40_000}, make=Wider, precision=precision)


def without_overlap(rank: int) -> None:
    """Train without overlap, without clipping, with units kept from forward to backward, and without prefetching."""
    on_both(Policy.stage(3), overlap=False, max_norm=None)
    on_both(Policy.stage(3, reshard_after_forward=False), max_norm=None)
    on_both(replace(Policy.stage(3), prefetch_numel=0))


def cpu_memory(rank: int) -> None:
    """Train with states at rest in CPU memory."""
    for stage, optimizer, parameters in (
        (1, Place.CPU, None), (2, Place.CPU, None), (2, None, Place.CPU), (3, Place.CPU, None), (3, None, Place.CPU),
        (3, Place.CPU, Place.CPU),
    ):  # fmt: skip
        on_both_offloaded(stage, optimizer, parameters)


def cpu_memory_in_16_bits(rank: int) -> None:
    """Train in bf16, where uploads are cast, and expect the same bits with CPU memory as with the disk."""
    for stage, parameters in ((1, None), (2, None), (3, None), (3, Place.CPU)):
        with tempfile.TemporaryDirectory() as folder:
            policies = [offloaded(stage, folder, place, parameters) for place in (Place.CPU, Place.DISK)]
            expect_one_result(policies, precision=BF16)


def disk(rank: int) -> None:
    """Train with states at rest on disk."""
    for stage, optimizer, parameters in (
        (1, Place.DISK, None), (2, Place.DISK, None), (3, Place.DISK, Place.DISK), (3, None, Place.DISK),
    ):  # fmt: skip
        on_both_offloaded(stage, optimizer, parameters, how={"buffer_numel": 40_000})


def sub_groups(rank: int) -> None:
    """Train with many small sub-groups, with and without read-ahead and write-behind, and with a part on the accelerator."""
    for place in (Place.CPU, Place.DISK):
        for ahead in (True, False):
            how = {"buffer_numel": 6_000, "sub_group_numel": 100, "read_ahead": ahead, "write_behind": ahead}
            on_both_offloaded(3, place, Place.DISK if place is Place.DISK else None, how=how)
    on_both_offloaded(2, Place.CPU, how={"ratio": 0.5})


def parking(rank: int) -> None:
    """Park and reload all or some states between steps."""
    for stage in range(4):
        results = []
        for states in ((), ("parameters", "gradients", "optimizer"), ("optimizer",)):
            training = Training(simgpu.device(), Policy.stage(stage), BF16)
            training.step(2)
            if states:
                training.sharded.offload_states(states)
                torch.full((1 << 16,), torch.nan, device=simgpu.device())  # overwrite the freed memory
                training.sharded.reload_states()
            training.step(2)
            results.append(training.end())
        assert all(same(one, results[0]) for one in results), f"stage {stage}"


def sharded_init(rank: int) -> None:
    """Train models that are born sharded on the device."""
    for stage in (2, 3):
        whole, born = (
            trained(simgpu.device(), Policy.stage(stage), born=born, make=_Constant) for born in (False, True)
        )
        expect_the_cpus(born, whole, f"stage {stage}, born sharded")


class _Constant(Stack):
    """A stack that is initialised without random numbers, so that its values are the same on every device."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                if parameter.numel():
                    ramp = torch.arange(parameter.numel(), dtype=torch.float32, device=parameter.device)
                    parameter.copy_((ramp * (0.7 + number)).sin().view(parameter.shape) * 0.3)


@contextmanager
def folder_of_all() -> Iterator[str]:
    """Make a temporary folder for all ranks."""
    names: list[Any] = [tempfile.mkdtemp(prefix="simgpu-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, device=simgpu.device())
    yield str(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def _values(training: Training) -> Tensor:
    """Return the parameters' current values."""
    return torch.nn.utils.parameters_to_vector(training.model.parameters()).detach().cpu()


def checkpoints(rank: int, asynchronous: bool = False) -> None:
    """Save, load into a second model, and continue both. A save behind the training must hold the values of its start."""
    for stage, optimizer in ((1, None), (2, Place.CPU), (3, None)):
        policy = Policy.stage(stage).offloaded(optimizer=optimizer)
        one, other = (Training(simgpu.device(), policy, BF16) for _ in range(2))
        with folder_of_all() as folder:
            one.step(2)
            saved = torch.zeros(0) if stage == 3 else _values(one)
            one.sharded.save(folder, "x", asynchronous=asynchronous)
            if stage == 3:
                one.sharded.checkpoints.wait()  # no later step makes the copies arrive
            one.step(2)
            one.sharded.checkpoints.wait()
            other.sharded.load(folder, "x")
            assert stage == 3 or torch.equal(_values(other), saved), "the parameters are not those that were loaded"
        other.step_number, other.losses = 2, one.losses[:4]
        other.step(2)
        assert same(other.end(), one.end()), f"stage {stage}"


def asynchronous_checkpoints(rank: int) -> None:
    """Save and load with asynchronous saves."""
    checkpoints(rank, asynchronous=True)


class Checkpointed(Stack):
    """A stack that keeps only the inputs of its blocks, in CPU memory."""

    options = Checkpointing(cpu_checkpointing=True)

    def __init__(self) -> None:
        super().__init__()
        self.checkpointer = Checkpointer(self.options)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.checkpointer.checkpoint(block, x)
        return x


def activation_checkpointing(rank: int) -> None:
    """Train with checkpointed inputs in CPU memory."""
    for stage in (2, 3):
        on_both(Policy.stage(stage), make=Checkpointed)


def overflow(rank: int) -> None:
    """Train in fp16 while one rank's gradients overflow, so that every rank skips the step."""
    results = []
    for stage in range(4):
        training = Training(simgpu.device(), Policy.stage(stage), FP16, microbatches=1)
        norms = []
        for number, scale in enumerate((128.0, 128.0, 2.0**40 if rank == 0 else 128.0, 128.0)):
            training.backward(scale)
            norms.append(float(training.sharded.clip_grad_norm_(0.5, scale if number != 2 else 128.0)))
            if number == 2:
                assert norms[-1] not in (0.0,) and not torch.tensor(norms[-1]).isfinite()
                assert training.sharded.sharded_step.not_finite()
            else:
                training.sharded.optimizer.step()
            training.sharded.optimizer.zero_grad()
            training.step_number += 1
        total = training.sharded.sum_over_ranks(torch.full((2,), rank + 1.0, device=simgpu.device()))
        assert total.device == simgpu.device() and total.tolist() == [3.0, 3.0]
        results.append((*training.end(), torch.tensor(norms[:2] + norms[3:])))
    assert all(same(one, results[0]) for one in results)
    # Gradients on their way to the CPU's memory, asked before anything else waits for them.
    training = Training(simgpu.device(), Policy.stage(3).offloaded(optimizer=Place.CPU), FP16, microbatches=1)
    for number, scale in enumerate((128.0, 2.0**40 if rank == 0 else 128.0)):
        training.backward(scale)
        assert bool(training.sharded.sharded_step.not_finite()) == (number == 1)
        training.sharded.optimizer.zero_grad()


def adafactor(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Return Adafactor without empty parameters, on which torch's class divides by zero."""
    return torch.optim.Adafactor([p for p in parameters if p.numel()], lr=1e-2)


def whole_parameters(rank: int) -> None:
    """Train with optimizers that need whole parameters."""
    for stage in range(4):
        on_both(Policy.stage(stage), optimizer=muon_with_adamw)
        on_both(Policy.stage(stage), optimizer=adafactor)


def freezing(rank: int) -> None:
    """Freeze and unfreeze parameters between steps."""

    def run(training: Training) -> None:
        training.step(2)
        block: Any = training.model.get_submodule("blocks")
        for frozen, trains in ((block[0], False), (block[2], False), (block[0], True)):
            frozen.requires_grad_(trains)
            training.sharded.update_trainable()
            training.step(2)

    for stage in range(4):
        on_both(Policy.stage(stage), run, make=Stack)
    on_both(Policy.stage(3), make=Frozen)


def side_stream(rank: int) -> None:
    """Run forward and backward on the user's own stream, with the waits that torch demands."""

    def run(training: Training) -> None:
        side = None if training.device == CPU else torch.Stream(training.device)
        for _ in range(3):
            if side is None:
                training.backward()
            else:
                side.wait_stream(torch.accelerator.current_stream())
                with side:
                    training.backward()
                torch.accelerator.current_stream().wait_stream(side)
            training.sharded.clip_grad_norm_(0.5)
            training.update()

    for stage in range(4):
        on_both(Policy.stage(stage), run, make=Untied)
    on_both(Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU), run)


class _Breaking(Untied):
    """A stack whose forward or backward raises in the middle if `where` names it."""

    where = ""

    def run(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.where == "forward":
                raise Boom
            if number == 1 and self.where == "backward":
                x.register_hook(_boom)
        return x


def _boom(_gradient: Tensor) -> Tensor:
    raise Boom


def error_roads(rank: int) -> None:
    """Abort a forward or a backward, and expect that nothing arrives later."""

    def run(training: Training) -> None:
        model: Any = training.model
        for where in ("forward", "backward"):
            training.step(1)
            model.where = where
            try:
                model(training.batch(100)).backward()
            except Boom:
                pass
            else:
                raise AssertionError("it was to break off")
            model.where = ""
            training.sharded.optimizer.zero_grad()
            torch.full((1 << 14,), torch.nan, device=training.device)
            training.step(1)

    for stage in range(4):
        on_both(Policy.stage(stage), run, make=_Breaking)


def zero_redundancy(rank: int) -> None:
    """Train with zeroshard's ZeroRedundancyOptimizer, with gradients averaged by hand."""
    for options in ({}, {"parameters_as_bucket_view": True}):
        for make in (torch.optim.AdamW, torch.optim.Adafactor):
            results = []
            for device in (CPU, simgpu.device()):
                torch.manual_seed(0)
                model = Untied().to(device)
                named = [p for p in model.parameters() if p.numel()]
                optimizer = ZeroRedundancyOptimizer(named, make, lr=1e-2, **options)
                for step in range(3):
                    model(tokens(rank, step)[0].to(device)).backward()
                    for parameter in named:
                        dist.all_reduce(parameter.grad) if device != CPU else _reduce_on_cpu(parameter.grad)
                        parameter.grad /= dist.get_world_size()
                    optimizer.step()
                    optimizer.zero_grad()
                optimizer.consolidate_state_dict()
                states = optimizer.state_dict()["state"] if rank == 0 else {}
                kept = [value for number in states for value in states[number].values() if isinstance(value, Tensor)]
                values = torch.nn.utils.parameters_to_vector(named).detach().cpu()
                results.append((values, *(value.detach().cpu() for value in kept)))
            expect_the_cpus(results[1], results[0], f"{make.__name__} {options}")


def _reduce_on_cpu(gradient: Tensor | None) -> None:
    """Sum a CPU gradient on the device, since this process group has no other collectives."""
    assert gradient is not None
    there = gradient.to(simgpu.device())
    dist.all_reduce(there)
    gradient.copy_(there)


def reads_and_writes(rank: int) -> None:
    """Read current values between steps, and write values that take effect."""

    def run(training: Training) -> None:
        for _ in range(2):
            training.step(1)
            with zeroshard.unsharded(training.model, modifier_rank=0), torch.no_grad():
                if rank == 0:
                    training.model.get_parameter("blocks.1.up.weight").mul_(0.5)
            state = training.model.state_dict()
            training.losses.append(torch.stack([value.sum().float() for value in state.values()]).sum().detach())

    for stage in range(4):
        on_both(Policy.stage(stage), run)
    on_both_offloaded(2, Place.CPU, Place.CPU, run)


def written_by_all(rank: int) -> None:
    """Write different values on every rank between steps. From the next step on, the owner's value of each element counts."""

    def run(training: Training) -> None:
        for _ in range(2):
            training.step(1)
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.mul_(1 + 0.1 * rank)
        training.step(1)

    for stage in (0, 1, 2):
        on_both(Policy.stage(stage), run, microbatches=1, max_norm=None)
    expect_one_result(map(Policy.stage, range(3)), run, precision=BF16, microbatches=1)  # in master weights, too


def second_gradients(rank: int) -> None:
    """Train a block that runs twice under reentrant checkpointing, whose gradients come in two parts, the second late."""
    for stage in range(4):
        on_both(Policy.stage(stage), make=MODELS["checkpointed twice reentrant"])


def slots(rank: int) -> None:
    """Check storages: a read sees the write before it on any device, and released ranges are not written to."""
    accelerator = simgpu.device()
    with tempfile.TemporaryDirectory() as folder:
        policy = offloaded(3, folder, Place.DISK, Place.DISK, buffer_numel=40_000)
        storages = Storages(policy, accelerator)
        disk_storage = storages.optimizer(policy)
        for storage in (storages.accelerator, storages.host, disk_storage):
            slot = storage.slot("a slot", 3000, torch.float32)
            for number in (1.0, 2.0, 3.0, 4.0):
                there = torch.full((3000,), number, device=accelerator)
                slot.write(there)
                slot.write(
                    torch.full((3000,), number + 10, device=accelerator)
                    if number % 2
                    else torch.full((3000,), number + 10)
                )
                del there
                for device in (CPU, accelerator):
                    out = torch.zeros(3000, device=device)
                    slot.read(out).wait(device)
                    assert bool((out == number + 10).all()), f"{type(storage).__name__}, {device}, {number}"
                early = torch.zeros(3000, device=accelerator)
                reading = slot.read(early)
                slot.write(torch.full((3000,), -1.0))
                reading.wait(accelerator)
                assert bool((early == number + 10).all()), f"{type(storage).__name__}: a later write overtook a read"
            wide = storage.slot("read into 16 bits", 3000, torch.float32)
            for number in (1.0, 2.0):
                wide.write(torch.full((3000,), number, device=accelerator))
                early = torch.zeros(3000, dtype=torch.bfloat16, device=accelerator)
                wide.read(early).wait(accelerator)
                assert bool((early == number).all()), f"{type(storage).__name__}: a read, cast, overtook a write"
            narrow = storage.slot("in 16 bits", 3000, torch.bfloat16)  # writes cast the values in transit
            narrow.write(torch.full((3000,), 1.0, device=accelerator))
            early = torch.zeros(3000, dtype=torch.bfloat16, pin_memory=True)
            reading = narrow.read(early)
            narrow.write(torch.full((3000,), 2.0))
            torch.accelerator.current_stream().synchronize()
            reading.wait(CPU)
            assert bool((early == 1).all()), f"{type(storage).__name__}: a later write, cast, overtook a read"
        gone = disk_storage.slot("gone", 3000, torch.float32)
        gone.write(torch.full((3000,), 1.0, device=accelerator))
        del gone
        new = disk_storage.slot("in its place", 3000, torch.float32)
        new.write(torch.full((3000,), 2.0))
        new.wait()
        torch.accelerator.synchronize()
        time.sleep(0.1)  # writes that are still pending end now
        out = torch.zeros(3000)
        new.read(out).wait(CPU)
        assert bool((out == 2).all())
        storages.close()


def engine(rank: int) -> None:
    """Train engines of configs with clipping at every stage, and expect equal results."""
    results = []
    for stage in range(4):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }  # fmt: skip
        model = Untied()
        made, *_ = zeroshard.initialize(model=model, config=config)
        losses = []
        for step in range(3):
            loss = made(tokens(rank, step)[0].to(simgpu.device()))
            made.backward(loss)
            made.step()
            losses.append(loss.detach())
        sharded_of(made).remove()
        flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
        results.append((torch.stack(losses).float().cpu(), flat))
    assert all(same(one, results[0]) for one in results)


def compiled(rank: int) -> None:
    """Train compiled blocks, with inductor on a real device. It has no kernels for the simulated one, so graphs are only traced."""
    backend = "aot_eager" if simgpu.device().type == "simgpu" else "inductor"

    def make() -> nn.Module:
        model = Untied()
        for block in model.blocks:
            block.compile(backend=backend)
        return model

    for stage in (2, 3):
        on_both(Policy.stage(stage), make=make)


BODIES: dict[str, Callable[..., None]] = {
    body.__name__: body
    for body in (
        stages, stages_in_16_bits, states_in_16_bits, states_in_8_bits,
        without_overlap, cpu_memory, cpu_memory_in_16_bits, disk, sub_groups, parking, sharded_init,
        checkpoints, asynchronous_checkpoints, activation_checkpointing, overflow, whole_parameters, freezing, error_roads,
        zero_redundancy, reads_and_writes, written_by_all, second_gradients, slots, side_stream, engine, compiled,
    )
}  # fmt: skip
