"""Owns the hooks that keep units unsharded while a module's `state_dict` or `load_state_dict` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.schedule.unit import Unit


def hooks_for_state_dicts(units_of: Mapping[nn.Module, Sequence[Unit]]) -> list[RemovableHandle]:
    """Register hooks that make `state_dict` and `load_state_dict` of sharded modules exact, with one unsharded unit at a time.

    Every rank must call `state_dict` and `load_state_dict` then.
    """
    handles = []
    for module, units in units_of.items():
        ours = {id(entry.parameter) for unit in units for entry in unit.named}
        named = module.named_parameters(remove_duplicate=False)
        held = _Held(units, {name: id(parameter) for name, parameter in named if id(parameter) in ours})
        handles += [
            module.register_state_dict_pre_hook(held.before_save),
            module.register_state_dict_post_hook(partial(held.after_save)),
            module.register_load_state_dict_pre_hook(held.before_load),
            module.register_load_state_dict_post_hook(held.after_load),
        ]
    return handles


class _Held:
    """The units of one module, which stay unsharded while its state dict is made or loaded.

    Args:
        names: of their parameters, as the module has them, and the parameters' `id`s.
    """

    def __init__(self, units: Sequence[Unit], names: Mapping[str, int]) -> None:
        self._units = units
        self._names = names

    def before_save(self, *_: Any) -> None:
        self._bring("state_dict()")

    def _bring(self, operation: str) -> None:
        for unit in self._units:
            with unit.collectives.operation(operation):
                unit.unshard()
            unit.pin()

    def after_save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        copies: dict[int, Tensor] = {}
        for name, parameter in self._names.items():
            if isinstance(value := state.get(prefix + name), Tensor):
                if parameter not in copies:  # of tied parameters there is one
                    copies[parameter] = value.detach().clone()  # which stays when the unit is resharded
                state[prefix + name] = copies[parameter]
        self._give_back()

    def before_load(self, *_: Any) -> None:
        self._bring("load_state_dict()")

    def after_load(self, *_: Any) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for unit in self._units:
            unit.unpin()
            unit.reshard()

    def __reduce__(self) -> Any:  # a copy of the module gets hooks that do nothing
        return _HeldNothing, ()


class _HeldNothing(_Held):
    def __init__(self) -> None:
        super().__init__((), {})
