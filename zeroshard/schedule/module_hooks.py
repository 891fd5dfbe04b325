"""Owns how our hooks sit on the user's modules: around all others, and in state dicts; and one call of a module.

Called by hooks.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.schedule.unit import Unit


class _Hook:
    """A method of `Hooks` as a module keeps it: a copy of the model, or a pickled one, gets no hook."""

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method, self._args = method, args

    def __call__(self, *args: Any) -> Any:
        return self._method(*self._args, *args)

    def __reduce__(self) -> Any:  # copy.deepcopy and pickle come here
        return _no_hook, ()


@functools.cache
def module_hook() -> type[_Hook]:
    """Hooks that torch.compile does not look into: its graph breaks there, at the borders of a unit.

    Made at first use: to say so imports the compiler, which takes a second.
    """

    class ModuleHook(_Hook):
        __call__ = torch.compiler.disable(_Hook.__call__)

    return ModuleHook


class WeakHook:
    """The same as a parameter keeps it. Python's garbage collector does not see what a parameter's hooks refer to, so a
    parameter must not own what owns it; modules keep `Hooks` alive."""

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method, self._args = weakref.WeakMethod(method), args

    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*self._args, *args)


def _no_hook() -> Callable[..., None]:
    return ignore


def ignore(*_: Any) -> None:
    """Do nothing."""


class Call:
    """One call of a module in a forward; counted until its backward begins, or its graph is dropped (a recomputation never is)."""

    def __init__(self, to_come: Counter[nn.Module], module: nn.Module, *, counted: bool) -> None:
        self._to_come, self._module, self._counted = to_come, module, counted
        to_come[module] += counted

    def begin(self) -> None:
        """Its backward begins."""
        self._to_come[self._module] -= self._counted
        self._counted = False

    def __del__(self) -> None:
        self.begin()


class Outermost:
    """Hooks on forwards that come before all other hooks of a module, and after them, those that are added later included.

    weight_norm, spectral_norm and their like compute with parameters in hooks of their own.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[nn.Module, RemovableHandle, RemovableHandle]] = []

    def add(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """`before(module, args, kwargs)` and `after(module, args, output)`; the second also where the forward raises."""
        first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        self._hooks.append((module, first, module.register_forward_hook(after, always_call=True)))

    def keep(self) -> None:
        """Take the outermost places again, if other hooks came since."""
        for module, first, last in self._hooks:
            before, after = module._forward_pre_hooks, module._forward_hooks
            if next(reversed(after)) != last.id:
                after[last.id] = after.pop(last.id)
            if next(iter(before)) != first.id:
                for other in [number for number in before if number != first.id]:
                    before[other] = before.pop(other)

    def remove(self) -> None:
        """Take them off."""
        for _, first, last in self._hooks:
            first.remove()
            last.remove()
        self._hooks.clear()


def hooks_for_state_dicts(units_of: Mapping[nn.Module, Sequence[Unit]]) -> list[RemovableHandle]:
    """State dicts of sharded modules hold true values, and loading them takes effect: one unit is whole at a time.

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
    """The units of one module, whole while a state dict is made of it, or loaded.

    Args:
        names: of their parameters, as the module has them, and the parameters' `id`s.
    """

    def __init__(self, units: Sequence[Unit], names: Mapping[str, int]) -> None:
        self._units, self._names = units, names

    def before_save(self, *_: Any) -> None:
        self._bring("state_dict")

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
                    copies[parameter] = value.detach().clone()  # which stays when the unit is given back
                state[prefix + name] = copies[parameter]
        self._give_back()

    def before_load(self, *_: Any) -> None:
        self._bring("load_state_dict")

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
