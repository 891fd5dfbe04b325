"""Code that runs beside or inside the training loop: second threads, signals' handlers, checkpoints around parts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from twin import update

import zeroshard
from zeroshard import UsageError


def trained(rank: int, stage: int, beside: Callable[[nn.Module], Callable[[], object]] | None = None) -> list[Tensor]:
    """Train for 12 steps, while other code reads; it is stopped at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    sharded = zeroshard.shard(model, optimizer, stage)
    stop = beside(model) if beside else lambda: None
    for number in range(12):
        generator = torch.Generator().manual_seed(100 * number + rank)
        update(model(torch.randn(4, 32, generator=generator)).square().mean(), optimizer)
    stop()
    with zeroshard.unsharded(model):
        found = [parameter.detach().clone() for parameter in model.parameters()]
    sharded.remove()
    return found


def norms_in_a_thread(model: nn.Module) -> Callable[[], object]:
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            for parameter in model.parameters():
                try:
                    float(parameter.detach().norm())
                except UsageError as error:
                    assert "was read while" in str(error) or "sharded at rest" in str(error)

    return in_a_thread(read, over)


def forwards_in_a_thread(model: nn.Module) -> Callable[[], object]:
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            try:
                with torch.no_grad():
                    model(torch.ones(1, 32))
            except UsageError as error:
                assert "was read while" in str(error)

    return in_a_thread(run, over)


def in_a_thread(run: Callable[[], object], over: threading.Event) -> Callable[[], object]:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return stop


def norms_in_a_handler(model: nn.Module) -> Callable[[], object]:
    def read(*_: object) -> None:
        for parameter in model.parameters():
            try:
                float(parameter.detach().norm())
            except UsageError as error:
                assert "was read while" in str(error) or "sharded at rest" in str(error)

    before = signal.signal(signal.SIGALRM, read)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    return stop


BESIDE = [
    *((code, stage) for code in (norms_in_a_thread, norms_in_a_handler) for stage in (1, 2, 3)),
    *((forwards_in_a_thread, stage) for stage in (1, 2)),  # at stage 3 a second thread may be refused, or the first
]


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize(("beside", "stage"), BESIDE)
def test_code_that_reads_beside_training_changes_no_bit(
    rank: int, beside: Callable[[nn.Module], Callable[[], object]], stage: int
) -> None:
    expected = trained(rank, stage)
    assert all(map(torch.equal, expected, trained(rank, stage, beside)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["checkpoint", "checkpoint, reentrant", "saved on CPU", "kept by others"])
def test_parts_run_alone_under_the_hooks_of_others(rank: int, how: str) -> None:
    """At stage 3, with the bits of stage 2."""

    def part(module: nn.Module, x: Tensor) -> Tensor:
        if how.startswith("checkpoint"):
            found: Tensor = checkpoint(module, x, use_reentrant="reentrant" in how)
            return found
        if how == "saved on CPU":
            with save_on_cpu():
                return module(x)  # type: ignore[no-any-return]
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return module(x)  # type: ignore[no-any-return]

    def run(stage: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), "head": nn.Linear(16, 8)})
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        zeroshard.shard(model, optimizer, stage)
        for number in range(4):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * number + rank)).requires_grad_()
            for layer in model["body"]:
                x = part(layer, x).tanh()
            loss = sum(part(model["head"], chunk).square().mean() for chunk in x.chunk(3))
            assert isinstance(loss, Tensor)
            update(loss, optimizer)
        with zeroshard.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, run(2), run(3)))
