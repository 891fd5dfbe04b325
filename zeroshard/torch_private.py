"""Owns torch's private names: everything that this package uses and torch may change without notice.

Each is looked up when this module is imported, and tested if that takes microseconds. Rarely used names are looked up
at their first use. A name that is missing, or behaves differently, raises an error that names it. So another torch
fails at the first use of zeroshard, and not in the middle of a training.

Names that run often are torch's own objects under another name, or one plain call.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]
"""Names that other modules import from here, and that torch defines."""

SEEN_TO_WORK = ("2.11", "2.13")
"""Releases of torch on which all tests passed."""


def _find(name: str) -> Any:
    """Look a name up.

    Raises:
        UsageError: this torch has none.
    """
    found: Any = torch
    parts = name.split(".")
    for end, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join(parts[:end]))
            except ImportError:
                raise unfit(name, "is missing") from None
    return found


def unfit(name: str, how: str) -> UsageError:
    newest = SEEN_TO_WORK[-1]
    return UsageError(
        f"{name} {how} in torch {torch.__version__}, and zeroshard cannot work without it. It works with torch "
        f'{" and ".join(SEEN_TO_WORK)}: install one of these (pip install "torch=={newest}.*"), or report this message.'
    )


# ---------------------------------------------------------------- tensors

past_torch_function: Callable[[], AbstractContextManager[None, None]] = _find("torch._C.DisableTorchFunctionSubclass")
"""A context in which operations on parameters bypass their classes, which report reads to units.

torch's manual names it for authors of such classes, and torch exports no public one.
"""

disabled_torch_function: Any = _find("torch._C._disabled_torch_function_impl")
"""The `__torch_function__` of classes that do not override operations, such as `nn.Parameter`.

torch's manual names it, and torch exports no public one. Another function with the same result would make each operation slower:
torch looks for this very object.
"""

_make_wrapper = _find("torch.Tensor._make_wrapper_subclass")


def wrapper_tensor(cls: type[Tensor], size: torch.Size, **options: Any) -> Any:
    """Make a tensor of a class that has a shape and no memory. torch's manual names this function, and there is no
    public one.
    """
    return _make_wrapper(cls, size, **options)


_find("torch.Tensor._version")


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place.

    torch makes `increment_version` public, and no reader.
    """
    return tensor._version


_use_count = _find("torch._C._storage_Use_Count")


def storage_users(tensor: Tensor) -> int:
    """Return the number of objects that hold a tensor's memory, which may be freed if there is only one. torch has no
    public counter.
    """
    return int(_use_count(tensor.untyped_storage()._cdata))


def storage_id(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage among those that exist now.

    Python's identity of a storage's wrapper is not stable, and not every tensor has an address.

    Raises:
        RuntimeError, NotImplementedError: the tensor has no storage, such as one of torch.func.
    """
    return int(tensor.untyped_storage()._cdata)


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors begin at the same place of the same storage."""
    same = storage_id(one) == storage_id(other)
    return same and one.storage_offset() * one.itemsize == other.storage_offset() * other.itemsize


# Operations on many tensors in one launch, for accelerators. torch documents them, and gives none of them a public name.
foreach_copy_: Callable[..., None] = _find("torch._foreach_copy_")
foreach_norm: Callable[..., list[Tensor]] = _find("torch._foreach_norm")
foreach_mul_: Callable[..., None] = _find("torch._foreach_mul_")
foreach_add_: Callable[..., None] = _find("torch._foreach_add_")
foreach_sign_: Callable[..., None] = _find("torch._foreach_sign_")
foreach_lerp: Callable[..., list[Tensor]] = _find("torch._foreach_lerp")
foreach_lerp_: Callable[..., None] = _find("torch._foreach_lerp_")

GRAD: Any = torch.Tensor.grad
"""The slot of `tensor.grad`, past properties of subclasses. Its use dispatches to `__torch_function__`, as any operation's."""


def grad_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor that autograd or the user stored in `parameter.grad`."""
    with past_torch_function():
        gradient: Tensor | None = GRAD.__get__(parameter)
    return gradient


def forget_grad(parameter: Tensor) -> None:
    """Clear `parameter.grad` without notifying the parameter's owner."""
    with past_torch_function():
        GRAD.__set__(parameter, None)


# ---------------------------------------------------------------- DTensors

# Their modules take a second to import: code that has a DTensor has imported them already.


def distributed_class() -> type[nn.Parameter] | None:
    """Return the class of DTensors, or None if it was never imported, so that there are none."""
    found: type[nn.Parameter] | None = globals().get("DTensor")
    if found is None and _AT_FIRST_USE["DTensor"].rpartition(".")[0] in sys.modules:
        for name in ("_local_tensor", "_spec"):
            __getattr__(name)
        found = __getattr__("DTensor")
    return found


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    kind = distributed_class()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Any) -> Tensor:
    """Return the very tensor that a DTensor holds on this rank. `to_local()` makes another one, or a node of a graph."""
    local: Tensor = tensor._local_tensor
    return local


def writes_of(tensor: Any) -> int:
    """Return how often a DTensor was written to in place, itself or by `to_local()`, which only the local tensor
    counts.
    """
    return version_of(tensor) + version_of(tensor._local_tensor)


def show_local(tensor: Any, local: Tensor) -> None:
    """Set a DTensor's local tensor to another one of the same shape. Assigning its `data` does not."""
    tensor._local_tensor = local


def distributed_as(like: Any, local: Tensor) -> Tensor:
    """Make a DTensor, outside of graphs, that is distributed as another one is."""
    return distributed_by(like._spec, local)


def distribution_of(tensor: Any) -> Any:
    """Return all of a DTensor except its local tensor: mesh, placements, shape, strides, dtype. It may be shared."""
    return tensor._spec


def distributed_by(distribution: Any, local: Tensor) -> Tensor:
    """Make a DTensor, outside of graphs. `DTensor.from_local` is public, and takes ten times as long."""
    kind: Any = distributed_class()
    made: Tensor = kind(local, distribution, requires_grad=False)
    return made


def part_as(like: Any, gradient: Any) -> Tensor:
    """Return this rank's part of a DTensor, redistributed like another one. All ranks of the mesh must call it."""
    if gradient.placements != like.placements:
        gradient = gradient.detach().redistribute(placements=like.placements)
    local = local_of(gradient)
    # A collective's result may be a tensor that waits at the first operation on it; reading its memory is not one.
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)
    return local if wait is None else wait()


# ---------------------------------------------------------------- trees

# Trees of lists, dicts and types that libraries register with torch, such as outputs of transformers. Models take and return them.
# torch exports no public reader of its register.
tree_map: Callable[..., Any] = _find("torch.utils._pytree.tree_map")
tree_map_only: Callable[..., Any] = _find("torch.utils._pytree.tree_map_only")
tree_leaves: Callable[[Any], list[Any]] = _find("torch.utils._pytree.tree_leaves")
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _find("torch.utils._pytree.tree_flatten")
tree_unflatten: Callable[[list[Any], Any], Any] = _find("torch.utils._pytree.tree_unflatten")

# ---------------------------------------------------------------- modules


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module keeps its own parameters; writing to it replaces one, without other effects.

    `setattr` and `register_parameter` call hooks of the user's, and `get_parameter` takes another attribute for the parameter.
    """
    return module._parameters


def own_parts(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return the dicts in which modules keep their own parameters and the modules inside them, two for each module."""
    return [part for module in modules for part in (module._parameters, module._modules)]


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module keeps its own buffers, as `own_parameters` does."""
    return module._buffers


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether a state dict of a module holds the module's own buffer of this name. torch has no public way to ask."""
    return buffer not in module._non_persistent_buffers_set


def _make_first(hooks: Any, handle: RemovableHandle) -> None:
    if next(iter(hooks)) != handle.id:
        for other in [number for number in hooks if number != handle.id]:
            hooks[other] = hooks.pop(other)


def _make_last(hooks: Any, handle: RemovableHandle) -> None:
    if next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)


def make_outermost(module: nn.Module, first: RemovableHandle, last: RemovableHandle) -> None:
    """Move a pre-hook of a module's forward before all others, and a hook after all others.

    torch's `prepend=True` holds when a hook is registered: one that comes later may go around it.
    """
    _make_first(module._forward_pre_hooks, first)
    _make_last(module._forward_hooks, last)


def make_last(parameter: Tensor, handle: RemovableHandle) -> None:
    """Move a hook on a parameter's accumulated gradient after those that were registered later. torch has no public way."""
    _make_last(parameter._post_accumulate_grad_hooks, handle)


def make_innermost(optimizer: torch.optim.Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Move a hook before an optimizer's steps after all others, and a hook after steps before all others.

    torch has no public way.
    """
    _make_last(optimizer._optimizer_step_pre_hooks, before)
    _make_first(optimizer._optimizer_step_post_hooks, after)


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
    """Run the step of an optimizer's class without hooks, even if it calls the step of its base class.

    torch wraps each class's method with the hooks of the object and those of all optimizers, and has no public way around it.
    The wrapped function is an attribute of the wrapper, set by `functools.wraps`.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        return step(optimizer, *arguments)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def compiled_call_of(module: nn.Module) -> Any:
    """Return the compiled function of `module.compile()` that runs instead of `forward`, or None. torch has no public
    reader.
    """
    return module._compiled_call_impl


COMPILER_FILE = "_dynamo/eval_frame.py"
COMPILED_CALL = "compile_wrapper"


def runs_compiled(code: CodeType) -> bool:
    """Return whether code is that of torch.compile's wrapper around a compiled function, whose `self` has the options.

    torch has no public way to find out whether the running code was compiled.
    """
    return code.co_name == COMPILED_CALL and is_of_compiler(code)


def is_of_compiler(code: CodeType) -> bool:
    """Return whether code is in the file of torch's wrappers around functions that it compiles, or does not."""
    return code.co_filename.endswith(COMPILER_FILE)


# ---------------------------------------------------------------- autograd

_graph_task = _find("torch._C._current_graph_task_id")


def in_backward() -> bool:
    """Return whether this thread runs a backward. torch's checkpointing and FSDP2 use this, and there is no public way."""
    return bool(_graph_task() != -1)


_will_execute = _find("torch._C._will_engine_execute_node")


def backward_reaches(node: Node) -> bool:
    """Return whether the present backward will run a node. torch's checkpointing uses this, and there is no public way.

    Raises:
        RuntimeError: no backward runs, or it is one of `torch.autograd.grad` that ends in this node.
    """
    return bool(_will_execute(node))


_engine = _find("torch.autograd.Variable._execution_engine")
_find("torch.autograd.Variable._execution_engine.queue_callback")


def at_end_of_backward(callback: Callable[[], object]) -> None:
    """Call a function when the present backward ends. DDP and FSDP2 use this, and there is no public way."""
    _engine.queue_callback(callback)


_top_hooks = _find("torch._C._autograd._top_saved_tensors_default_hooks")


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None:
    """Return the innermost hooks on saved tensors, as `(pack, unpack)`: a unit's own hooks call them.

    torch makes entering and leaving public (`torch.autograd.graph.saved_tensors_hooks`), and no reader.
    """
    found: tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None = _top_hooks(True)
    return found


_refusal = _find("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message")


def refuses_saved_tensors_hooks() -> bool:
    """Return whether hooks on saved tensors would raise now. torch makes refusing them public, and no reader of it."""
    return _refusal() is not None


FUNCTION_APPLY: CodeType = _find("torch.autograd.Function.apply.__func__").__code__
"""The code object on the stack, seen from a hook, while an autograd function of Python saves its tensors.

torch passes no other sign of it to hooks.
"""


def has_tensor_hooks(parameter: Any) -> bool:
    """Return whether a user put hooks on its gradient (`register_hook`). There is no public way to ask."""
    return bool(parameter._backward_hooks)


_transform = _find("torch._C._functorch.peek_interpreter_stack")


def in_transform() -> bool:
    """Return whether a transform of torch.func runs, inside which no unit can be gathered. There is no public way to ask."""
    return _transform() is not None


_tracing = _find("torch._guards.TracingContext.try_get")


def is_traced() -> bool:
    """Return whether torch.compile is tracing.

    Its public functions are right in the code that it traces, but not in code that it calls meanwhile.
    """
    return _tracing() is not None


# ---------------------------------------------------------------- names that are looked up at their first use

_AT_FIRST_USE = {
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "_disable_modes": "torch.utils._python_dispatch._disable_current_modes",
    "_skip_code": "torch._dynamo.eval_frame.skip_code",
    "_local_tensor": "torch.distributed.tensor.DTensor._local_tensor",
    "_spec": "torch.distributed.tensor.DTensor._spec",
    "DTensor": "torch.distributed.tensor.DTensor",
}
"""The first two run a model without values, the third sees its operations. torch documents them, and gives them no public name.
`_skip_code` imports the compiler, which takes a second."""


def __getattr__(name: str) -> Any:
    """Look up one of these names at its first use (PEP 562)."""
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _find(_AT_FIRST_USE[name])
    return value


def outside_of_modes() -> AbstractContextManager[None, None]:
    """Leave all modes that intercept operations, for a while. torch makes only entering a mode public."""
    left: AbstractContextManager[None, None] = __getattr__("_disable_modes")()
    return left


def never_compiled(function: Callable[..., Any]) -> None:
    """Make torch.compile run a function without compiling it. Functions that it calls may still be compiled.

    `torch.compiler.disable` does that by a wrapper, which takes longer than a short hook.
    """
    __getattr__("_skip_code")(function.__code__)


import_module("zeroshard.torch_private_tests").run()  # it imports names that are defined above
