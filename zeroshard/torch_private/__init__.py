"""Owns torch's private names: every name that zeroshard uses and torch may change without notice.

torch does not have public equivalents of these names, unless a docstring names one.

Each name is declared with the features that need it. Most names are looked up when this module is imported, rarely used
ones at their first use. If torch lacks a name, importing zeroshard still works, and so does every feature that does not
need the name. The others raise an error that names the feature: `shard` for what every step needs (`require`),
otherwise the first use. tests/project/test_torch_private.py checks that the names behave as zeroshard expects.

Names on hot paths are torch's own objects under another name, or one plain call.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import StrEnum
from functools import cache, partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]
"""torch names that other modules import from here."""

SEEN_TO_WORK = ("2.11", "2.13", "2.14", "2.15")
"""The torch releases on which all quick tests passed."""


class Feature(StrEnum):
    """A feature that needs private names of torch, as errors call it."""

    SHARDING = "zeroshard"
    """What every step needs."""
    STAGE_3 = "ZeRO stage 3"
    TENSOR_PARALLELISM = "sharding of DTensors (tensor parallelism)"
    GRADIENT_NORMS = "a norm of gradients on an accelerator"
    LION = "the optimizer Lion"
    LOAD_HOOKS = "ZeroRedundancyOptimizer.load_state_dict"
    SAVED_BUFFERS = "saving and loading of a model's buffers"
    DISTRIBUTED_STATE = "DistributedState"
    CONVERTED_INPUTS = "sharded_init, or fp16.auto_cast,"
    ACTIVATION_CHECKPOINTING = "zeroshard's activation checkpointing"
    SEQUENCE_TILES = "sequence tiling"
    PLAN = "zeroshard.plan"


_Declared = TypeVar("_Declared", bound=Callable[..., Any])

_lacking: dict[Feature, str] = {}
"""For each feature that cannot work, the first name that this torch lacks."""


def unfit(name: str, feature: Feature) -> UsageError:
    """Return the error about a feature that needs a private name which this torch lacks."""
    newest = SEEN_TO_WORK[-1]
    return UsageError(
        f"{name} is missing in torch {torch.__version__}, and {feature} cannot work without it. zeroshard works with torch "
        f'{", ".join(SEEN_TO_WORK)}: install one of these (pip install "torch=={newest}.*"), or report this message.'
    )


def require(feature: Feature) -> None:
    """Raise an error if torch lacks a name that was looked up and that a feature needs.

    Raises:
        UsageError: the feature cannot work with this torch.
    """
    if feature is Feature.SHARDING and not _has_compiled_call():
        raise unfit(f"{COMPILED_CALL} of {COMPILER_FILE}", feature)
    if feature in _lacking:
        raise unfit(_lacking[feature], feature)


class _Missing:
    """A stand-in for what torch lacks. Its call raises the error."""

    def __init__(self, name: str, feature: Feature) -> None:
        self._name = name
        self._feature = feature

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise unfit(self._name, self._feature)


class _Sample(torch.optim.Optimizer):
    """An optimizer without parameters, which does not import torch's compiler. Creating one of torch's does."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(param_group)


_SAMPLES: dict[str, object] = {"torch.nn.Module": nn.Module(), "torch.optim.Optimizer": _Sample([{"params": []}], {})}
"""Instances of classes whose attributes only instances have."""


def _look_up(name: str) -> Any:
    """Return the object with a full name. Raise AttributeError if this torch does not have it."""
    owner, _, last = name.rpartition(".")
    if owner in _SAMPLES:
        return getattr(_SAMPLES[owner], last)
    found: Any = torch
    parts = name.split(".")
    for end, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join(parts[:end]))
            except ImportError:
                raise AttributeError(name) from None
    return found


def _find(name: str, *features: Feature) -> Any:
    """Return the object with a full name. If torch lacks it, note what cannot work, and return a stand-in that raises."""
    try:
        return _look_up(name)
    except AttributeError:
        for feature in features:
            _lacking.setdefault(feature, name)
        return _Missing(name, features[0])


def _uses(feature: Feature, *names: str) -> Callable[[_Declared], _Declared]:
    """Declare the attributes that a function reads. If torch lacks one, a stand-in that raises replaces the function."""

    def declare(function: _Declared) -> _Declared:
        for name in names:
            found = _find(name, feature)
            if isinstance(found, _Missing):
                return found  # type: ignore[return-value]
        return function

    return declare


# ---------------------------------------------------------------- tensors

past_torch_function: Callable[[], AbstractContextManager[None, None]] = _find(
    "torch._C.DisableTorchFunctionSubclass", Feature.SHARDING
)
"""A context in which operations on parameters bypass their classes, which report reads to units.

torch's manual recommends it to authors of such classes.
"""

disabled_torch_function: Any = _find("torch._C._disabled_torch_function_impl", Feature.STAGE_3)
"""The `__torch_function__` of classes that do not override operations, such as `nn.Parameter`.

A function of our own would make each operation slower, since torch has a fast path for this object.
"""

wrapper_tensor: Callable[..., Any] = _find(
    "torch.Tensor._make_wrapper_subclass", Feature.STAGE_3, Feature.DISTRIBUTED_STATE
)
"""Create a tensor of a class, with a shape but without memory."""


_find("torch.Tensor._version", Feature.SHARDING)
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written to in place. torch has a public `increment_version`, but no reader."""


_use_count = _find("torch._C._storage_Use_Count", Feature.SHARDING)


def storage_users(tensor: Tensor) -> int:
    """Return the number of objects that hold a tensor's memory."""
    return int(_use_count(tensor.untyped_storage()._cdata))


_find("torch.UntypedStorage._cdata", Feature.SHARDING)
number_of_storage: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return a number that identifies a storage among those that exist now.

The identity of the storage's Python wrapper is not stable, and some tensors have no address.
"""


def storage_id(tensor: Tensor) -> int:
    """Return the number of a tensor's storage.

    Raises:
        RuntimeError, NotImplementedError: the tensor has no storage, like tensors inside torch.func transforms.
    """
    return number_of_storage(tensor.untyped_storage())


def held_in_python(tensors: Sequence[Tensor]) -> set[int]:
    """Return the numbers of these tensors' storages that further tensors in Python hold, and not only graphs.

    It looks at all objects of the process: tenths of a second.
    """
    numbers = {storage_id(one) for one in tensors}
    own = {id(one) for one in tensors}
    found = set[int]()
    with past_torch_function():
        for one in gc.get_objects():
            if issubclass(type(one), Tensor) and id(one) not in own:
                with suppress(RuntimeError, NotImplementedError):  # it has no storage
                    found.add(storage_id(one))
    return found & numbers


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors begin at the same position of the same storage."""
    same = storage_id(one) == storage_id(other)
    return same and one.storage_offset() * one.itemsize == other.storage_offset() * other.itemsize


# Operations on many tensors in one launch. torch documents them.
foreach_copy_: Callable[..., None] = _find("torch._foreach_copy_", Feature.SHARDING)
foreach_norm: Callable[..., list[Tensor]] = _find("torch._foreach_norm", Feature.GRADIENT_NORMS)
foreach_mul_: Callable[..., None] = _find("torch._foreach_mul_", Feature.GRADIENT_NORMS, Feature.LION)
foreach_add_: Callable[..., None] = _find("torch._foreach_add_", Feature.LION)
foreach_sign_: Callable[..., None] = _find("torch._foreach_sign_", Feature.LION)
foreach_lerp: Callable[..., list[Tensor]] = _find("torch._foreach_lerp", Feature.LION)
foreach_lerp_: Callable[..., None] = _find("torch._foreach_lerp_", Feature.LION)

GRAD: Any = torch.Tensor.grad
"""The descriptor of `tensor.grad`, without properties of subclasses. It dispatches to `__torch_function__`."""


def grad_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor that autograd or the user stored in `parameter.grad`."""
    with past_torch_function():
        gradient: Tensor | None = GRAD.__get__(parameter)
    return gradient


def forget_grad(parameter: Tensor) -> None:
    """Clear `parameter.grad` without notifying the parameter's owner."""
    with past_torch_function():
        GRAD.__set__(parameter, None)


def grads_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return, as `grad_of` does, the gradients of many parameters."""
    get = GRAD.__get__
    with past_torch_function():
        return [get(parameter) for parameter in parameters]


def forget_grads(parameters: Iterable[Tensor]) -> None:
    """Clear, as `forget_grad` does, the gradients of many parameters."""
    get = GRAD.__get__
    put = GRAD.__set__
    with past_torch_function():
        for parameter in parameters:
            if get(parameter) is not None:
                put(parameter, None)


NEW_PARAMETER = nn.Parameter.__new__.__code__
"""The code of `nn.Parameter(tensor)`. If it calls `detach`, it wants a tensor of the same class."""


def let_parameters_be_made(cls: type[nn.Parameter], ordinary: type[nn.Parameter]) -> None:
    """Let `nn.Parameter(one)` of a parameter of class `cls` return one of class `ordinary`, over the same memory.

    For a subclass, torch asks `detach` for a tensor of the same class, and then sets `_is_param`.
    """

    def detach(self: nn.Parameter) -> Tensor:
        detached = Tensor.detach(self)
        if not is_traced() and sys._getframe(1).f_code is NEW_PARAMETER:
            return Tensor._make_subclass(type(self), detached)  # type: ignore[arg-type]
        return detached

    def become_ordinary(self: nn.Parameter, _: bool) -> None:
        self.__class__ = ordinary

    cls.detach = detach  # type: ignore[method-assign, assignment]
    cls._is_param = property(lambda _: True, become_ordinary)  # type: ignore[attr-defined, assignment]


# ---------------------------------------------------------------- DTensors

# Importing their modules takes a second. Code that has a DTensor has already imported them.


def distributed_class() -> type[nn.Parameter] | None:
    """Return the class of DTensors, or None if it was never imported, so that none can exist."""
    found: type[nn.Parameter] | None = globals().get("DTensor")
    if found is None and "torch.distributed.tensor" in sys.modules:
        found = __getattr__("DTensor")
        for name in ("torch.distributed.tensor.DTensor._local_tensor", "torch.distributed.tensor.DTensor._spec"):
            _find(name, Feature.TENSOR_PARALLELISM)
    return found


def is_distributed(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor. Raise UsageError if it is one and this torch's DTensors are unsuitable."""
    kind = distributed_class()
    if kind is None or not isinstance(tensor, kind):
        return False
    require(Feature.TENSOR_PARALLELISM)
    return True


def local_of(tensor: Any) -> Tensor:
    """Return the tensor object that a DTensor holds on this rank. `to_local()` returns a new one, or a graph node."""
    local: Tensor = tensor._local_tensor
    return local


def writes_of(tensor: Any) -> int:
    """Return how often a DTensor or its `to_local()` was written to in place. Each counts its own writes."""
    return version_of(tensor) + version_of(tensor._local_tensor)


def show_local(tensor: Any, local: Tensor) -> None:
    """Replace a DTensor's local tensor with another one of the same shape, which assigning `data` does not do."""
    tensor._local_tensor = local


def distribution_of(tensor: Any) -> Any:
    """Return a DTensor's mesh, placements, shape, strides and dtype, as one object that DTensors may share."""
    return tensor._spec


def distributed_by(distribution: Any, local: Tensor) -> Tensor:
    """Create a DTensor with the given distribution, without autograd. The public `DTensor.from_local` takes ten times as long."""
    kind: Any = distributed_class()
    made: Tensor = kind(local, distribution, requires_grad=False)
    return made


def part_as(like: Any, gradient: Any) -> Tensor:
    """Return this rank's part of a DTensor, redistributed like another DTensor. All ranks of the mesh must call it."""
    if gradient.placements != like.placements:
        gradient = gradient.detach().redistribute(placements=like.placements)
    local = local_of(gradient)
    # A collective's result may be a tensor that waits at its first operation. Reading its memory would not wait.
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)
    return local if wait is None else wait()


# ---------------------------------------------------------------- trees

# Inputs and outputs of models: trees of lists, dicts and types that libraries register with torch, such as transformers'
# outputs. torch has no public functions on such trees.
tree_map: Callable[..., Any] = _find("torch.utils._pytree.tree_map", Feature.CONVERTED_INPUTS)
tree_map_only: Callable[..., Any] = _find("torch.utils._pytree.tree_map_only", Feature.PLAN)
tree_leaves: Callable[[Any], list[Any]] = _find("torch.utils._pytree.tree_leaves", Feature.SHARDING)
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _find(
    "torch.utils._pytree.tree_flatten", Feature.ACTIVATION_CHECKPOINTING
)
tree_unflatten: Callable[[list[Any], Any], Any] = _find(
    "torch.utils._pytree.tree_unflatten", Feature.ACTIVATION_CHECKPOINTING
)

# ---------------------------------------------------------------- modules


@_uses(Feature.SHARDING, "torch.nn.Module._parameters")
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters. Writing to it replaces a parameter without other effects.

    `setattr` and `register_parameter` call the user's hooks, and `get_parameter` may return another attribute.
    """
    return module._parameters


@_uses(Feature.SHARDING, "torch.nn.Module._parameters", "torch.nn.Module._modules")
def own_parts(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Return two dicts for each module: its own parameters, and its submodules."""
    return [part for module in modules for part in (module._parameters, module._modules)]


@_uses(Feature.SAVED_BUFFERS, "torch.nn.Module._buffers")
def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict of a module's own buffers, like `own_parameters`."""
    return module._buffers


@_uses(Feature.SAVED_BUFFERS, "torch.nn.Module._non_persistent_buffers_set")
def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether the state dict has a module's own buffer of this name."""
    return buffer not in module._non_persistent_buffers_set


HooksById = OrderedDict[int, Callable[..., Any]]
"""The hooks of one kind of a module, a parameter or an optimizer, by the `id` of their handles, in the order of their calls."""


def keep_first(hooks: HooksById, handle: RemovableHandle) -> None:
    """Move a hook before all others. torch's `prepend=True` sets the order only at registration."""
    if next(iter(hooks)) != handle.id:
        hooks.move_to_end(handle.id, last=False)


def keep_last(hooks: HooksById, handle: RemovableHandle) -> None:
    """Move a hook behind all others."""
    if next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)  # autograd does not see the order that `move_to_end` makes


@_uses(Feature.SHARDING, "torch.nn.Module._forward_pre_hooks", "torch.nn.Module._forward_hooks")
def forward_hooks_of(module: nn.Module) -> tuple[HooksById, HooksById]:
    """Return the hooks that torch calls before and after a module's forward. An entry that is taken out is not called."""
    return module._forward_pre_hooks, module._forward_hooks  # type: ignore[return-value]


@_uses(Feature.SHARDING, "torch.Tensor._post_accumulate_grad_hooks")
def gradient_hooks_of(parameter: Tensor) -> HooksById:
    """Return a parameter's post-accumulate-grad hooks."""
    return parameter._post_accumulate_grad_hooks  # type: ignore[return-value]


@_uses(
    Feature.SHARDING,
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.optim.Optimizer._optimizer_step_post_hooks",
)
def make_innermost(optimizer: torch.optim.Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Move one of an optimizer's step pre-hooks after all others, and one of its step post-hooks before all others."""
    keep_last(optimizer._optimizer_step_pre_hooks, before)  # type: ignore[arg-type]
    keep_first(optimizer._optimizer_step_post_hooks, after)  # type: ignore[arg-type]


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
    """Run the step of an optimizer's class without the optimizer's own hooks, even if that step calls a base class's step.

    torch wraps each class's `step` so that it runs the optimizer's own hooks and the global hooks, and has no public
    way around them. `functools.wraps` stores the wrapped function in the wrapper. Global hooks still run if the step
    calls a base class's `step` that torch has wrapped too.
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


@_uses(
    Feature.LOAD_HOOKS,
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks",
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks",
)
def load_with_hooks(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Call `load` on a state dict, with the optimizer's own hooks for `load_state_dict` before and after it.

    torch runs them only in its own `load_state_dict`, which loads whole parameters' states.
    """
    state_dict = dict(state_dict)  # hooks may change it
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    load(state_dict)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


@_uses(Feature.SHARDING, "torch.nn.Module._compiled_call_impl")
def compiled_call_of(module: nn.Module) -> Any:
    """Return the function that `module.compile()` runs instead of `forward`, or None."""
    return module._compiled_call_impl


COMPILER_FILE = "_dynamo/eval_frame.py"
COMPILED_CALL = "compile_wrapper"
"""The name, in COMPILER_FILE, of torch.compile's wrapper around a compiled function. Its `self` has the options."""


@cache
def _has_compiled_call() -> bool:
    """Look into the source file, if there is one, since importing the compiler takes a second.

    Without this name, the code that hooks run in would look uncompiled when it is not.
    """
    source = Path(torch.__file__).parent / COMPILER_FILE
    return not source.is_file() or f"def {COMPILED_CALL}(" in source.read_text(encoding="utf-8")


def is_of_compiler(code: CodeType) -> bool:
    """Return whether code is from the file with torch.compile's wrappers, whether or not it wraps a compiled function."""
    return code.co_filename.endswith(COMPILER_FILE)


# ---------------------------------------------------------------- autograd

_graph_task = _find("torch._C._current_graph_task_id", Feature.SHARDING)


def in_backward() -> bool:
    """Return whether this thread is running a backward. torch's checkpointing and FSDP2 use the same private name."""
    return bool(_graph_task() != -1)


backward_reaches: Callable[[Node], bool] = _find("torch._C._will_engine_execute_node", Feature.SHARDING)
"""Return whether the current backward will run a node. torch's checkpointing uses the same private name.

Raises:
    RuntimeError: no backward is running, or it is a `torch.autograd.grad` that ends in this node.
"""

at_end_of_backward: Callable[[Callable[[], object]], None] = _find(
    "torch.autograd.Variable._execution_engine.queue_callback", Feature.SHARDING
)
"""Call a function when the current backward ends. DDP and FSDP2 use the same private name."""


_top_hooks = _find("torch._C._autograd._top_saved_tensors_default_hooks", Feature.STAGE_3)


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None:
    """Return the innermost hooks on saved tensors as `(pack, unpack)`, or None. A unit's own hooks call these hooks.

    torch has a public context that sets such hooks (`torch.autograd.graph.saved_tensors_hooks`), but no reader.
    """
    found: tuple[Callable[[Tensor], Any], Callable[[Any], Any]] | None = _top_hooks(True)
    return found


_refusal = _find("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", Feature.STAGE_3)


def refuses_saved_tensors_hooks() -> bool:
    """Return whether hooks on saved tensors would raise now. torch can disable them publicly, but has no reader."""
    return _refusal() is not None


@_uses(Feature.SEQUENCE_TILES, "torch.Tensor._backward_hooks")
def has_tensor_hooks(parameter: Any) -> bool:
    """Return whether a parameter has hooks from `register_hook`."""
    return bool(parameter._backward_hooks)


_transform = _find("torch._C._functorch.peek_interpreter_stack", Feature.STAGE_3)


def in_transform() -> bool:
    """Return whether a torch.func transform is running, in which units cannot be gathered."""
    return _transform() is not None


_of_thread = _find("torch._guards._TLS", Feature.SHARDING)


is_traced: Callable[[], object] = partial(getattr, _of_thread, "tracing_context", None)
"""Return an object while torch.compile is tracing on this thread, otherwise None. Each read of a gradient asks.

torch's public functions are correct in traced code, but not in code that the compiler calls while it traces.
"""


_profiles = _find("torch.autograd._profiler_enabled", Feature.SHARDING)
_UNLABELLED = nullcontext()


def labelled(label: str) -> AbstractContextManager[object]:
    """Return a context that a profiler shows as a range with this label. Without a profiler, it is one shared object.

    `torch.profiler.record_function` is public, but takes 4 microseconds without a profiler, too.
    """
    return torch.profiler.record_function(label) if _profiles() else _UNLABELLED


# ---------------------------------------------------------------- names that are looked up at their first use

_AT_FIRST_USE: dict[str, tuple[str, Feature]] = {
    "FakeTensor": ("torch._subclasses.fake_tensor.FakeTensor", Feature.PLAN),
    "FakeTensorMode": ("torch._subclasses.fake_tensor.FakeTensorMode", Feature.PLAN),
    "TorchDispatchMode": ("torch.utils._python_dispatch.TorchDispatchMode", Feature.PLAN),
    "below_modes": ("torch._C._DisableTorchDispatch", Feature.PLAN),
    "inside_of_kernels": ("torch._subclasses.fake_tensor.in_kernel_invocation_manager", Feature.PLAN),
    "_make_subclass": ("torch.Tensor._make_subclass", Feature.PLAN),
    "_disable_modes": ("torch.utils._python_dispatch._disable_current_modes", Feature.PLAN),
    "_FakeStore": ("torch.testing._internal.distributed.fake_pg.FakeStore", Feature.PLAN),
    "DTensor": ("torch.distributed.tensor.DTensor", Feature.SHARDING),
    # These import the compiler, which takes a second.
    "_skip_code": ("torch._dynamo.eval_frame.skip_code", Feature.SHARDING),
    "_compiler_in_force": ("torch._C._dynamo.eval_frame.get_eval_frame_callback", Feature.SHARDING),
}
"""The full names of torch's objects and the features that need them, by their names in this module."""


def __getattr__(name: str) -> Any:
    """Look up one of these names at its first use (PEP 562).

    Raises:
        UsageError: this torch does not have the name.
    """
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    full_name, feature = _AT_FIRST_USE[name]
    try:
        value = globals()[name] = _look_up(full_name)
    except AttributeError:
        raise unfit(full_name, feature) from None
    return value


def outside_of_modes() -> AbstractContextManager[None, None]:
    """Return a context manager that disables torch's active dispatch modes, such as FakeTensorMode."""
    left: AbstractContextManager[None, None] = __getattr__("_disable_modes")()
    return left


def maker_of_fakes(mode: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a FakeTensor of a tensor on the meta device, in a fifth of the time that its class takes.

    The class sets 20 attributes one by one. They are the same for all these tensors.
    """
    cls = __getattr__("FakeTensor")
    make: Callable[..., Tensor] = __getattr__("_make_subclass")
    attributes = vars(cls(mode, torch.empty(0, device="meta"), device))

    def fake(tensor: Tensor) -> Tensor:
        made = make(cls, tensor, dispatch_device=True, device_for_backend_keys=device)
        vars(made).update(attributes)
        return made

    return fake


def fake_store() -> Any:
    """Return a store for the process group "fake", whose ranks do not exist, and register this backend with torch."""
    return __getattr__("_FakeStore")()


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function such that torch.compile runs it uncompiled. Functions that it calls may still be compiled.

    The wrapper of `torch.compiler.disable` takes longer than a short hook.
    """
    __getattr__("_skip_code")(function.__code__)
    return function


def at_border(
    function: Callable[..., Any], reason: str, in_compiled_code: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the function such that torch.compile neither traces it nor compiles what it calls: a graph ends there.

    `torch.compiler.disable` does the same, but takes longer than a short hook, even where nothing is compiled.

    Args:
        reason: torch's reason for the end of the graph.
        in_compiled_code: runs instead of the function where compiled code calls it; default: the function.
    """
    compiles: Callable[[], object] = __getattr__("_compiler_in_force")
    uncompiled: Callable[..., Any] = torch.compiler.disable(in_compiled_code or function, reason=reason)

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if compiles() is None else uncompiled(*args, **kwargs)

    never_compiled(run)
    # The marks of `torch.compiler.disable`, which the compiler looks for.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return run
