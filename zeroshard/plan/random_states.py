"""Owns the count of random states: on a CPU torch's checkpointing keeps one for each call, where no dispatch sees it. Called by
dry_run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@contextmanager
def random_states(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a forward of each of these modules takes as much memory as a state, until its backward is over.

    That is where its input has a gradient. Where the input needs none, the state stays until the module's next forward.
    """
    kept: dict[nn.Module, Tensor] = {}
    handles = [module.register_forward_pre_hook(partial(_keep, kept), with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(kept: dict[nn.Module, Tensor], module: nn.Module, args: Any, kwargs: Any) -> None:
    kept[module] = torch.empty(torch.get_rng_state().nbytes, dtype=torch.uint8)
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
            leaf.register_hook(partial(_forget, kept, module))
            return


def _forget(kept: dict[nn.Module, Tensor], module: nn.Module, _gradient: Tensor) -> None:
    kept.pop(module, None)
