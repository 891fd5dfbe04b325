"""CPU memory that buffers return to the system, and get again at the same addresses, and its readers in the meantime."""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from twin import gpt_batch as batch

import zeroshard
from zeroshard import Policy, Precision
from zeroshard.errors import UsageError
from zeroshard.storage import base
from zeroshard.storage.base import AcceleratorStorage
from zeroshard.storage.buffers import FlatBuffer, PagedBuffer
from zeroshard.storage.pages import CHUNK_NBYTES, KernelMemory, Pages, Range, kernel_memory
from zeroshard.storage.transfers import CPU, STAGED_COUNT, Copies, Transfer
from zeroshard.testing import Workload, run_ranks, train
from zeroshard.testing.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=4, width=256, heads=4, context=16)
MIB = 1 << 20
moves = pytest.mark.skipif(kernel_memory() is None, reason="the kernel does not move pages")


@pytest.fixture
def storage() -> AcceleratorStorage:
    return AcceleratorStorage(CPU, Copies(CPU))


def buffer_of(storage: AcceleratorStorage, mib: float, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return storage.flat_buffer("a test", int(mib * MIB) // dtype.itemsize, dtype, comes_and_goes=True)


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def child(look: Iterator[object]) -> int:
    """How a forked process ends that goes through `look`."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        try:
            for _ in look:
                pass
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


# ---------------------------------------------------------------------- buffers


@moves
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mib", [0.3, 2, 5.1])
def test_views_see_what_comes_to_the_same_place(storage: AcceleratorStorage, mib: float, dtype: torch.dtype) -> None:
    storage.keep_freed_at_most(16 * MIB)
    buffer = buffer_of(storage, mib, dtype)
    assert isinstance(buffer, PagedBuffer)
    assert not buffer.tensor.any()
    view, address = buffer.view(10, torch.Size((3, 4))), buffer.tensor.data_ptr()
    buffer.free()
    assert not buffer.nbytes
    buffer.allocate()
    buffer.tensor.fill_(2)
    assert buffer.tensor.data_ptr() == address and buffer.nbytes == buffer.tensor.nbytes and (view == 2).all()
    theirs = view[1:]
    buffer.free()
    assert buffer.nbytes and (theirs == 2).all(), "somebody looks at it who did not before"
    del theirs
    buffer.free()
    assert not buffer.nbytes


@moves
def test_a_stray_reader_of_freed_memory_dies(storage: AcceleratorStorage) -> None:
    storage.keep_freed_at_most(16 * MIB)
    for mib in (0.3, 5.1):
        buffer = buffer_of(storage, mib)
        buffer.free()
        ended = child(iter(lambda buffer=buffer: buffer.tensor[-1].item(), None))
        assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGSEGV


@moves
def test_pages_go_from_one_buffer_to_the_next(storage: AcceleratorStorage) -> None:
    """Also between sizes: whole chunks fit all. No page is made anew."""
    storage.keep_freed_at_most(32 * MIB)
    buffers = [buffer_of(storage, mib) for mib in (6.2, 6.2, 8.2)]
    for buffer in buffers:
        buffer.free()

    def go_round() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            for buffer in buffers:
                buffer.allocate()
                buffer.tensor.fill_(1)
                buffer.free()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    go_round()
    assert go_round() < 100  # of 26,000 small pages, or 50 huge ones


@moves
def test_freed_memory_that_is_kept_is_bounded(storage: AcceleratorStorage) -> None:
    one, other = buffer_of(storage, 8), buffer_of(storage, 8)
    one.free()
    assert storage.freed_nbytes == 0, "nothing was to be kept"
    storage.keep_freed_at_most(12 * MIB)
    one.allocate()
    one.free()
    assert storage.freed_nbytes == 4 * MIB  # beside the other's 8
    other.free()
    assert storage.freed_nbytes == 12 * MIB
    one.allocate()
    assert storage.freed_nbytes == 4 * MIB
    small = buffer_of(storage, 0.5)
    assert storage.freed_nbytes <= 12 * MIB - one.nbytes - small.nbytes
    small.free()
    storage.keep_freed_at_most(0)
    assert storage.freed_nbytes == 0


@moves
def test_an_array_keeps_the_memory_as_long_as_it_lives(storage: AcceleratorStorage) -> None:
    buffer = buffer_of(storage, 3)
    buffer.free()
    buffer.allocate()
    buffer.tensor.fill_(3)
    array = buffer.tensor[100:200].numpy()
    buffer.free()
    assert buffer.nbytes and (array == 3).all()
    del array
    buffer.free()
    assert not buffer.nbytes


@moves
def test_a_forked_process_has_its_own(storage: AcceleratorStorage) -> None:
    """As the workers of a DataLoader."""
    storage.keep_freed_at_most(8 * MIB)
    buffer = buffer_of(storage, 4)
    buffer.tensor.fill_(1)

    def look() -> Iterator[object]:
        assert (buffer.tensor == 1).all()
        buffer.tensor.fill_(2)
        buffer.free()
        yield buffer.allocate()

    assert child(look()) == 0
    assert (buffer.tensor == 1).all()


@moves
def test_nothing_stays_behind() -> None:
    def once() -> None:
        storage = AcceleratorStorage(CPU, Copies(CPU))
        storage.keep_freed_at_most(8 * MIB)
        buffers = [buffer_of(storage, 0.2), buffer_of(storage, 2.2)]
        slot = storage.transient_slot("gradients", 100_000, torch.float32)
        slot.fill()
        for buffer in buffers:
            buffer.free()

    for _ in range(20):
        once()
    gc.collect()
    before = mappings()
    for _ in range(1000):
        once()
    gc.collect()
    assert mappings() <= before + 5


@moves
@pytest.mark.full
def test_models_that_are_made_and_removed_leave_nothing() -> None:
    def body(rank: int) -> None:
        def once(removes: bool) -> None:
            model = GPT(CONFIG)
            sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(3))
            model(*batch(rank, 0)).backward()
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            if removes:
                sharded.remove()

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        for number in range(12):
            once(number % 2 == 0)
            gc.collect()
        before = mappings(), resident()
        for number in range(30):
            once(number % 2 == 0)
            gc.collect()
        # A model takes 20 MiB, in 60 mappings; malloc keeps a model's worth or two.
        assert mappings() <= before[0] + 60 and resident() <= before[1] + 100 * MIB

    run_ranks(body, 2)


def test_tensors_outlive_their_buffer(storage: AcceleratorStorage) -> None:
    tensor = buffer_of(storage, 3).tensor
    del storage
    gc.collect()
    assert not tensor.any() and (tensor.add_(1) == 1).all()


# ---------------------------------------------------------------------- slots


@pytest.mark.parametrize("numel", [1000, 300_000, CHUNK_NBYTES])
def test_an_empty_slot_is_not_read(storage: AcceleratorStorage, numel: int) -> None:
    slot = storage.transient_slot("gradients of a test", numel, torch.float32)
    slot.write(torch.ones(numel))
    memory = slot.memory_in(storage)
    assert memory is not None and (memory == 1).all()
    slot.empty()
    assert slot.is_empty and slot.buffer is not None
    with pytest.raises(UsageError, match="gradients of a test are not there"):
        slot.read(torch.empty(numel))
    del memory
    slot.empty()
    assert not slot.buffer.nbytes
    slot.write(torch.full((numel,), 2.0))
    out = torch.empty(numel)
    slot.read(out)
    assert (out == 2).all()


def test_a_slot_that_is_emptied_takes_no_memory_of_its_neighbours(storage: AcceleratorStorage) -> None:
    slots = [storage.transient_slot("gradients", 150_000, torch.float32) for _ in range(9)]
    for number, slot in enumerate(slots):
        slot.write(torch.full((150_000,), float(number)))
    for slot in slots[::2]:
        slot.empty()
    del slots[-1], slot
    out = torch.empty(150_000)
    for number in (1, 3, 5, 7):
        slots[number].read(out)
        assert (out == number).all()


# ---------------------------------------------------------------------- training


def test_without_such_a_kernel_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(lambda: GPT(CONFIG), batch, steps=3, max_norm=1.0)

    def body(rank: int) -> None:
        found = train(rank, workload, Policy.stage(3))
        monkeypatch.setattr(base, "kernel_memory", lambda: None)
        expected = train(rank, workload, Policy.stage(3))
        assert found.equals(expected) and found.norms == expected.norms

    run_ranks(body, 2)


@pytest.mark.parametrize(
    "precision", [None, Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_take_nothing_between_zero_grad_and_the_backward(stage: int, precision: Precision | None) -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = GPT(CONFIG)
        sharded = zeroshard.shard(
            model, torch.optim.AdamW(model.parameters()), Policy.stage(stage), precision=precision
        )
        fresh = sharded.memory_report()["gradients"]
        during, after = [], []
        for step in range(3):
            loss = model(*batch(rank, step))
            after.append(sharded.memory_report()["gradients"])  # at the end of the forward
            loss.backward()
            sharded.optimizer.step()
            during.append(sharded.memory_report()["gradients"])
            sharded.optimizer.zero_grad()
        assert after[1:] == [0, 0] and fresh < 0.1 * during[0]  # before the first step, what is too small for pages
        assert min(during) == pytest.approx(sharded.memory_formula()["gradients"], rel=0.02)
        assert sharded.states.get(next(n for n, _ in model.named_parameters()), "gradients") is None

    run_ranks(body, 2)


def test_the_peak_falls_by_the_gradients() -> None:
    """Resident pages of the process, at the end of a forward."""
    if not Path("/proc/self/statm").exists() or kernel_memory() is None:
        pytest.skip("no such kernel")
    config = GPTConfig(layers=2, width=512, heads=4, context=16)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def body(rank: int) -> None:
        model = GPT(config)
        sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(2))
        for step in range(3):
            model(*batch(rank, step)).backward()
            sharded.optimizer.step()
            before = resident()
            sharded.optimizer.zero_grad()
            after = resident()
        assert before - after > 0.8 * sharded.memory_formula()["gradients"]

    run_ranks(body, 2)


def test_who_keeps_a_gradient_keeps_its_memory() -> None:
    """An optimizer that holds what it was lent."""

    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            kept.extend(p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            return super().step(closure)

    kept: list[Tensor] = []

    def body(rank: int) -> None:
        model = GPT(CONFIG)
        inner = Keeps(model.parameters(), lr=0.1)
        sharded = zeroshard.shard(model, inner, Policy.stage(3), elementwise=True)
        model(*batch(rank, 0)).backward()
        sharded.optimizer.step()
        copies = [gradient.clone() for gradient in kept]
        sharded.optimizer.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
        assert sharded.memory_report()["gradients"] > 0
        kept.clear()
        model(*batch(rank, 1)).backward()
        kept.clear()
        sharded.optimizer.zero_grad()
        assert sharded.memory_report()["gradients"] == 0

    run_ranks(body, 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("forgets", [False, True])
def test_parked_gradients_come_back_unless_forgotten(stage: int, forgets: bool, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        def run(parks: bool) -> tuple[dict[str, Tensor], list[int]]:
            torch.manual_seed(0)
            model = GPT(CONFIG)
            sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), Policy.stage(stage))
            seen = []
            for step in range(3):
                model(*batch(rank, step)).backward()
                sharded.optimizer.step()
                if parks:
                    offload = zeroshard.Offload(str(tmp_path))
                    sharded.offload_states(place=zeroshard.Place.DISK, offload=offload)
                    seen.append(sharded.memory_report()["gradients"])
                    if forgets:
                        sharded.optimizer.zero_grad()
                    sharded.reload_states()
                    seen.append(sharded.memory_report()["gradients"])
                if not forgets or not parks:
                    sharded.optimizer.step()  # with the same gradients once more
                    sharded.optimizer.zero_grad()
            with zeroshard.unsharded(model):
                return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}, seen

        found, seen = run(True)
        assert set(seen[::2]) == {0}
        assert (set(seen[1::2]) == {0}) is (forgets and stage > 0)
        if not forgets:
            expected, _ = run(False)
            assert all(torch.equal(found[fqn], value) for fqn, value in expected.items())

    run_ranks(body, 2)


# ---------------------------------------------------------------------- the pool of pages


def a_unit(pages: Pages) -> Range:
    unit = Range(pages, CHUNK_NBYTES, is_unit=True)
    unit.fill()
    return unit


@moves
def test_ranges_that_are_emptied_at_once_go_to_different_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's calls let other threads run; here the other one is emptied inside the first one's call."""
    kernel = kernel_memory()
    assert kernel is not None
    pages = Pages(kernel)
    pages.limit_nbytes = 1 << 40
    one, other = a_unit(pages), a_unit(pages)
    move = KernelMemory.move
    targets = []

    def moving(self: KernelMemory, source: int, target: int, nbytes: int) -> None:
        targets.append(target)
        if len(targets) == 1:
            other.empty()
        move(self, source, target, nbytes)

    monkeypatch.setattr(KernelMemory, "move", moving)
    one.empty()
    assert len({*targets}) == len(targets) == 2


@moves
def test_a_range_that_ends_with_a_cycle_touches_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cycle of references the addresses are given back before `__del__`: they may then be another's."""
    kernel = kernel_memory()
    assert kernel is not None
    calls = []
    for name in ("unmap", "hide"):
        call = getattr(KernelMemory, name)

        def noted(self: KernelMemory, address: int, nbytes: int, name: str = name, call: Any = call) -> None:
            calls.append((name, address))
            call(self, address, nbytes)

        monkeypatch.setattr(KernelMemory, name, noted)
    of = Range(Pages(kernel), CHUNK_NBYTES)
    address = of.address
    of.fill()
    cycle: dict[str, Any] = {"range": of}
    cycle["itself"] = cycle
    del cycle, of
    gc.collect()
    assert ("unmap", address) in calls
    assert ("hide", address) not in calls[calls.index(("unmap", address)) :]


def test_buffers_of_failed_copies_are_not_lost() -> None:
    staging = Copies(CPU).staging
    bytes_of_all = STAGED_COUNT * staging.buffer_nbytes
    taken = [staging.take() for _ in range(STAGED_COUNT + 1)]  # one more than there are: none has come back
    staging.release(taken[0], Busy())
    for _ in range(5):
        staging.release(staging.take(), Busy())
    assert staging.nbytes <= bytes_of_all + staging.buffer_nbytes


class Busy(Transfer):
    is_done = False

    def wait(self, device: torch.device) -> None:
        pass
