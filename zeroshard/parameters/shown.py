"""Owns what the user's parameters are while they are not ordinary: classes that tell their unit who reads them. Called by unit.

A user's parameter stays the object that it is; for a while its class is a subclass of `nn.Parameter`, as torch's own lazy
parameters
change class too. Nothing that is computed from it is of that class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from zeroshard.errors import UsageError
from zeroshard.parameters.metadata import METADATA, VALUES

_GRAD: Any = torch.Tensor.grad
"""The slot itself, past the property below."""


class Owner(Protocol):
    """The unit of a parameter, as these classes know it."""

    def before_read(self, parameter: Tensor, what: str) -> None:
        """An operation wants the parameter's values: make them current, or raise by name."""

    def taken_gradient(self, parameter: Tensor) -> str | None:
        """The parameter's fqn, where it got a gradient in this step, which is in `parameter.grad` no longer."""

    def local_gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient that this rank has summed over microbatches, where it lies in one piece of the parameter's dtype."""

    def replace_gradient(self, parameter: Tensor) -> None:
        """The user set the parameter's `grad`, to None or another."""

    def deep_copy(self, parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
        """An ordinary copy with the true values; copies of the unit's other parameters go into `memo`."""


def grad_of(parameter: Tensor) -> Tensor | None:
    """What autograd, or the user, has put into `parameter.grad`."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _GRAD.__get__(parameter)
    return gradient


def forget_grad(parameter: Tensor) -> None:
    """Take it out, without a word to the parameter's owner."""
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(parameter, None)


def whole_class(attributes: type | None, ordinary: type[nn.Parameter] = nn.Parameter) -> type[nn.Parameter]:
    """The class of parameters whose values are here: the `ordinary` one, unless they show `attributes`. Copies are ordinary."""
    if attributes is None:
        return ordinary

    class Whole(attributes, nn.Parameter):  # type: ignore[misc, valid-type]
        """As `nn.Parameter`, with more attributes. Operations on it cost nothing more."""

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    return Whole


def classes_of(owner: Owner, whole: type[nn.Parameter] = nn.Parameter) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """(the class of parameters whose values are away or arriving, the class of those whose gradient was taken)"""

    class Taken(whole):  # type: ignore[misc, valid-type]
        """As `nn.Parameter`, but `grad` says where the gradient is. Operations on it cost nothing more."""

        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            own = grad_of(self)
            if (
                own is not None or TracingContext.try_get() is not None
            ):  # torch.compile describes parameters, and reads none
                return own
            fqn = owner.taken_gradient(self)
            if fqn is None:
                return None
            local = owner.local_gradient(self)
            return local if local is not None else _taken_gradient(self, fqn)

        @grad.setter
        def grad(self, value: Tensor | None) -> None:
            owner.replace_gradient(self)
            with torch._C.DisableTorchFunctionSubclass():
                _GRAD.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            owner.replace_gradient(self)
            with torch._C.DisableTorchFunctionSubclass():
                _GRAD.__set__(self, None)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            return owner.deep_copy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            owner.before_read(self, "pickle")
            self.__class__ = nn.Parameter  # type: ignore[assignment]
            return self.__reduce_ex__(protocol)

    class Away(Taken):
        """Every torch operation that touches it comes here first, whatever reference it has."""

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if func.__name__ not in METADATA or attribute in VALUES:
                touched = [one for one in _flat(args, kwargs) if isinstance(one, cls)]
                if func.__name__ == "to" and _is_there_already(touched, args, kwargs):
                    return args[0]
                if func.__name__ == "__repr__" and not _readable(owner, touched):
                    return (
                        f"Parameter of shape {tuple(touched[0].shape)}, {touched[0].dtype}, whose values are not here"
                    )
                for one in touched:
                    owner.before_read(one, attribute or func.__name__)
                return func(*args, **(kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return Away, Taken


def _flat(args: tuple[Any, ...], kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for one in [*args, *(kwargs or {}).values()]:
        found += one if isinstance(one, list | tuple) else [one]
    return found


def _is_there_already(touched: list[Any], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether `parameter.to(...)` is the parameter itself, as `module.to(device)` asks for each."""
    with torch._C.DisableTorchFunctionSubclass():
        return len(touched) == 1 and torch.Tensor.to(*args, **(kwargs or {})) is args[0]


def _readable(owner: Owner, touched: list[Any]) -> bool:
    try:
        for one in touched:
            owner.before_read(one, "repr")
    except UsageError:
        return False
    return True


class TakenGradient(Tensor):
    """What `parameter.grad` is from the last backward of a step to `zero_grad`: it has shape and dtype, and no values."""

    fqn: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ in METADATA and attribute not in VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        fqn = next(one.fqn for one in _flat(args, kwargs) if isinstance(one, TakenGradient))
        raise UsageError(
            f"the gradient of {fqn} is not in its `grad`: it was reduced over ranks, into shards. To clip, call "
            "sharded.clip_grad_norm_(max_norm) (in a config, gradient_clipping) in the place of torch's; to read it, "
            f'sharded.states.get("{fqn}", "gradients").'
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient of {self.fqn}"


def _taken_gradient(parameter: Tensor, fqn: str) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        nothing = torch.empty((1,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
        shown = nothing.expand(parameter.shape).as_subclass(TakenGradient)
    shown.fqn = fqn
    return shown
