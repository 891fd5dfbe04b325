"""Memory that buffers free and allocate again under the same views, and its readers in the meantime."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from twin import DISK, LARGE_BUCKETS, build, same, whole
from twin import gpt_batch as batch

from zeroshard import Offload, Precision
from zeroshard.core.storage.base import AcceleratorStorage
from zeroshard.core.storage.buffers import FlatBuffer
from zeroshard.core.storage.transfers import CPU, STAGED_COUNT, Copies, Transfer
from zeroshard.errors import UsageError
from zeroshard.testing.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=4, width=256, heads=4, context=16)
MIB = 1 << 20


@pytest.fixture
def storage() -> AcceleratorStorage:
    return AcceleratorStorage(CPU, Copies(CPU))


def buffer_of(storage: AcceleratorStorage, mib: float, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return storage.flat_buffer("a test", int(mib * MIB) // dtype.itemsize, dtype)


gpt = partial(build, make_model=partial(GPT, CONFIG), bucket_numel=LARGE_BUCKETS)


# ---------------------------------------------------------------------- buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("mib", [0.3, 2, 5.1])
def test_views_see_what_comes_to_the_same_place(storage: AcceleratorStorage, mib: float, dtype: torch.dtype) -> None:
    buffer = buffer_of(storage, mib, dtype)
    assert not buffer.tensor.any()
    view = buffer.view(10, torch.Size((3, 4)))
    buffer.count_uses()
    buffer.free()
    assert not buffer.nbytes
    buffer.allocate()
    buffer.tensor.fill_(2)
    assert buffer.nbytes == buffer.tensor.nbytes and (view == 2).all()
    theirs = view[1:]
    buffer.free()
    assert buffer.nbytes and (theirs == 2).all(), "somebody looks at it who did not before"
    del theirs
    buffer.free()
    assert not buffer.nbytes


# ---------------------------------------------------------------------- slots


@pytest.mark.parametrize("numel", [1000, 300_000])
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


# ---------------------------------------------------------------------- training


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize(
    "precision", [None, Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_take_nothing_between_zero_grad_and_the_backward(
    rank: int, stage: int, precision: Precision | None
) -> None:
    model, sharded = gpt(stage, precision=precision)
    at_rest = [sharded.memory_report()["gradients"]]
    during = []
    for number in range(3):
        loss = model(*batch(rank, number))
        at_rest.append(sharded.memory_report()["gradients"])  # at the end of the forward
        loss.backward()
        sharded.optimizer.step()
        during.append(sharded.memory_report()["gradients"])
        sharded.optimizer.zero_grad()
    assert at_rest == [0, 0, 0, 0]
    assert min(during) == pytest.approx(sharded.memory_formula()["gradients"], rel=0.02)
    assert sharded.states.get(next(n for n, _ in model.named_parameters()), "gradients") is None


@pytest.mark.ranks(2, fresh=True)
def test_who_keeps_a_gradient_keeps_its_memory(rank: int) -> None:
    """An optimizer that holds what it was lent."""

    class Keeps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            kept.extend(p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            return super().step(closure)

    kept: list[Tensor] = []
    model, sharded = gpt(3, make_optimizer=partial(Keeps, lr=0.1), elementwise=True)
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


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("forgets", [False, True])
def test_parked_gradients_come_back_unless_forgotten(rank: int, stage: int, forgets: bool, tmp_path: Path) -> None:
    def run(parks: bool) -> tuple[dict[str, Tensor], list[int]]:
        model, sharded = gpt(stage)
        seen = []
        for number in range(3):
            model(*batch(rank, number)).backward()
            sharded.optimizer.step()
            if parks:
                sharded.offload_states(place=DISK, offload=Offload(str(tmp_path)))
                seen.append(sharded.memory_report()["gradients"])
                if forgets:
                    sharded.optimizer.zero_grad()
                sharded.reload_states()
                seen.append(sharded.memory_report()["gradients"])
            if not forgets or not parks:
                sharded.optimizer.step()  # with the same gradients once more
                sharded.optimizer.zero_grad()
        return whole(model), seen

    found, seen = run(True)
    assert set(seen[::2]) == {0}
    assert (set(seen[1::2]) == {0}) is (forgets and stage > 0)
    if not forgets:
        expected, _ = run(False)
        assert same(expected, found)


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
