"""Owns models that are born sharded: their whole never exists on any rank.

    with zeroshard.sharded_init():
        model = MyModel()          # the numbers that it would have without, under the same seed
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), Policy.stage(3))

A module's parameters are cut when the module becomes part of another, which is when its constructor is done; those of the outermost
when the context ends. What they are from then on: see born. Every rank must run the same code.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook as on_module_registration,
)
from torch.nn.modules.module import (
    register_module_parameter_registration_hook as on_parameter_registration,
)

from zeroshard.construction.born import Births, cut_parameter
from zeroshard.errors import UsageError


@contextmanager
def sharded_init(
    group: dist.ProcessGroup | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    source: int | None = 0,
    attributes: type | None = None,
    detached_stay_cut: bool = False,
    enabled: bool = True,
) -> Iterator[None]:
    """Modules that are built inside keep only this rank's part of their parameters. Every rank must enter it.

    The most that is whole at any time is the parameters of one module that is being built (not of its children), and one
    parameter for an operation. What the outermost modules hold themselves is cut on leaving. `shard` and `initialize` take such
    a model as any other, one unit at a time.

    Args:
        group: the data-parallel process group; default: all ranks.
        folder: parts on the CPU lie in files there, that have no names, until `shard` takes them: for a model of which this
            rank's part is larger than its memory.
        dtype: torch's default dtype inside.
        source: the rank of the group whose values are everybody's, at the cut and in writes after it (not in writes to a view of
            a parameter, `weight[0].normal_()`, which are the same on all ranks). None: every value is the same on all ranks, and
            nothing is sent for that.
        attributes: a class whose properties these parameters show beside their own, see `shard`.
        detached_stay_cut: `parameter.detach()` is cut too, and so are state dicts: whoever uses one of their tensors, on every
            rank, brings it together. Otherwise each is whole on every rank.
        enabled: False: modules are built as ever.
    """
    if not enabled:
        yield
        return
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    holders: list[weakref.ref[nn.Module]] = []  # in the order of their parameters, which is the same on all ranks

    def cut(_parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        births.close()
        if child is None:
            return
        for parameter in child.parameters():
            cut_parameter(parameter, births)

    def note(module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        if not holders or holders[-1]() is not module:
            holders.append(weakref.ref(module))

    handles = [on_module_registration(cut), on_parameter_registration(note)]
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        if dtype is not None:
            torch.set_default_dtype(before)
        for handle in handles:
            handle.remove()
        births.close()
    for ref in holders:
        module = ref()
        if module is None:
            continue
        for parameter in module.parameters(recurse=False):
            cut_parameter(parameter, births)


def cut(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    source: int | None = 0,
    attributes: type | None = None,
    detached_stay_cut: bool = False,
) -> None:
    """Keep only this rank's part of a model that is whole on every rank, as `sharded_init` does. Every rank must call it.

    Args:
        module: changed in place. Parameters that are cut already stay as they are.
        group, folder, attributes, detached_stay_cut: see `sharded_init`.
        source: the rank whose values are everybody's; None: they are the same on all ranks.

    Raises:
        UsageError: the model was sharded, or lies on the meta device.
    """
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    for fqn, parameter in module.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{fqn} is on the meta device and has no values: call materialise or load_pretrained instead."
            )
    for parameter in module.parameters():
        cut_parameter(parameter, births)
