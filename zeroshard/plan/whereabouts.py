"""Owns the question which module runs, in a forward and in a backward: so that a peak has a place. Called by dry_run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zeroshard.plan.ledger import Ledger


@contextmanager
def whereabouts(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Inside, the ledger knows the fqn of the module that runs. In a backward: the one whose output's gradient came last."""
    handles = []
    for fqn, module in model.named_modules():
        name = fqn or "the root module"
        handles.append(module.register_forward_pre_hook(partial(_enter, ledger, name)))
        handles.append(module.register_forward_hook(partial(_leave, ledger, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(ledger: Ledger, name: str, *_: Any) -> None:
    ledger.module = name


def _leave(ledger: Ledger, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    ledger.module = name.rpartition(".")[0] or "the root module"
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(partial(_enter_backward, ledger, name))


def _enter_backward(ledger: Ledger, name: str, _gradient: Tensor) -> None:
    ledger.module = name
