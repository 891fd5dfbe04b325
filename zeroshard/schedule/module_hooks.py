"""Owns the hooks that a user's modules and parameters keep, as torch.compile and copies of a model see them.

[Note: compiled models]
torch.compile traces Python code once and runs the result while its guards hold. They check the classes, dtypes and shapes of
tensors, and the number of a module's hooks. The effect of our hooks changes from step to step, so it never becomes part of a graph:

- Hooks of a unit's own module run at its border. torch.compile does not trace into them: a graph ends there.
- Hooks of the parts inside (a Linear of a block) do nothing while the unit is whole: the graph skips them, and a block is
  one graph. torch's guards check this: a parameter without values is of a different class, so torch traces the code again.
- Parameters are of one class while a module that uses them is running (see `Appearance.begin_use`), so similar layers share one
  graph.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.schedule.unit import Unit, UnitState
from zeroshard.torch_private import COMPILED_CALL, compiled_call_of, in_transform, is_of_compiler, own_parameters

BORDER = (
    "zeroshard gathers a unit's parameters here, which no graph may contain. For fullgraph=True compile the "
    "units one by one (model.blocks[i] = torch.compile(model.blocks[i], fullgraph=True)); else leave fullgraph out"
)
"""torch logs this reason if a graph ends at a border, and raises an error with it if none may end there (fullgraph)."""

_CUDA_GRAPHS = (
    "{} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'). A replay overwrites what the one "
    "before it gave out, gradients that are still being reduced among them, and reads parameters where they once were. "
    "Compile with mode='max-autotune-no-cudagraphs', or the default."
)
_WRAPPER = "get_compiler_config"
"""A public attribute of each function that torch.compile returns: a function that returns the options."""
_NEAREST = 12
"""If compiled code runs a unit, torch.compile's wrapper is within this many frames of the unit's hook."""


class Hook:
    """A method that a module keeps as a hook. In a deep copy or a pickle of the module, the hook does nothing."""

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> Any:
        return self._method(*self._args, *args)

    def __reduce__(self) -> Any:  # copy.deepcopy and pickle call it
        return getattr, (nullcontext(), "__exit__")  # it does nothing, and exists where zeroshard is not installed


class WeakHook:
    """A method that a parameter keeps as a hook, without a reference to the method's object.

    Python's garbage collector does not see references from a parameter's hooks, so these must not lead back to the parameter.
    Modules keep `Hooks` alive.
    """

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._args = args

    def __call__(self, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(*self._args, *args)


_Kind = TypeVar("_Kind", Hook, WeakHook)


@functools.cache
def untraced(kind: type[_Kind], reason: str = BORDER) -> type[_Kind]:
    """Return a subclass of `kind` that torch.compile does not trace: its graph breaks there, by default at a unit's border.

    Parameters' hooks need it too, since a backward may run inside a compiled function. The class is created at its
    first use: torch.compiler.disable imports the compiler, which takes a second.
    """
    call = torch.compiler.disable(kind.__call__, reason=reason)
    return type(kind.__name__, (kind,), {"__call__": call})


class Part:
    """A module inside a unit, which may be called by itself.

    Attributes:
        units: the units of its own parameters that are sharded at rest.
        whole_class: the class of parameters that have their values.
        gathered: the units that a call has gathered, and that its end reshards.
        is_open: whether there are such units. Compiled code reads it: torch guards on such an attribute.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.whole_class = units[0].appearance.whole_class
        self.gathered: Sequence[Unit] = ()
        self.is_open = False

    def close(self) -> Sequence[Unit]:
        """End the call. Return the units that it has gathered."""
        gathered = self.gathered
        self.gathered = ()
        self.is_open = False
        return gathered


@functools.cache
def part_hooks() -> tuple[type[Hook], type[Hook]]:
    """Return two hook classes, constructed as `(method, part)`: for before and after the forward of a module inside a unit.

    torch.compile skips them while they have nothing to do.

    torch.compile also compiles a hook by itself, if no graph contains the call of the part's module. So hooks may read only
    values that torch guards on: the classes of parameters, and a plain attribute.
    """
    run = torch.compiler.disable(Hook.__call__, reason=BORDER)

    class PartHook(Hook):
        def __init__(self, method: Callable[..., None], part: Part) -> None:
            super().__init__(method)
            self.part = part

    class Before(PartHook):
        def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():
                own = [parameter for parameter in own_parameters(module).values() if parameter is not None]
                if all(type(parameter) is self.part.whole_class for parameter in own):
                    return
            run(self, module, args, kwargs)

    class After(PartHook):
        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_dynamo_compiling() or self.part.is_open:
                run(self, module, args, output)

    return Before, After


# ---------------------------------------------------------------------- the callers of a module


def is_compiled(module: nn.Module, *, all_callers: bool) -> bool:
    """Return whether compiled code is running a module, no matter when, or around which code, `torch.compile` was called.

    Only the stack shows it. Inside our hooks `torch.compiler.is_compiling()` is False, and torch.compile's callback for frames is
    off, since it must not trace them. A compiled step, or a wrapper that the user calls, leaves no mark on the module, and torch
    does not report new wrappers. The wrapper's frame also has the options, some of which are refused.

    Args:
        module: the running module.
        all_callers: whether to search the whole stack instead of only the nearest frames. 40 frames take 3 microseconds, the
            nearest take 1.

    Raises:
        UsageError: the module was compiled with CUDA graphs.
    """
    found = _WRAPPER in module.__dict__
    frame: FrameType | None = sys._getframe(1)
    distance = 0
    while frame is not None and (all_callers or distance < _NEAREST):
        if frame.f_code.co_name == COMPILED_CALL and is_of_compiler(frame.f_code):
            config = getattr(frame.f_locals.get("self"), "compiler_config", None)
            _refuse_cuda_graphs(config, f"what runs this {type(module).__name__}")
            found = True
        frame = frame.f_back
        distance += 1
    return found


def refuse_cuda_graphs(model: nn.Module) -> None:
    """Raise if a module was compiled with CUDA graphs."""
    for fqn, module in model.named_modules():
        for compiled in (module, compiled_call_of(module)):
            get = getattr(compiled, _WRAPPER, None)
            if get is not None:
                _refuse_cuda_graphs(get(), fqn or "the model")


def _refuse_cuda_graphs(config: Any, label: str) -> None:
    if isinstance(config, Mapping) and config.get("triton.cudagraphs"):
        raise UsageError(_CUDA_GRAPHS.format(label))


def refuse_distributed_units(module: nn.Module, units: Iterable[Unit]) -> None:
    """Raise if units have DTensors: torch.compile describes these by their local tensors, whose memory belongs to a unit.

    Args:
        module: the module that runs in compiled code.
    """
    for unit in units:
        if unit.named[0].is_distributed:
            raise UsageError(
                f"{unit.named[0].fqn} is a DTensor, and {type(module).__name__} runs inside torch.compile, which "
                "cannot describe sharded DTensors: leave out torch.compile or tensor parallelism."
            )


def refuse_transforms(units: Sequence[Unit]) -> None:
    """Raise if a unit must be gathered where its memory may not change: in a torch.func transform, or in torch.jit.trace."""
    sharded = [unit for unit in units if unit.sharded_at_rest and unit.state is not UnitState.UNSHARDED]
    if sharded and torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UsageError(
            f"{sharded[0].label} is sharded at rest, and torch.jit.trace would record placeholders. Call it on a "
            "copy.deepcopy(model), or call it, save and run its result inside `with zeroshard.unsharded(model):`."
        )
    if sharded and in_transform():
        raise UsageError(
            f"{sharded[0].label} is sharded at rest, and runs inside of a transform of torch.func, where it cannot "
            "be gathered: use torch.autograd.grad, or Policy.stage(2) or below."
        )
