"""Owns the hooks that a user's modules and parameters keep, as torch.compile and copies of a model see them.

[Note: compiled models]
torch.compile traces Python code once and runs the result while its guards hold. They check the classes, dtypes and shapes of
tensors, and the number of a module's hooks. The effect of our hooks changes from step to step, so it never becomes part of a graph:

- No hook of ours is traced: a graph ends there.
- Modules inside a unit (a Linear of a block) have a hook of ours only while the unit is away (see `Away`), so a block is one graph.
- Parameters are of one class while a module that uses them is running (see `Appearance.begin_use`), so similar layers share one
  graph.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.context import FIRST_BATCH_NBYTES
from zeroshard.core.named_parameter import named_modules
from zeroshard.errors import UsageError
from zeroshard.torch_private import (
    COMPILED_CALL,
    HooksById,
    at_border,
    compiled_call_of,
    forward_hooks_of,
    is_of_compiler,
    tree_leaves,
)

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


_SAMPLED = 2**16
"""About the number of elements of a tensor of the first batch that are compared over ranks."""


class Hook:
    """A method that a module keeps as a hook. In a deep copy or a pickle of the module, the hook does nothing."""

    def __init__(self, method: Callable[..., None], *args: Any) -> None:
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> Any:
        return self._method(*self._args, *args)

    def __reduce__(self) -> Any:  # copy.deepcopy and pickle call it
        return getattr, (nullcontext(), "__exit__")  # it does nothing, and exists where zeroshard is not installed


class ForwardHook(Hook):
    """A hook with another method for calls from compiled code."""

    def __init__(self, method: Callable[..., None], in_compiled_code: Callable[..., None]) -> None:
        super().__init__(method)
        self._in_compiled_code = in_compiled_code

    def call_in_compiled_code(self, *args: Any) -> None:
        """Run the hook where compiled code calls it."""
        self._in_compiled_code(*args)


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


def digest_of(batch: Any) -> bytes:
    """Return a digest of the tensors in a batch, of a sample of each one's elements; zeros if it has no ordinary tensors.

    It waits for an accelerator.
    """
    digest = hashlib.blake2b(digest_size=FIRST_BATCH_NBYTES)
    is_empty = True
    for tensor in tree_leaves(batch):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        is_empty = False
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()
        try:
            digest.update(bytes(sample.view(torch.uint8).cpu().numpy()))
        except RuntimeError:  # inside a transform of torch.func, tensors have no values
            return bytes(FIRST_BATCH_NBYTES)
    return bytes(FIRST_BATCH_NBYTES) if is_empty else digest.digest()


_Kind = TypeVar("_Kind", Hook, WeakHook)


@functools.cache
def untraced(kind: type[_Kind], reason: str = BORDER) -> type[_Kind]:
    """Return a subclass of `kind` that torch.compile does not trace: its graph breaks there, by default at a unit's border.

    Parameters' hooks need it too, since a backward may run inside a compiled function. The class is created at its
    first use, which imports the compiler and takes a second.
    """
    in_compiled_code = getattr(kind, "call_in_compiled_code", None)
    return type(kind.__name__, (kind,), {"__call__": at_border(kind.__call__, reason, in_compiled_code)})


class Away:
    """The hooks of a unit that its modules have only while its values are not here, or may leave before they are read again.

    They gather the unit for a module that is called by itself. In a module's usual call they would have nothing to do, and cost
    each step some microseconds for each module.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[HooksById, int, Hook]] = []
        self._handles: list[RemovableHandle] = []
        self._are_attached = False

    def add(self, module: nn.Module, hook: Hook, *, is_away: bool) -> None:
        """Add a hook that runs before a module's forward, before all other hooks: weight_norm and the like read parameters."""
        handle = module.register_forward_pre_hook(hook, prepend=True)
        hooks, _ = forward_hooks_of(module)
        self._handles.append(handle)
        self._hooks.append((hooks, handle.id, hook))
        if is_away:
            self._are_attached = True
        else:
            del hooks[handle.id]

    def begin(self) -> None:
        """Attach the hooks: the values leave."""
        self._are_attached = True
        for hooks, number, hook in self._hooks:
            hooks[number] = hook
            hooks.move_to_end(number, last=False)

    def end(self) -> None:
        """Detach the hooks: the values are here."""
        if self._are_attached:
            for hooks, number, _ in self._hooks:
                hooks.pop(number, None)
            self._are_attached = False

    def remove(self) -> None:
        """Forget the hooks."""
        self._hooks.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


# ---------------------------------------------------------------------- the callers of a module


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether torch.compile returned this module, whose hooks run before its compiled code."""
    return _WRAPPER in vars(module)


def refuse_cuda_graphs_of_callers(module: nn.Module) -> None:
    """Raise if compiled code that runs a module was compiled with CUDA graphs.

    The frames of torch.compile's wrappers have the options. A compiled step, or a wrapper that the user calls, leaves no mark on
    the module.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == COMPILED_CALL and is_of_compiler(frame.f_code):
            config = getattr(frame.f_locals.get("self"), "compiler_config", None)
            _refuse_cuda_graphs(config, f"what runs this {type(module).__name__}")
        frame = frame.f_back


def refuse_cuda_graphs(model: nn.Module) -> None:
    """Raise if a module was compiled with CUDA graphs."""
    for fqn, module in named_modules(model):
        for compiled in (module, compiled_call_of(module)):
            get = getattr(compiled, _WRAPPER, None)
            if get is not None:
                _refuse_cuda_graphs(get(), fqn or "the model")


def _refuse_cuda_graphs(config: Any, label: str) -> None:
    if isinstance(config, Mapping) and config.get("triton.cudagraphs"):
        raise UsageError(_CUDA_GRAPHS.format(label))
