"""Owns state dicts of sharded modules: hooks that unshard one unit at a time, and a destination in CPU memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.module_hooks import Hook
from zeroshard.core.named_parameter import name_of
from zeroshard.core.unit import Unit
from zeroshard.torch_private import is_distributed


def hooks_for_state_dicts(units_of: Mapping[nn.Module, Sequence[Unit]]) -> list[RemovableHandle]:
    """Register hooks that make `state_dict` and `load_state_dict` of sharded modules exact, with one unsharded unit at a time.

    From then on, every rank must call `state_dict` and `load_state_dict`.
    """
    handles = []
    for module, of_module in units_of.items():
        units = [unit for unit in of_module if unit.comes_and_goes]
        if not units:
            continue
        ours = {id(entry.parameter) for unit in units for entry in unit.named}
        named = module.named_parameters(remove_duplicate=False)
        # Some of torch's wrappers do not show in state dicts.
        names = {
            name: id(parameter) for fqn, parameter in named if id(parameter) in ours for name in (fqn, name_of(fqn))
        }
        held = _Held(units, names)
        handles += [
            module.register_state_dict_pre_hook(Hook(held.unshard, "state_dict()")),
            module.register_state_dict_post_hook(Hook(held.copy_and_reshard)),
            module.register_load_state_dict_pre_hook(Hook(held.unshard, "load_state_dict()")),
            module.register_load_state_dict_post_hook(Hook(held.reshard)),
        ]
    return handles


class _Held:
    """The units of one module, which stay unsharded while its state dict is created or loaded.

    Args:
        names: the names of the units' parameters in the module, with the parameters' `id`s.
    """

    def __init__(self, units: Sequence[Unit], names: Mapping[str, int]) -> None:
        self._units = units
        self._names = names

    def unshard(self, operation: str, *_: Any) -> None:
        for unit in self._units:
            with unit.collectives.operation(operation):
                unit.unshard()
            unit.state_dicts += 1

    def copy_and_reshard(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        copies: dict[int, Tensor] = {}
        for name, parameter in self._names.items():
            if isinstance(value := state.get(prefix + name), Tensor):
                if parameter not in copies:  # tied parameters share one copy
                    copies[parameter] = value.detach().clone()  # the copy stays when the unit is resharded
                state[prefix + name] = copies[parameter]
        self.reshard()

    def reshard(self, *_: Any) -> None:
        for unit in self._units:
            unit.state_dicts = max(unit.state_dicts - 1, 0)  # a step in between has forgotten it
            unit.reshard()


class _KeptInMemory(OrderedDict[str, Any]):
    """A destination for `module.state_dict(destination=...)` that is filled while units are unsharded one after the other.

    Args:
        keeps: whether to copy values into CPU memory. If not, keep only a tensor's shape and dtype, on the meta device.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._device = torch.device("cpu" if keeps else "meta")

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if is_distributed(value):
                value = value.detach().full_tensor()  # type: ignore[attr-defined]
            value = value.detach().to(self._device, copy=True)
        super().__setitem__(key, value)


def state_dict_in_memory(module: nn.Module, *, keeps: bool) -> dict[str, Any]:
    """Return a module's state dict, gathered one unit at a time: in CPU memory if `keeps`, otherwise without values.

    Every rank must call it. Tied parameters are one tensor.
    """
    state = _KeptInMemory(keeps)
    module.state_dict(destination=state)
    first: dict[int, str] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        name = fqn if fqn in state else name_of(fqn)
        if name in state and first.setdefault(id(parameter), name) in state:
            dict.__setitem__(state, name, state[first[id(parameter)]])
    return dict(state)
