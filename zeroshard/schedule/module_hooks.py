"""Owns the hooks that a user's modules and parameters keep, as torch.compile and copies of a model see them."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.schedule.compiled import BORDER
from zeroshard.schedule.unit import Unit, UnitState
from zeroshard.torch_private import in_transform, own_parameters


class Hook:
    """A method that a module keeps as a hook. A copied or pickled model gets no hook."""

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> Any:
        return self._method(*self._args, *args)

    def __reduce__(self) -> Any:  # copy.deepcopy and pickle come here
        return _no_hook, ()


@functools.cache
def module_hook() -> type[Hook]:
    """Make the class of hooks that torch.compile does not trace: its graph breaks there, at a unit's border. See compiled.py.

    Made at first use: torch.compiler.disable imports the compiler, which takes a second.
    """

    class ModuleHook(Hook):
        __call__ = torch.compiler.disable(Hook.__call__, reason=BORDER)

    return ModuleHook


class PartCall:
    """The running call of a part of a unit, for the hooks on it.

    Attributes:
        whole: the class of parameters whose values are here.
        is_open: the call has unsharded units, which its end reshards.
    """

    def __init__(self, whole: type[nn.Parameter]) -> None:
        self.whole = whole
        self.is_open = False


@functools.cache
def part_hooks() -> tuple[type[Hook], type[Hook]]:
    """Make two classes of hooks `(method, call)` around modules inside a unit. torch.compile skips them while they are idle.

    It also compiles a hook by itself, if the part's module runs outside of a graph. So hooks may read only values that
    torch guards on: the classes of parameters, and a plain attribute.
    """
    run = torch.compiler.disable(Hook.__call__, reason=BORDER)

    class PartHook(Hook):
        def __init__(self, method: Callable[..., None], call: PartCall) -> None:
            super().__init__(method)
            self.call = call

    class Before(PartHook):
        def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                own = [parameter for parameter in own_parameters(module).values() if parameter is not None]
                if all(type(parameter) is self.call.whole for parameter in own):
                    return
            run(self, module, args, kwargs)

    class After(PartHook):
        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() or self.call.is_open:
                run(self, module, args, output)

    return Before, After


@functools.cache
def parameter_hook() -> type[WeakHook]:
    """Make the class of hooks that a parameter keeps, like `module_hook`: a backward may run inside of a compiled function."""

    class ParameterHook(WeakHook):
        __call__ = torch.compiler.disable(WeakHook.__call__, reason=BORDER)

    return ParameterHook


class WeakHook:
    """The same as a parameter keeps it. Python's garbage collector does not see what a parameter's hooks refer to, so a
    parameter must not own what owns it; modules keep `Hooks` alive."""

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._args = args

    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*self._args, *args)


def _no_hook() -> Callable[..., None]:
    return ignore


def ignore(*_: Any) -> None:
    """Do nothing."""


class Call:
    """A call of a module in a forward. It counts until its backward begins or its graph is dropped; recomputations never do."""

    def __init__(self, to_come: Counter[nn.Module], module: nn.Module, *, counted: bool) -> None:
        self._to_come = to_come
        self._module = module
        self._counted = counted
        to_come[module] += counted

    def begin(self) -> None:
        """Record that the call's backward begins."""
        self._to_come[self._module] -= self._counted
        self._counted = False

    def __del__(self) -> None:
        self.begin()


def units_at_rest(units: Mapping[nn.Module, Sequence[Unit]]) -> dict[nn.Module, list[Unit]]:
    """Return, for each module that has any, its units that are sharded at rest."""
    found = {module: [unit for unit in run if unit.sharded_at_rest] for module, run in units.items()}
    return {module: held for module, held in found.items() if held}


def owners(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return the modules that hold sharded parameters themselves, with those parameters' units."""
    unit_of = {entry.parameter: unit for unit in units if unit.sharded_at_rest for entry in unit.named}
    found = {}
    for module in model.modules():
        held = dict.fromkeys(unit_of[p] for p in module.parameters(recurse=False) if p in unit_of)
        if held:
            found[module] = list(held)
    return found


def refuse_transforms(units: Sequence[Unit]) -> None:
    """Raise if a unit must be gathered inside a transform of torch.func, which forbids writes to tensors from outside."""
    away = [unit for unit in units if unit.sharded_at_rest and unit.state is not UnitState.UNSHARDED]
    if away and in_transform():
        raise UsageError(
            f"{away[0].label} is sharded at rest, and runs inside of a transform of torch.func, where it cannot "
            "be gathered: use torch.autograd.grad, or Policy.stage(2) or below."
        )
