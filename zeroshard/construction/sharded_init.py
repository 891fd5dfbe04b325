"""Owns models that are born sharded: no rank ever holds the whole model.

    with zeroshard.sharded_init():
        model = MyModel()          # the same values as without sharded_init, under the same seed
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), Policy.stage(3))

The parameters of a module are divided over ranks when the module is added to another module, since its constructor is
then done. The outermost module's parameters are divided when the context ends. born.py has the class of such parameters.
Every rank must run the same code.
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
    """Shard modules while they are built in this context. Every rank must enter it.

    Each rank keeps only its part of the parameters. A module's parameters are divided when the module becomes a child of
    another one; parameters of the outermost modules, at the end of the context. Until then, the direct parameters of modules
    under construction are whole. Any other parameter is whole only while an operation uses it or a view of it exists.
    `shard` and `initialize` accept such a model like any other.

    Args:
        group: the data-parallel process group; default: all ranks.
        folder: a folder for parts on the CPU, in unnamed files, until `shard` takes them. They may then be larger than memory.
        dtype: torch's default dtype in the context.
        source: the group's rank whose values all ranks get, including later writes. Writes to a view of a parameter
            (`weight[0].normal_()`) must be the same on all ranks. None: all ranks compute the same values, and send none.
        attributes: a class whose properties these parameters get in addition to their own, see `shard`.
        detached_stay_cut: whether `parameter.detach()` and state dicts stay divided too. An operation on one of their
            tensors then gathers it, so every rank must run it. Otherwise they are whole on every rank.
        enabled: whether to shard; False builds ordinary modules.

    Raises:
        CollectiveError: some ranks did not enter it.
        StorageError: `folder` cannot hold the parts.
    """
    if not enabled:
        yield
        return
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    holders: list[weakref.ref[nn.Module]] = []  # in the order of their parameters: the same order on all ranks

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
    """Keep only this rank's part of a model that is whole on every rank. Every rank must call it.

    The model is then as if it had been built inside `sharded_init`.

    Args:
        module: the model, which is changed in place. Parameters that are already divided do not change.
        group, folder, attributes, detached_stay_cut: as for `sharded_init`.
        source: the rank of the group whose values all ranks get; None if the values are the same on all ranks.

    Raises:
        UsageError: a parameter is on the meta device.
        CollectiveError: some ranks did not call it.
        StorageError: `folder` cannot hold the parts.
    """
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    for fqn, parameter in module.named_parameters():
        if parameter.is_meta:
            raise UsageError(
                f"{fqn} is on the meta device and has no values: call materialise or load_pretrained instead."
            )
    for parameter in module.parameters():
        cut_parameter(parameter, births)
