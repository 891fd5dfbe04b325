"""Code that runs beside or inside the training loop: second threads, signals' handlers, checkpoints around parts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from models import tokens
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from twin import build, same, steps, update, whole

from zeroshard import UsageError


def trained(
    rank: int, stage: int, beside: Callable[[nn.Module], Callable[[], object]] | None = None
) -> dict[str, Tensor]:
    """Train for 12 steps, while other code reads; it is stopped at the end."""
    model, sharded = build(stage)
    stop = beside(model) if beside else lambda: None
    steps(model, sharded, rank, range(12))
    stop()
    return whole(model)


def read_norms(model: nn.Module) -> None:
    for parameter in model.parameters():
        try:
            float(parameter.detach().norm())
        except UsageError as error:
            assert "was read while" in str(error) or "sharded at rest" in str(error)


def run_forward(model: nn.Module) -> None:
    try:
        with torch.no_grad():
            model(*tokens(0, 99))
    except UsageError as error:
        assert "was read while" in str(error)


def in_a_thread(run: Callable[[nn.Module], object], model: nn.Module) -> Callable[[], object]:
    over = threading.Event()
    errors: list[BaseException] = []

    def repeat() -> None:
        try:
            while not over.is_set():
                run(model)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()
        assert not errors, errors

    return stop


def in_a_handler(run: Callable[[nn.Module], object], model: nn.Module) -> Callable[[], object]:
    def handle(*_: object) -> None:
        run(model)
        signal.setitimer(signal.ITIMER_REAL, 0.002)  # not earlier: on a slow machine handlers would interrupt handlers

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002)

    def stop() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    return stop


NORMS_IN_A_THREAD, NORMS_IN_A_HANDLER = partial(in_a_thread, read_norms), partial(in_a_handler, read_norms)
FORWARDS_IN_A_THREAD = partial(in_a_thread, run_forward)


BESIDE = [
    *product((NORMS_IN_A_THREAD, NORMS_IN_A_HANDLER), (1, 2, 3)),
    *product((FORWARDS_IN_A_THREAD,), (1, 2)),  # at stage 3 a second thread may be refused, or the first
]


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.parametrize(("beside", "stage"), BESIDE)
def test_code_that_reads_beside_training_changes_no_bit(
    rank: int, beside: Callable[[nn.Module], Callable[[], object]], stage: int
) -> None:
    assert same(trained(rank, stage), trained(rank, stage, beside))


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "checkpoint, reentrant": lambda module, x: checkpoint(module, x, use_reentrant=True),
    "saved on CPU": lambda module, x: under(save_on_cpu(), module, x),
    "kept by others": lambda module, x: under(saved_tensors_hooks(lambda kept: kept, lambda kept: kept), module, x),
}


def under(hooks: AbstractContextManager[object], module: nn.Module, x: Tensor) -> Any:
    with hooks:
        return module(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_parts_run_alone_under_the_hooks_of_others(rank: int, way: str) -> None:
    """At stage 3, with the bits of stage 2."""

    def run(stage: int) -> dict[str, Tensor]:
        model, sharded = build(stage)
        for number in range(4):
            x = model.embedding(*tokens(rank, number)).detach().requires_grad_()
            for block in model.blocks:
                x = WAYS[way](block, x).tanh()
            update(sum(WAYS[way](model.head, chunk).square().mean() for chunk in x.chunk(3)), sharded.optimizer)
        return whole(model)

    assert same(run(2), run(3))
