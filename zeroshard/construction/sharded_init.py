"""Owns models that are born sharded: no rank ever holds the whole model.

    with zeroshard.sharded_init():
        model = MyModel()          # the numbers that it would have without, under the same seed
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), Policy.stage(3))

A module's parameters are divided over ranks when the module becomes part of another: its constructor is then done.
Those of the outermost module are divided when the context ends. born.py has their class. Every rank must run the same
code.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as registration

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
    """Shard modules as they are built inside: each rank keeps only its part of their parameters. Every rank must enter
    it.

    Whole at any time are at most the parameters of one module that is being built (without its children), and one
    parameter for an operation. The outermost modules' own parameters are divided at the end of the block. `shard` and
    `initialize` take such a model like any other, one unit at a time.

    Args:
        group: the data-parallel process group; default: all ranks.
        folder: parts on the CPU are in unnamed files there until `shard` takes them: for a model of which this rank's
            part is larger than its memory.
        dtype: torch's default dtype inside.
        source: the rank of the group whose values all ranks get, also in later writes. (Writes to a view of a
            parameter, `weight[0].normal_()`, must be the same on all ranks.) None: every value is the same on all
            ranks, and none is sent.
        attributes: a class whose properties these parameters have beside their own, see `shard`.
        detached_stay_cut: `parameter.detach()` and state dicts stay divided too: an operation on one of their tensors,
            on every rank, gathers it. Otherwise each is whole on every rank.
        enabled: False: modules are built as without it.
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

    handles = [
        registration.register_module_module_registration_hook(cut),
        registration.register_module_parameter_registration_hook(note),
    ]
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
        module: the model, changed in place. Parameters that are divided already stay as they are.
        group, folder, attributes, detached_stay_cut: see `sharded_init`.
        source: the rank whose values all ranks get; None: they are the same on all ranks.

    Raises:
        UsageError: the model is sharded already, or is on the meta device.
    """
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    for fqn, parameter in module.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{fqn} is on the meta device and has no values: call materialise or load_pretrained instead."
            )
    for parameter in module.parameters():
        cut_parameter(parameter, births)
