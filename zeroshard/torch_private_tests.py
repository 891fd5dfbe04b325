"""Owns the tests of torch's private names (see torch_private.py), which run when zeroshard is imported.

None touches an accelerator, runs a backward, or reads a value: they take microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.torch_private import (
    COMPILED_CALL,
    COMPILER_FILE,
    compiled_call_of,
    disabled_torch_function,
    has_tensor_hooks,
    in_backward,
    in_transform,
    is_saved,
    is_traced,
    make_innermost,
    make_last,
    make_outermost,
    own_buffers,
    own_parameters,
    past_torch_function,
    refuses_saved_tensors_hooks,
    saved_tensors_hooks_in_force,
    step_without_hooks,
    storage_users,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    unfit,
    version_of,
    wrapper_tensor,
)


class _Told(Tensor):
    """A tensor that counts the operations that come to its class, and does none."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.count += 1
        return None


class _Quiet(Tensor):
    """A tensor whose class takes no part in operations."""

    __torch_function__ = disabled_torch_function


class _Shape(_Quiet):
    """A tensor without memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


def _passes_classes_by() -> bool:
    told = torch.empty(0, device="cpu").as_subclass(_Told)
    _Told.count = 0
    with past_torch_function():
        told.dim()
    unseen = _Told.count
    told.dim()
    return unseen == 0 and _Told.count == 1


def _makes_ordinary_tensors() -> bool:
    return type(torch.empty(0, device="cpu").as_subclass(_Quiet).detach()) is Tensor


def _has_shape_alone() -> bool:
    made = wrapper_tensor(_Shape, torch.Size((2, 3)), dtype=torch.float64)
    return type(made) is _Shape and made.size() == (2, 3) and made.dtype is torch.float64


def _counts_writes() -> bool:
    tensor = torch.empty(1, device="cpu")
    before = version_of(tensor)
    tensor.zero_()
    return version_of(tensor) == before + 1


def _counts_users() -> bool:
    tensor = torch.empty(1, device="cpu")
    alone = storage_users(tensor)
    view = tensor.view(1)
    together = storage_users(tensor)
    del view
    return together == alone + 1 and storage_users(tensor) == alone


def _takes_trees_apart() -> bool:
    tree = {"a": [1, (2.0, None)]}
    leaves, spec = tree_flatten(tree)
    return leaves == tree_leaves(tree) == [1, 2.0, None] and tree_unflatten(leaves, spec) == tree


def _maps_trees() -> bool:
    return bool(tree_map(str, [1, (2,)]) == ["1", ("2",)])


def _maps_one_type() -> bool:
    return bool(tree_map_only(int, str, [1, (2.0,)]) == ["1", (2.0,)])


def _holds_parameters() -> bool:
    module = nn.Module()
    own_parameters(module)["absent"] = None
    return (
        "absent" in vars(module)["_parameters"] and getattr(module, "absent", 0) is None and not [*module.parameters()]
    )


def _holds_modules() -> bool:
    module = nn.Module()
    vars(module)["_modules"]["inner"] = nn.Module()
    return len([*module.children()]) == 1


def _knows_what_is_saved() -> bool:
    module = nn.Module()
    module.register_buffer("saved", None)
    module.register_buffer("left_out", None, persistent=False)
    return [name for name in own_buffers(module) if is_saved(module, name)] == ["saved"]


def _orders_hooks() -> bool:
    module = nn.Module()
    first = module.register_forward_pre_hook(lambda *_: None)
    last = module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None, prepend=True)
    module.register_forward_hook(lambda *_: None)
    make_outermost(module, first, last)
    return bool(next(iter(module._forward_pre_hooks)) == first.id and next(reversed(module._forward_hooks)) == last.id)


def _orders_gradient_hooks() -> bool:
    parameter: Any = nn.Parameter(torch.empty(0, device="cpu"))
    first = parameter.register_post_accumulate_grad_hook(lambda _: None)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    make_last(parameter, first)
    return bool(next(reversed(parameter._post_accumulate_grad_hooks)) == first.id)


def _sees_tensor_hooks() -> bool:
    parameter = nn.Parameter(torch.empty(0, device="cpu"))
    before = has_tensor_hooks(parameter)
    parameter.register_hook(lambda gradient: gradient)
    return not before and has_tensor_hooks(parameter)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.empty(0, device="cpu"))], lr=0.0)


def _orders_step_hooks() -> bool:
    calls: list[int] = []
    optimizer = _optimizer()
    before = optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_pre_hook(lambda *_: calls.append(0))
    optimizer.register_step_post_hook(lambda *_: calls.append(0))
    after = optimizer.register_step_post_hook(lambda *_: calls.append(0))
    make_innermost(optimizer, before, after)
    step_without_hooks(optimizer)
    pre = optimizer._optimizer_step_pre_hooks
    post = optimizer._optimizer_step_post_hooks
    return next(reversed(pre)) == before.id and next(iter(post)) == after.id and not calls


def _has_compiler_frames() -> bool:
    """Check the source, since importing the compiler takes a second; without sources there is no check."""
    source = Path(torch.__file__).parent / COMPILER_FILE
    return not source.is_file() or f"def {COMPILED_CALL}(" in source.read_text()


def _answers(question: Callable[[], object]) -> Callable[[], bool]:
    """Make a test that accepts any answer: this module may be imported in a backward, or inside hooks."""

    def test() -> bool:
        question()
        return True

    return test


_TESTS: dict[str, Callable[[], bool]] = {
    "torch._C.DisableTorchFunctionSubclass": _passes_classes_by,
    "torch._C._disabled_torch_function_impl": _makes_ordinary_tensors,
    "torch.Tensor._make_wrapper_subclass": _has_shape_alone,
    "torch.Tensor._version": _counts_writes,
    "torch._C._storage_Use_Count": _counts_users,
    "torch.utils._pytree.tree_flatten": _takes_trees_apart,
    "torch.utils._pytree.tree_map": _maps_trees,
    "torch.utils._pytree.tree_map_only": _maps_one_type,
    "torch.nn.Module._modules": _holds_modules,
    "torch.nn.Module._parameters": _holds_parameters,
    "torch.nn.Module._buffers": _answers(lambda: own_buffers(nn.Module())),
    "torch.nn.Module._non_persistent_buffers_set": _knows_what_is_saved,
    "torch.nn.Module._forward_pre_hooks": _answers(lambda: nn.Module()._forward_pre_hooks),
    "torch.nn.Module._forward_hooks": _orders_hooks,
    "torch.Tensor._post_accumulate_grad_hooks": _orders_gradient_hooks,
    "torch.Tensor._backward_hooks": _sees_tensor_hooks,
    "torch.optim.Optimizer._optimizer_step_post_hooks": _answers(lambda: _optimizer()._optimizer_step_post_hooks),
    "torch.optim.Optimizer._optimizer_step_pre_hooks": _orders_step_hooks,
    "torch.nn.Module._compiled_call_impl": _answers(lambda: compiled_call_of(nn.Module())),
    "torch._C._current_graph_task_id": _answers(in_backward),
    "torch._C._autograd._top_saved_tensors_default_hooks": _answers(saved_tensors_hooks_in_force),
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": _answers(refuses_saved_tensors_hooks),
    "torch._C._functorch.peek_interpreter_stack": _answers(in_transform),
    "torch._guards.TracingContext.try_get": _answers(is_traced),
    f"{COMPILED_CALL} of {COMPILER_FILE}": _has_compiler_frames,
}


def _first_unfit() -> tuple[str, str] | None:
    """Return the first name that is not fit for use, and the reason."""
    for name, works in _TESTS.items():
        try:
            is_fit = works()
        except Exception as error:
            return name, f"raises {error!r}"
        if not is_fit:
            return name, "does something else"
    return None


def run() -> None:
    """Run the tests on a separate thread, where the importer's modes, transforms and hooks are not in force.

    Raises:
        UsageError: a name is not fit for use.
    """
    found: list[tuple[str, str] | None] = []
    thread = Thread(target=lambda: found.append(_first_unfit()), name="zeroshard-torch-private")
    thread.start()
    thread.join()
    if found[0] is not None:
        raise unfit(*found[0])
