"""Owns the tests of torch's private names, which run when `torch_private` is imported.

No test uses an accelerator, runs a backward or reads a tensor's value, so each takes microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard.torch_private as own

_TESTS: dict[str, Callable[[], bool]] = {}
"""The tests, by the private name that each test uses."""


def _tests(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Return a decorator that registers a test, which returns whether a private name behaves as torch_private requires."""

    def register(test: Callable[[], bool]) -> Callable[[], bool]:
        _TESTS[name] = test
        return test

    return register


def _asks(name: str, question: Callable[[], object]) -> None:
    """Register a call that must not raise. Its result is not checked."""

    def test() -> bool:
        question()
        return True

    _TESTS[name] = test


class _Optimizer(torch.optim.Optimizer):
    """An optimizer that does not import torch's compiler, which takes a second. Creating one of torch's does."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(param_group)

    def step(self, closure: Any = None) -> Any:
        """Change nothing."""


def _optimizer() -> torch.optim.Optimizer:
    return _Optimizer([nn.Parameter(torch.empty(0, device="cpu"))], {})


_asks("torch.nn.Module._buffers", lambda: own.own_buffers(nn.Module()))
_asks("torch.nn.Module._forward_pre_hooks", lambda: nn.Module()._forward_pre_hooks)
_asks("torch.optim.Optimizer._optimizer_step_post_hooks", lambda: _optimizer()._optimizer_step_post_hooks)
_asks("torch.nn.Module._compiled_call_impl", lambda: own.compiled_call_of(nn.Module()))
_asks("torch._C._current_graph_task_id", own.in_backward)
_asks("torch._C._autograd._top_saved_tensors_default_hooks", own.saved_tensors_hooks_in_force)
_asks("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message", own.refuses_saved_tensors_hooks)
_asks("torch._C._functorch.peek_interpreter_stack", own.in_transform)
_asks("torch._guards.TracingContext.try_get", own.is_traced)


class _Told(Tensor):
    """A tensor that counts the operations on its class and runs none."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.count += 1
        return None


class _Quiet(Tensor):
    """A tensor whose class does not override operations."""

    __torch_function__ = own.disabled_torch_function


class _Shape(_Quiet):
    """A tensor without memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


@_tests("torch._C.DisableTorchFunctionSubclass")
def _passes_classes_by() -> bool:
    told = torch.empty(0, device="cpu").as_subclass(_Told)
    _Told.count = 0
    with own.past_torch_function():
        told.dim()
    unseen = _Told.count
    told.dim()
    return unseen == 0 and _Told.count == 1


@_tests("torch._C._disabled_torch_function_impl")
def _makes_ordinary_tensors() -> bool:
    return type(torch.empty(0, device="cpu").as_subclass(_Quiet).detach()) is Tensor


@_tests("torch.Tensor._make_wrapper_subclass")
def _has_shape_alone() -> bool:
    made = own.wrapper_tensor(_Shape, torch.Size((2, 3)), dtype=torch.float64)
    return type(made) is _Shape and made.size() == (2, 3) and made.dtype is torch.float64


@_tests("torch.Tensor._version")
def _counts_writes() -> bool:
    tensor = torch.empty(1, device="cpu")
    before = own.version_of(tensor)
    tensor.zero_()
    return own.version_of(tensor) == before + 1


@_tests("torch._C._storage_Use_Count")
def _counts_users() -> bool:
    tensor = torch.empty(1, device="cpu")
    alone = own.storage_users(tensor)
    view = tensor.view(1)
    together = own.storage_users(tensor)
    del view
    return together == alone + 1 and own.storage_users(tensor) == alone


@_tests("torch.utils._pytree.tree_flatten")
def _takes_trees_apart() -> bool:
    tree = {"a": [1, (2.0, None)]}
    leaves, spec = own.tree_flatten(tree)
    return leaves == own.tree_leaves(tree) == [1, 2.0, None] and own.tree_unflatten(leaves, spec) == tree


@_tests("torch.utils._pytree.tree_map")
def _maps_trees() -> bool:
    return bool(own.tree_map(str, [1, (2,)]) == ["1", ("2",)])


@_tests("torch.utils._pytree.tree_map_only")
def _maps_one_type() -> bool:
    return bool(own.tree_map_only(int, str, [1, (2.0,)]) == ["1", (2.0,)])


@_tests("torch.nn.Module._modules")
def _holds_modules() -> bool:
    module = nn.Module()
    vars(module)["_modules"]["inner"] = nn.Module()
    return len([*module.children()]) == 1


@_tests("torch.nn.Module._parameters")
def _holds_parameters() -> bool:
    module = nn.Module()
    own.own_parameters(module)["absent"] = None
    return (
        "absent" in vars(module)["_parameters"] and getattr(module, "absent", 0) is None and not [*module.parameters()]
    )


@_tests("torch.nn.Module._non_persistent_buffers_set")
def _knows_what_is_saved() -> bool:
    module = nn.Module()
    module.register_buffer("saved", None)
    module.register_buffer("left_out", None, persistent=False)
    return [name for name in own.own_buffers(module) if own.is_saved(module, name)] == ["saved"]


@_tests("torch.nn.Module._forward_hooks")
def _orders_hooks() -> bool:
    module = nn.Module()
    first = module.register_forward_pre_hook(lambda *_: None)
    last = module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None, prepend=True)
    module.register_forward_hook(lambda *_: None)
    own.make_outermost(module, first, last)
    return bool(next(iter(module._forward_pre_hooks)) == first.id and next(reversed(module._forward_hooks)) == last.id)


@_tests("torch.Tensor._post_accumulate_grad_hooks")
def _orders_gradient_hooks() -> bool:
    parameter: Any = nn.Parameter(torch.empty(0, device="cpu"))
    first = parameter.register_post_accumulate_grad_hook(lambda _: None)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    own.make_last(parameter, first)
    return bool(next(reversed(parameter._post_accumulate_grad_hooks)) == first.id)


@_tests("torch.Tensor._backward_hooks")
def _sees_tensor_hooks() -> bool:
    parameter = nn.Parameter(torch.empty(0, device="cpu"))
    before = own.has_tensor_hooks(parameter)
    parameter.register_hook(lambda gradient: gradient)
    return not before and own.has_tensor_hooks(parameter)


@_tests("torch.optim.Optimizer._optimizer_step_pre_hooks")
def _orders_step_hooks() -> bool:
    calls: list[int] = []
    optimizer = _optimizer()
    before = optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_post_hook(lambda *_: calls.append(0))
    after = optimizer.register_step_post_hook(lambda *_: calls.append(0))
    own.make_innermost(optimizer, before, after)
    own.step_without_hooks(optimizer)
    pre = optimizer._optimizer_step_pre_hooks
    post = optimizer._optimizer_step_post_hooks
    return next(reversed(pre)) == before.id and next(iter(post)) == after.id and not calls


@_tests("torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks")
def _loads_with_hooks() -> bool:
    calls: list[str] = []
    optimizer = _optimizer()
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    own.load_with_hooks(optimizer, {}, lambda _: calls.append("load"))
    return calls == ["before", "load", "after"]


@_tests(f"{own.COMPILED_CALL} of {own.COMPILER_FILE}")
def _has_compiler_frames() -> bool:
    """Check the source file, if there is one, since importing the compiler takes a second."""
    source = Path(torch.__file__).parent / own.COMPILER_FILE
    return not source.is_file() or f"def {own.COMPILED_CALL}(" in source.read_text(encoding="utf-8")


def _first_unfit() -> tuple[str, str] | None:
    """Return the first name that fails its test, and the reason."""
    for name, works in _TESTS.items():
        try:
            is_fit = works()
        except Exception as error:
            return name, f"raises {error!r}"
        if not is_fit:
            return name, "behaves differently"
    return None


def run() -> None:
    """Run the tests on a separate thread, where the importer's modes, transforms and hooks are not in force.

    Raises:
        UsageError: a name fails its test.
    """
    found: list[tuple[str, str] | None] = []
    thread = Thread(target=lambda: found.append(_first_unfit()), name="zeroshard-torch-private")
    thread.start()
    thread.join()
    if found[0] is not None:
        raise own.unfit(*found[0])
