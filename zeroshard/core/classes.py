"""Owns the classes of parameters that report to their unit: reads of their values, and operations on their gradients.

A parameter is of one of these classes while its values are absent or arriving, or while its gradient is in shards. torch's own
lazy parameters change their class, too. Results of operations on a parameter are never of these classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.core.context import Live
from zeroshard.errors import UsageError
from zeroshard.torch_private import (
    GRAD,
    distributed_class,
    grad_of,
    is_traced,
    let_parameters_be_made,
    past_torch_function,
)

METADATA = {
    "is_floating_point", "is_complex", "numel", "size", "dim", "stride", "element_size", "ndimension", "is_contiguous",
    "_has_compatible_shallow_copy_type", "__hash__", "__len__", "is_signed", "__get__", "__set__", "get_device", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "grad", "backward", "new_empty", "new_full", "new_ones", "new_tensor",
    "new_zeros", "empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like",
}  # fmt: skip
"""torch operations that do not need the tensor's values, among them getters and setters of attributes."""
VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}
"""Attributes that show values. All other attributes describe the tensor."""
CONVERSIONS = {"to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16"}
"""Operations that return the tensor itself if it already has the requested dtype and device."""
DATA: Any = torch.Tensor.data
"""The descriptor of `tensor.data`, without properties of subclasses."""


def whole_class(attributes: type | None, ordinary: type[nn.Parameter] = nn.Parameter) -> type[nn.Parameter]:
    """Return the class of unsharded parameters: `ordinary`, or a subclass of it with `attributes`. Copies are ordinary."""
    # Parameters of a dry run are of another class, without values.
    if attributes is None or ordinary not in (nn.Parameter, distributed_class()):
        return ordinary

    class Whole(attributes, ordinary):  # type: ignore[misc, valid-type]
        """A parameter with additional attributes. Operations on it have no overhead."""

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _reduced_as(ordinary, self, protocol)

    if ordinary is nn.Parameter:
        let_parameters_be_made(Whole, nn.Parameter)
    return Whole


def quantised_class(ordinary: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class of bitsandbytes' parameters that come and go, while they have their values: a subclass of theirs.

    Its name is that of `ordinary`, which PEFT looks at. bitsandbytes keeps, for the backward, what `view(-1, 1)` returns. A view
    would keep the memory of the whole unit until then. So a parameter of that shape returns itself.
    """

    class Quantised(ordinary):  # type: ignore[misc, valid-type]
        def view(self, *shape: Any) -> Any:
            if shape == (-1, 1) and self.ndim == 2 and self.shape[1] == 1:
                return self
            return super().view(*shape)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied: nn.Parameter = ordinary(self.detach().as_subclass(Tensor).clone(), requires_grad=False)
            memo[id(self)] = copied
            kept = {name: value for name, value in vars(self).items() if name != "module"}
            vars(copied).update(copy.deepcopy(kept, memo), module=vars(self).get("module"))
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _reduced_as(ordinary, self, protocol)

    Quantised.__name__, Quantised.__qualname__ = ordinary.__name__, ordinary.__qualname__
    Quantised.__module__ = ordinary.__module__
    let_parameters_be_made(Quantised, ordinary)
    return Quantised


def _reduced_as(ordinary: type[nn.Parameter], parameter: nn.Parameter, protocol: Any) -> Any:
    """Return the data that pickle writes for a parameter of the class `ordinary`: values, and attributes that the user set."""
    shown_as = type(parameter)
    parameter.__class__ = ordinary
    try:
        return parameter.__reduce_ex__(protocol)
    finally:
        parameter.__class__ = shown_as


def notes_data(live: Live, *, moves: bool) -> type:
    """Return a class for `whole_class` that records reads of `data` in `live`: later writes through it leave no trace.

    Args:
        moves: whether values rest elsewhere. Parameters then share a storage, which does not tell whether what was read is kept.
    """

    class NotesData:
        @property
        def data(self) -> Tensor:
            data: Tensor = DATA.__get__(self)
            if not is_traced():
                live.data_was_read = True
                if moves:
                    live.give_out(self, data)
            return data

        @data.setter
        def data(self, data: Tensor) -> None:
            DATA.__set__(self, data)

    return NotesData


def classes_of(
    owner: Any,
    live: Live,
    shown: dict[int, TakenGradient],
    taken: dict[int, TakenGradient],
    whole: type[nn.Parameter],
    ordinary: type[nn.Parameter],
) -> tuple[type[nn.Parameter], type[nn.Parameter], type[nn.Parameter]]:
    """Return classes of parameters: with values that are absent or arriving, with a gradient that was taken, and in a block of
    access.

    Args:
        owner: their unit, which is called for reads of values and for uses of `grad`. (Its type is in a higher package.)
        shown: by the parameter's `id`, the tensors that `grad` has ever returned for taken gradients.
        taken: by the parameter's `id`, the tensors that `grad` returns at once. The owner clears it when a user sets a `grad`,
            and when gradients are dropped.
        whole: the class of parameters that have their values.
        ordinary: the class that the user gave them.
    """

    class Taken(whole):  # type: ignore[misc, valid-type]
        """An `nn.Parameter` whose `grad` represents a gradient in shards. Operations on it have no overhead."""

        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            gradient = taken.get(id(self))  # torch's clipping reads `grad` four times for each parameter
            if gradient is not None and not is_traced():
                return gradient
            own = grad_of(self)
            if own is not None or is_traced():  # torch.compile describes parameters, without reading them
                return own
            fqn: str | None = owner.taken_gradient(self)
            if fqn is None:
                return None
            is_taken = owner.is_taken(owner.index_of[id(self)])
            if not is_taken:
                local: Tensor | None = owner.local_gradient(self)
                if local is not None:
                    return local
            gradient = shown.get(id(self))
            if gradient is None:
                gradient = shown[id(self)] = _shape_of(self)
                gradient.fqn = fqn
                gradient.parameter = self
                gradient.key = id(self)
                gradient.owner = owner
                gradient.live = live
            if is_taken:
                taken[id(self)] = gradient
            return gradient

        @grad.setter
        def grad(self, value: Tensor | None) -> None:
            # `parameter.grad *= 0.5` assigns the tensor that it has changed in place.
            if value is not None and self._is_own(value):
                return
            with past_torch_function():
                GRAD.__set__(self, value)
            owner.replace_gradient(self)

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

        def _is_own(self, value: Tensor) -> bool:
            if value is shown.get(id(self)):
                return owner.taken_gradient(self) is not None
            if grad_of(self) is not None or owner.taken_gradient(self) is None:
                return False
            local = owner.local_gradient(self)
            if local is None or value.shape != local.shape or value.stride() != local.stride():
                return False
            if value.dtype != local.dtype:
                return False
            return not value.numel() or value.data_ptr() == local.data_ptr()

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied: nn.Parameter = owner.deep_copy(self, memo)
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            if owner.is_away:
                owner.before_read(self, "pickle")
            return _reduced_as(ordinary, self, protocol)

    class Watched(Taken):
        """A parameter whose `data` is kept: the tensor's version counter counts the writes through it."""

        @property
        def data(self) -> Tensor:
            data: Tensor = DATA.__get__(self)
            return data if is_traced() else owner.writes.watched(self, data)

        @data.setter
        def data(self, data: Tensor) -> None:
            DATA.__set__(self, data)

    class Absent(Taken):
        """A parameter without values: torch operations through any reference to it call `__torch_function__` first."""

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            attribute = attribute_of(func)
            is_metadata = func.__name__ in METADATA or _asks_for_type(func, args, kwargs, cls)
            if not is_metadata or attribute in VALUES:
                # Make the list before the first read: a read gives all parameters of its unit another class.
                touched = [one for one in _flat(args, kwargs) if isinstance(one, cls)]
                if _changes_nothing(func, args, kwargs):
                    return args[0]
                for one in touched:
                    owner.before_read(one, attribute or func.__name__)
                return func(*args, **(kwargs or {}))
            with past_torch_function():
                return func(*args, **(kwargs or {}))

        def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
            try:
                owner.before_read(self, "repr")
            except UsageError:
                return f"{ordinary.__name__} of shape {tuple(self.shape)}, {self.dtype}, whose values are not here"
            described: str = ordinary.__repr__(self, **kwargs)
            return described

    if issubclass(ordinary, nn.Parameter):
        let_parameters_be_made(Taken, nn.Parameter)
        let_parameters_be_made(Watched, nn.Parameter)
        for made in (Absent, Taken, Watched) if ordinary is not nn.Parameter else ():
            made.__name__ = made.__qualname__ = ordinary.__name__  # which PEFT looks at
        return Absent, Taken, Watched

    class AbsentDistributed(Absent):
        """A DTensor without values. Its methods that read the local tensor, without a torch operation, are intercepted."""

        def to_local(self, **kwargs: Any) -> Tensor:
            return self._read("to_local", **kwargs)

        def full_tensor(self, **kwargs: Any) -> Tensor:
            return self._read("full_tensor", **kwargs)

        def redistribute(self, *args: Any, **kwargs: Any) -> Tensor:
            return self._read("redistribute", *args, **kwargs)

        def _read(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
            owner.before_read(self, name)  # afterwards its class is a different one
            found: Tensor = getattr(ordinary, name)(self, *args, **kwargs)
            return found

    return AbsentDistributed, Taken, Taken


def attribute_of(func: Callable[..., Any]) -> str:
    """Return the name of the attribute that `func`, a torch getter or setter, reads or sets; "" for other operations."""
    if not func.__name__.startswith("__"):  # such as linear, whose `__self__` is a module of torch
        return ""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _flat(args: tuple[Any, ...], kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for one in [*args, *(kwargs or {}).values()]:
        found += one if isinstance(one, list | tuple) else [one]
    return found


def _asks_for_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, cls: type[Tensor]) -> bool:
    """Return whether a call of `type`, `type_as` or `to` needs only the dtype and the device of tensors of `cls`."""
    if func.__name__ == "type":
        return len(args) == 1 and not kwargs
    return func.__name__ in ("type_as", "to") and not isinstance(args[0], cls)


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return whether a call leaves its tensor as it is: a conversion to the same type, or `data` set to the tensor itself."""
    if func.__name__ == "__set__":
        return attribute_of(func) == "data" and args[0] is args[1]
    if func.__name__ not in CONVERSIONS:
        return False
    with past_torch_function():
        return func(*args, **(kwargs or {})) is args[0]


class TakenGradient(Tensor):
    """The `parameter.grad` after zeroshard has taken the gradient of a backward: it has a shape and a dtype, but no values.

    The mean over ranks is in shards until `zero_grad`. The norms, factors and bounds of torch's clipping act on these shards.
    """

    fqn: str
    parameter: Tensor
    key: int
    """The parameter's `id`."""
    owner: Any
    live: Live

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # torch's clipping makes these two calls for each gradient. The first call of a step does the work for all gradients.
        look_up = _LOOK_UPS.get(func)
        if look_up is not None and len(args) == 2 and not kwargs and type(args[0]) is cls:
            operations = args[0].live.step.operations
            answer = None if operations is None else getattr(operations, look_up)(*args)
            if answer is not None:
                return answer
        attribute = attribute_of(func)
        if func.__name__ in METADATA and attribute not in VALUES:
            with past_torch_function():
                return func(*args, **(kwargs or {}))
        own = args[0] if args else None
        if attribute == "data" or func.__name__ == "detach" or _changes_nothing(func, args, kwargs):
            return own  # there is no graph to leave
        if func.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        is_for_each = func.__name__ in _FOR_EACH and isinstance(own, list | tuple)
        # A list of arguments, one for each gradient, is refused below.
        if is_for_each and not any(isinstance(one, list | tuple) for one in args[1:]):
            operation = _FOR_EACH[func.__name__]
            return [operation(gradient, *args[1:], **(kwargs or {})) for gradient in args[0]]
        if isinstance(own, TakenGradient) and own.owner.taken_gradient(own.parameter) is not None:
            answer = own.owner.gradient_operation(own.parameter, func.__name__, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        fqn = next(one.fqn for one in _flat(args, kwargs) if isinstance(one, TakenGradient))
        raise UsageError(
            f"the gradient of {fqn} is not in its `grad`: it was reduced over ranks, into shards. torch's clipping and "
            f"GradScaler work on it (as do norm, and mul_, div_ and clamp_ with numbers), but this {func.__name__} does not. To "
            f'read or change it, call sharded.states.get("{fqn}", "gradients") and set; to drop gradients, optimizer.zero_grad().'
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient of {self.fqn}"


def _shape_of(parameter: Tensor) -> TakenGradient:
    """Return a gradient of a parameter's shape, dtype and device, over one element of memory."""
    with past_torch_function():
        nothing = torch.empty((1,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
        return nothing.expand(parameter.shape).as_subclass(TakenGradient)


_LOOK_UPS: dict[Callable[..., Any], str] = {
    torch.linalg.vector_norm: "known_norm",
    Tensor.mul_: "multiplied",
}
"""torch's operations with a short path, a method of `GradientOperations`. It returns None where the whole path must decide."""
_FOR_EACH: dict[str, Callable[..., Tensor]] = {
    "_foreach_norm": torch.linalg.vector_norm,
    "_foreach_mul_": Tensor.mul_,
    "_foreach_div_": Tensor.div_,
    "_foreach_clamp_min_": Tensor.clamp_min_,
    "_foreach_clamp_max_": Tensor.clamp_max_,
}
"""torch's operations on many gradients at once, which its clipping uses with `foreach=True`. They run on one gradient at a time."""


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Run GradScaler's operation on gradients: set `found_inf` if a value is not finite, and multiply by `inverse_scale`."""
    largest = [torch.linalg.vector_norm(gradient, math.inf) for gradient in gradients if gradient.numel()]
    if not all(torch.isfinite(each) for each in largest):
        found_inf.fill_(1.0)
    for gradient in gradients:
        gradient.mul_(inverse_scale)
