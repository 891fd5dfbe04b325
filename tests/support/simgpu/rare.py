"""Owns bodies for waits that plain training does not need: reads right after writes, aborted passes, and late disks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from insides import around_requests
from models import Frozen, Untied
from torch import Tensor, nn

import zeroshard
from simgpu import device as simgpu
from simgpu.bodies import (
    BF16,
    BODIES,
    CPU,
    Training,
    expect_the_cpus,
    folder_of_all,
    offloaded,
    on_both,
    on_both_offloaded,
    same,
    trained,
)
from zeroshard import Offload, Place, Policy, StorageError

LATE_SECONDS = 0.005
NARROW, WIDE = "blocks.1.up.bias", "blocks.1.up.weight"
"""The names of a parameter in one bucket, and of one in several."""


@contextmanager
def late_disk(
    *, reads: bool = False, writes: bool = False, every: int = 2, seconds: float = LATE_SECONDS
) -> Iterator[None]:
    """Delay every second request of a file (`every=2`), so that the first request may end last."""

    def late() -> Callable[..., None]:
        count = iter(range(1 << 30))

        def run(work: Callable[..., None], *arguments: Any) -> None:
            if next(count) % every == 0:
                time.sleep(seconds)
            work(*arguments)

        return run

    with around_requests(read=late() if reads else None, write=late() if writes else None):
        yield


# ---------------------------------------------------------------------- bodies


def unclipped(rank: int) -> None:
    """Train without clipping, with the optimizer on the CPU, so that nothing reads gradients before the step."""
    for stage in (1, 2, 3):
        on_both(Policy.stage(stage).offloaded(optimizer=Place.CPU), max_norm=None)
    here, on_cpu = (
        trained(
            simgpu.device(), Policy.stage(2).offloaded(optimizer=place), precision=BF16, microbatches=1, max_norm=None
        )
        for place in (None, Place.CPU)
    )
    expect_the_cpus(on_cpu, here, "the CPU's step")


def several_backwards(rank: int) -> None:
    """Reduce every backward of a step, so that the first mean is still in transit when the next gradient is added."""

    def run(training: Training) -> None:
        for _ in range(2):
            for number in range(3):
                loss = training.model(training.batch(3 * training.step_number + number))
                loss.backward()
                training.losses.append(loss.detach())
            training.update()

    for stage in range(4):
        on_both(Policy.stage(stage), run)


def sums_elsewhere(rank: int) -> None:
    """Keep gradients in CPU memory, without a declared last backward, or with a norm before the last."""

    def run(training: Training, declared: bool) -> None:
        for _ in range(2):
            for number in range(4):
                with training.sharded.accumulate(declared and number < 3):
                    loss = training.model(training.batch(4 * training.step_number + number))
                    loss.backward()
                training.losses.append(loss.detach())
                if declared and number == 1:
                    training.losses.append(torch.as_tensor(training.sharded.clip_grad_norm_(None)).float().cpu())
            training.update()

    for stage, declared in ((2, False), (3, True)):
        on_both_offloaded(stage, Place.CPU, run=partial(run, declared=declared), make=Untied)


def nested(rank: int) -> None:
    """Nest `unsharded`: refused writes are lost at the end of the outermost block, and earlier writes remain."""

    def run(training: Training) -> None:
        training.step(1)
        parameter = training.model.get_parameter(WIDE)
        with suppress(zeroshard.UsageError), zeroshard.unsharded(training.model):
            _refused(training.model, lambda: parameter.detach().mul_(2))
            training.losses.append(parameter.detach().sum())
        with suppress(zeroshard.UsageError), zeroshard.unsharded(training.model), torch.no_grad():
            with zeroshard.unsharded(training.model, modifier_rank=0):
                parameter.fill_(0.5)
            parameter.fill_(0.25)
        with zeroshard.unsharded(training.model):
            training.losses.append(parameter.detach().sum())
        training.step(1)

    for place in (None, Place.CPU):
        on_both(Policy.stage(3).offloaded(parameters=place), run)


def _refused(model: nn.Module, write: Callable[[], object]) -> None:
    try:
        with zeroshard.unsharded(model), torch.no_grad():
            write()
    except zeroshard.UsageError:
        return
    raise AssertionError("a write that no rank may make was taken")


def states_at_once(rank: int) -> None:
    """Read master weights in every place right after a write to the parameters, and expect the new values."""
    for place in (None, Place.CPU, Place.DISK):
        with tempfile.TemporaryDirectory() as folder, late_disk(reads=True):
            training = Training(simgpu.device(), offloaded(2, folder, place), BF16)
            training.step(1)
            for name in (NARROW, WIDE):
                parameter = training.model.get_parameter(name)
                for value in (0.5, 0.25):
                    with zeroshard.unsharded(training.model, modifier_rank=0), torch.no_grad():
                        parameter.fill_(value)
                    found = training.sharded.states.get(name)
                    assert found is not None
                    assert bool((found == value).all()), f"{name} in {place}: other master weights than were written"
            training.end()


def masters_set(rank: int) -> None:
    """Set master weights, and expect them as the parameters of the next forward."""

    def run(training: Training) -> None:
        training.step(1)
        for name in (NARROW, WIDE):
            value = training.sharded.states.get(name)
            assert value is not None
            training.sharded.states.set(name, "parameters", value * 0.5 + 1)
        training.step(1)

    for stage in (2, 3):
        results = [
            trained(
                simgpu.device(), Policy.stage(stage).offloaded(optimizer=optimizer, parameters=parameters), run,
                precision=BF16,
            )
            for optimizer, parameters in ((None, None), (None, Place.CPU), (Place.CPU, Place.CPU), (Place.CPU, None))
        ]  # fmt: skip
        for one in results:  # the CPU takes some steps
            expect_the_cpus(one, results[0], f"stage {stage}")


def frozen_states(rank: int) -> None:
    """Set frozen parameters while a forward still reads their old values, and expect an error for a failed write."""

    def run(training: Training) -> None:
        training.step(1)
        states = training.sharded.states
        for factor in (0.5, 2.0):
            value = states.get(WIDE)
            assert value is not None
            with torch.no_grad():
                training.losses.append(training.model(training.batch(100)))
            states.set(WIDE, "parameters", value * factor)
        with zeroshard.unsharded(training.model, modifier_rank=0):
            training.model.get_parameter(WIDE).data.mul_(3.0)
        written = states.get(WIDE)  # while the write to its place is still in flight
        assert written is not None
        training.losses.append(written.sum())
        training.step(1)

    for place in (Place.CPU, Place.DISK):
        with late_disk(reads=True):
            on_both_offloaded(3, None, place, run, make=Frozen)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(simgpu.device(), offloaded(3, folder, None, Place.DISK), make=Frozen)
        value = training.sharded.states.get(WIDE)
        assert value is not None
        with _no_room():
            try:
                training.sharded.states.set(WIDE, "parameters", value)
            except StorageError:
                return
    raise AssertionError("a write that failed was not reported")


def hosts(rank: int) -> None:
    """Train with one rank per host, where updated rows spread to the places of whole parameters."""

    def run(training: Training) -> None:
        training.step(2)
        value = training.sharded.states.get(WIDE)
        assert value is not None
        training.sharded.states.set(WIDE, "parameters", value * 0.5)
        with zeroshard.unsharded(training.model):
            training.losses.append(training.model.get_parameter(WIDE).detach().sum())
        training.step(1)

    for place in (None, Place.CPU):
        on_both(Policy.stage(3, within=1).offloaded(parameters=place), run)


def hosts_of_two(rank: int) -> None:
    """Train on two hosts of two ranks: rows are gathered inside after they crossed, and summed inside before they cross."""
    for stage in (2, 3):
        on_both(Policy.stage(stage, within=2), lambda training: training.step(2))


def late_files(rank: int) -> None:
    """Delay requests of files in start-up, steps and reads of states, and expect the same bits."""

    def run(training: Training) -> None:
        training.step(2)
        for name in (NARROW, WIDE):  # while the states of the next step are being read
            value = training.sharded.states.get(name, "exp_avg")
            assert value is not None
            training.sharded.states.set(name, "exp_avg", value * 0.5)
        training.step(1)

    for precision in (None, BF16):
        results = []
        for device, late in ((CPU, {}), (CPU, {"writes": True}), (simgpu.device(), {"reads": True})):
            with tempfile.TemporaryDirectory() as folder, late_disk(**late):
                policy = offloaded(3, folder, Place.DISK, Place.DISK, buffer_numel=6_000, sub_group_numel=400)
                results.append(trained(device, policy, run, precision=precision))
        assert same(results[1], results[0]), f"late writes change bits: {precision}"
        if precision is None:  # in 16 bits the wire rounds
            expect_the_cpus(results[2], results[0], "late reads change bits")


def parking_on_late_files(rank: int) -> None:
    """Park states on a late disk: writes must end before memory is freed, and reads before it is used."""

    def run(training: Training) -> None:
        training.step(1)
        training.sharded.offload_states(place=Place.DISK, offload=Offload(path=folder, block_nbytes=4096))
        torch.full((1 << 14,), torch.nan, device=training.device)  # overwrite the freed memory
        training.sharded.reload_states()
        training.step(1)

    with tempfile.TemporaryDirectory() as folder, late_disk(reads=True, writes=True):
        for stage in (1, 3):
            on_both(Policy.stage(stage), run)


def forgotten_reads(rank: int) -> None:
    """Read ahead for a step that does not come, and expect that the late data overwrite nothing."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(simgpu.device(), offloaded(2, folder, Place.DISK, sub_group_numel=400, requests=64), BF16)
        training.backward()
        training.sharded.optimizer.step()
        with late_disk(reads=True, every=1, seconds=0.4):
            training.sharded.optimizer.zero_grad()  # starts to read ahead
        found = []
        for _ in range(2):
            value = training.sharded.states.get(NARROW, "exp_avg")
            assert value is not None
            found.append(value.cpu())
            time.sleep(0.8)
        assert torch.equal(*found), "what was read ahead came later"
        training.end()


def hidden_writes(rank: int) -> None:
    """Write through `.data` before a forward and between clipping and the step, and expect the effect of a plain write."""

    def write(training: Training, factor: float, *, hidden: bool) -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                (parameter.data if hidden else parameter).mul_(factor)

    in_cpu_memory = Policy.stage(2).offloaded(optimizer=Place.CPU)
    for policy in (Policy.stage(0), Policy.stage(1), Policy.stage(2), in_cpu_memory):
        results = []
        for hidden in (False, True):
            training = Training(simgpu.device(), policy, BF16, microbatches=1)
            for _ in range(2):
                write(training, 1.125, hidden=hidden)
                training.backward()
                training.sharded.clip_grad_norm_(0.5)
                write(training, 0.875, hidden=hidden)
                training.update()
            write(training, 1.125, hidden=hidden)
            value = training.sharded.states.get(WIDE)
            assert value is not None
            results.append((*training.end(), value.cpu()))
        assert same(results[1], results[0]), f"{policy}: other bits where nothing told of the write"


class _Skipping(Untied):
    """A stack whose every second forward skips a block with prefetched parameters."""

    forwards = 0

    def run(self, x: Tensor) -> Tensor:
        self.forwards += 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.forwards % 2:
                x = block(x)
        return x


def started_for_nothing(rank: int) -> None:
    """Leave gradients and prefetched parameters unused, and expect that they arrive without effect."""

    def run(training: Training) -> None:
        for _ in range(2):
            training.step(1)
            training.backward()
            training.sharded.optimizer.zero_grad()
            torch.full((1 << 14,), torch.nan, device=training.device)

    for stage in range(4):
        on_both(Policy.stage(stage), run, make=_Skipping)


def failing_disk(rank: int) -> None:
    """Make a write fail, and load a checkpoint, after which the failure must have no effect."""
    for stage, parameters in ((2, None), (3, Place.DISK)):
        results = []
        for fails in (False, True):
            with folder_of_all() as folder, tempfile.TemporaryDirectory() as states:
                policy = offloaded(stage, states, Place.DISK, parameters, buffer_numel=6_000, sub_group_numel=100)
                training = Training(simgpu.device(), policy)
                training.step(1)
                training.sharded.save(folder, "x")
                if fails:
                    with suppress(StorageError), _no_room():
                        training.step(2)
                    training.step_number = 1
                    del training.losses[2:]
                    training.sharded.optimizer.zero_grad()
                    training.sharded.load(folder, "x")
                training.step(2)
                results.append(training.end())
        assert same(results[1], results[0]), f"stage {stage}"


@contextmanager
def _no_room() -> Iterator[None]:
    """Make writes of files fail, after a short delay."""

    def fail(*_: Any) -> None:
        time.sleep(LATE_SECONDS)
        raise StorageError("no room")

    with around_requests(write=fail):
        yield


RARE: dict[str, Callable[..., None]] = {
    body.__name__: body
    for body in (
        unclipped, several_backwards, sums_elsewhere, nested, states_at_once, masters_set, frozen_states,
        hosts, late_files, parking_on_late_files, forgotten_reads, hidden_writes, started_for_nothing, failing_disk,
    )
}  # fmt: skip
EVERY_BODY = BODIES | RARE
"""The bodies that run on any number of ranks."""
OF_FOUR_RANKS = {"hosts_of_two": hosts_of_two}
