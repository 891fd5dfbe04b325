"""The user's view of a unit's parameters: views of the flat buffer or placeholders, their class, and the record of writes.

A user's parameter stays the object that it is. For a while its class is a subclass of `nn.Parameter` that reports readers to the
unit, as torch's own lazy parameters change class too. Nothing that is computed from it is of that class.

Writes leave a trace in a parameter's version counter, at no cost. Those through `.data` leave none. So a parameter notes that
its `.data` was read where such a write would be lost, and while values are away that attribute is refused as any other reader is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.bucketing import NamedParameter
from zeroshard.torch_private import (
    distributed_class,
    is_same_memory,
    is_traced,
    past_torch_function,
    version_of,
    writes_of,
)

METADATA = {
    "is_floating_point", "is_complex", "numel", "size", "dim", "stride", "element_size", "ndimension", "is_contiguous",
    "_has_compatible_shallow_copy_type", "__hash__", "__len__", "is_signed", "__get__", "__set__", "get_device", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "grad", "backward",
}  # fmt: skip
"""Operations of torch that describe a tensor without its values; getters and setters of attributes among them."""
VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}
"""Attributes that show values, where all others describe the tensor."""
GRAD: Any = torch.Tensor.grad
"""The slot itself, past the property below. A class that hears of operations hears of its use."""


class Owner(Protocol):
    """The unit of a parameter, as these classes know it."""

    def before_read(self, parameter: Tensor, what: str) -> None:
        """Make the parameter's values current for an operation, or raise an error that names the parameter."""

    def taken_gradient(self, parameter: Tensor) -> str | None:
        """Return the parameter's fqn if its gradient of this step was taken out of `parameter.grad`."""

    def local_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return this rank's gradient, summed over microbatches, if it is one piece in the parameter's dtype."""

    def gradient_operation(self, parameter: Tensor, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one of torch's operations on the taken gradient. Return NotImplemented for an unknown name."""

    def replace_gradient(self, parameter: Tensor) -> None:
        """Note that the user set the parameter's `grad`, to None or to another tensor."""

    def deep_copy(self, parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary copy with the true values. Copies of the unit's other parameters go into `memo`."""


DATA: Any = torch.Tensor.data


def grad_of(parameter: Tensor) -> Tensor | None:
    """Return the tensor that autograd or the user stored in `parameter.grad`."""
    with past_torch_function():
        gradient: Tensor | None = GRAD.__get__(parameter)
    return gradient


def forget_grad(parameter: Tensor) -> None:
    """Clear `parameter.grad` without notifying the parameter's owner."""
    with past_torch_function():
        GRAD.__set__(parameter, None)


def whole_class(attributes: type | None, ordinary: type[nn.Parameter] = nn.Parameter) -> type[nn.Parameter]:
    """Return the class of unsharded parameters: `ordinary`, or a subclass of it with `attributes`. Copies are ordinary."""
    # Parameters of a dry run have no values.
    if attributes is None or ordinary not in (nn.Parameter, distributed_class()):
        return ordinary

    class Whole(attributes, ordinary):  # type: ignore[misc, valid-type]
        """A parameter with more attributes. Operations on it have no overhead."""

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    return Whole


def notes_data(note: Callable[[], None]) -> type:
    """Make attributes for `whole_class` that call `note` when the user reads `data`: later writes through it leave no trace."""

    class NotesData:
        @property
        def data(self) -> Tensor:
            if not is_traced():
                note()
            data: Tensor = DATA.__get__(self)
            return data

        @data.setter
        def data(self, data: Tensor) -> None:
            DATA.__set__(self, data)

    return NotesData


def classes_of(
    owner: Owner, whole: type[nn.Parameter] = nn.Parameter, ordinary: type[nn.Parameter] = nn.Parameter
) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Return two classes: of parameters whose values are absent or arriving, and of those whose gradient was taken."""
    shown: dict[int, Tensor] = {}
    """By `id` of a parameter, what its `grad` is while its gradient is taken."""

    class Taken(whole):  # type: ignore[misc, valid-type]
        """An `nn.Parameter` whose `grad` stands for a gradient that lies in shards. Operations on it have no overhead."""

        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            own = grad_of(self)
            if own is not None or is_traced():  # torch.compile describes parameters, and reads none
                return own
            fqn = owner.taken_gradient(self)
            if fqn is None:
                return None
            local = owner.local_gradient(self)
            if local is not None:
                return local
            if id(self) not in shown:
                shown[id(self)] = _taken_gradient(owner, self, fqn)
            return shown[id(self)]

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
            with past_torch_function():
                GRAD.__set__(self, None)
            owner.replace_gradient(self)

        def _is_own(self, value: Tensor) -> bool:
            if value is shown.get(id(self)):
                return owner.taken_gradient(self) is not None
            if grad_of(self) is not None or owner.taken_gradient(self) is None:
                return False
            local = owner.local_gradient(self)
            return local is not None and _is_same_view(value, local)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            return owner.deep_copy(self, memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            owner.before_read(self, "pickle")
            self.__class__ = ordinary  # type: ignore[assignment]
            return self.__reduce_ex__(protocol)

    class Away(Taken):
        """A parameter without values: every torch operation on it calls `__torch_function__` first, by whatever reference."""

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
            with past_torch_function():
                return func(*args, **(kwargs or {}))

    if issubclass(ordinary, nn.Parameter):
        return Away, Taken

    class AwayDistributed(Away):
        """A DTensor without values: its methods that are not torch operations, and read the local tensor, are intercepted."""

        def to_local(self, **kwargs: Any) -> Tensor:
            return self._read("to_local", **kwargs)

        def full_tensor(self, **kwargs: Any) -> Tensor:
            return self._read("full_tensor", **kwargs)

        def redistribute(self, *args: Any, **kwargs: Any) -> Tensor:
            return self._read("redistribute", *args, **kwargs)

        def _read(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
            owner.before_read(self, name)
            found: Tensor = getattr(super(), name)(*args, **kwargs)
            return found

        def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
            if not _readable(owner, [self]):
                return f"DTensor of shape {tuple(self.shape)}, {self.dtype}, whose values are not here"
            return super().__repr__(**kwargs)

    return AwayDistributed, Taken


def _flat(args: tuple[Any, ...], kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for one in [*args, *(kwargs or {}).values()]:
        found += one if isinstance(one, list | tuple) else [one]
    return found


def _is_there_already(touched: list[Any], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return whether `parameter.to(...)` would return the parameter itself; `module.to(device)` asks this for each."""
    with past_torch_function():
        return len(touched) == 1 and torch.Tensor.to(*args, **(kwargs or {})) is args[0]


def _readable(owner: Owner, touched: list[Any]) -> bool:
    try:
        for one in touched:
            owner.before_read(one, "repr")
    except UsageError:
        return False
    return True


class TakenGradient(Tensor):
    """The `parameter.grad` from the last backward of a step to `zero_grad`: it has shape and dtype, and no values.

    The mean over ranks lies in shards. Norms, factors and bounds, which torch's clipping asks for, are operations on it.
    """

    fqn: str
    parameter: Tensor
    owner: Owner

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ in METADATA and attribute not in VALUES:
            with past_torch_function():
                return func(*args, **(kwargs or {}))
        own = args[0] if args else None
        if attribute == "data" or func.__name__ == "detach":
            return own  # there is no graph to leave
        if func.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        if func.__name__ in _FOR_EACH and _is_one_for_all(args):
            operation = _FOR_EACH[func.__name__]
            return [operation(gradient, *args[1:], **(kwargs or {})) for gradient in args[0]]
        if isinstance(own, TakenGradient) and own.owner.taken_gradient(own.parameter) is not None:
            answer = own.owner.gradient_operation(own.parameter, func.__name__, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        fqn = next(one.fqn for one in _flat(args, kwargs) if isinstance(one, TakenGradient))
        raise UsageError(
            f"the gradient of {fqn} is not in its `grad`: it was reduced over ranks, into shards. torch's clipping and "
            f"GradScaler work on it (as do norm, mul_, div_, clamp_), and {func.__name__} does not. To read it, call "
            f'sharded.states.get("{fqn}", "gradients").'
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TakenGradient of {self.fqn}"


_FOR_EACH: dict[str, Callable[..., Tensor]] = {
    "_foreach_norm": torch.linalg.vector_norm,
    "_foreach_mul_": Tensor.mul_,
    "_foreach_div_": Tensor.div_,
    "_foreach_clamp_min_": Tensor.clamp_min_,
    "_foreach_clamp_max_": Tensor.clamp_max_,
}
"""torch's operations on many gradients at once, which its clipping asks for with `foreach=True`: each is done one by one."""


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return not one.numel() or one.data_ptr() == other.data_ptr()


def _is_one_for_all(args: tuple[Any, ...]) -> bool:
    """Whether an operation on many tensors has the same other arguments for each of them."""
    return (
        bool(args) and isinstance(args[0], list | tuple) and not any(isinstance(one, list | tuple) for one in args[1:])
    )


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Run torch.amp.GradScaler's operation on all gradients of a device: report values that are not finite, and multiply."""
    largest = [torch.linalg.vector_norm(gradient, math.inf) for gradient in gradients if gradient.numel()]
    if not all(torch.isfinite(each) for each in largest):
        found_inf.fill_(1.0)
    for gradient in gradients:
        gradient.mul_(inverse_scale)


def _taken_gradient(owner: Owner, parameter: Tensor, fqn: str) -> Tensor:
    with past_torch_function():
        nothing = torch.empty((1,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device)
        shown = nothing.expand(parameter.shape).as_subclass(TakenGradient)
    shown.fqn = fqn
    shown.parameter = parameter
    shown.owner = owner
    return shown


class Appearance:
    """See the module's docstring.

    Args:
        named: the unit's parameters.
        views: of the flat buffer, one for each parameter, in its shape.
        dtype: of the parameters.
        owner: hears of reads and of gradients that the user sets.
        whole: the class of parameters whose values are here; of DTensors another than of others.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        views: Sequence[Tensor],
        dtype: torch.dtype,
        owner: Owner,
        whole: type[nn.Parameter] = nn.Parameter,
    ) -> None:
        self._named = named
        self.whole_class = whole
        self._is_distributed = named[0].is_distributed
        # A DTensor holds the view itself, which counts the user's writes, and not those of all-gathers into the flat buffer.
        self._views = [view.data for view in views] if self._is_distributed else list(views)
        kind = distributed_class() if self._is_distributed else nn.Parameter
        assert kind is not None
        self._ordinary = kind
        self._away_class, self._taken_class = classes_of(owner, self.whole_class, self._ordinary)
        self._ours = (self._ordinary, self.whole_class, self._away_class, self._taken_class)
        device = self._views[0].device
        self._placeholders = (
            torch.full((max(len(self._named), 1),), float("nan"), dtype=dtype, device=device)
            if dtype.is_floating_point
            else None
        )
        self._absent_views = (
            [self._placeholders[index].expand(entry.shape) for index, entry in enumerate(self._named)]
            if self._placeholders is not None
            else None
        )
        self._versions: list[int] = []
        self._looks: list[list[int]] = []
        self._shown_taken: set[int] = set()
        self._in_use = False
        self._own_writes = [0] * len(self._named)
        """The part of the version counts that is not the user's writes."""
        self.hides = 0
        """The number of times that the values left: these version counts are no writes."""
        self.expect_present_grads()

    @property
    def placeholders(self) -> Tensor | None:
        """The data of parameters without values, one NaN for each; None if their values never leave."""
        return self._placeholders

    # ------------------------------------------------------------------ what they look at

    def show_views(self) -> None:
        """Show the values again, instead of placeholders or of tensors that the user assigned."""
        lost = self._lost_writes()
        self._become(self.whole_class)
        for entry, view in zip(self._named, self._views, strict=True):
            entry.show(view)
        self._versions = self.versions()
        self._refuse_lost(lost)

    def end_wait(self) -> None:
        """End `make_readers_wait`: the values have arrived in the views that are shown."""
        self._become(self.whole_class)
        self._versions = self.versions()

    def hide(self) -> None:
        """Hide the values, so that every read calls `before_read`."""
        if self._absent_views is None:
            raise UsageError(
                f"{self._named[0].fqn} is an integer parameter, which cannot be sharded; register it as a buffer."
            )
        self._become(self.whole_class)
        for entry, view in zip(self._named, self._absent_views, strict=True):
            entry.show(view)
        self._versions = self.versions()
        self._become(self._away_class)

    def outdate_saved(self) -> None:
        """Outdate parameters that autograd saved outside of our hooks, so that torch raises instead of a read of NaN.

        Not while the user has views: torch would rebuild their gradient functions from the data that the parameter shows now.
        """
        for entry in self._named:
            torch.autograd.graph.increment_version(entry.parameter)
        self.hides += 1
        self._versions = self.versions()

    def make_readers_wait(self) -> None:
        """Make readers wait for values that arrive while Python continues."""
        self._become(self._away_class)

    def show_taken(self, used: Iterable[int]) -> None:
        """Show a `TakenGradient` as `grad` of the `used` parameters, whose gradients were all taken."""
        self._shown_taken = set(used)
        self._in_use = False
        self._exchange(self.whole_class, self._taken_class)

    def show_ordinary(self) -> None:
        """End `show_taken`."""
        self._exchange(self._taken_class, self.whole_class)
        self._shown_taken = set()

    def begin_use(self) -> None:
        """Show ordinary parameters while a forward or a backward runs: compiled modules are valid for one class of parameters."""
        self._in_use = True
        self._exchange(self._taken_class, self.whole_class)

    def end_use(self) -> None:
        """End `begin_use`."""
        self._in_use = False
        self._exchange(self.whole_class, self._taken_class)

    def _exchange(self, before: type[nn.Parameter], after: type[nn.Parameter]) -> None:
        """Change the class of the parameters that `show_taken` shows. Usually there are none."""
        for index in self._shown_taken:
            parameter = self._named[index].parameter
            if type(parameter) is before:
                parameter.__class__ = after

    def release(self) -> None:
        """Make the parameters ordinary again, each in a storage of its own."""
        self._shown_taken = set()
        self._become(self._ordinary)
        for entry in self._named:
            entry.show(entry.local.clone())

    def _become(self, cls: type[nn.Parameter]) -> None:
        for index, entry in enumerate(self._named):
            if type(entry.parameter) in self._ours:
                is_taken = cls is self.whole_class and index in self._shown_taken and not self._in_use
                entry.parameter.__class__ = self._taken_class if is_taken else cls

    @property
    def tells_readers(self) -> bool:
        """Whether all parameters are of zeroshard's classes. Reads of a user's own class cannot be intercepted."""
        return all(type(entry.parameter) in self._ours for entry in self._named)

    # ------------------------------------------------------------------ who writes

    def versions(self) -> list[int]:
        """Return the number of the user's in-place writes to each parameter."""
        count = writes_of if self._is_distributed else version_of
        return [count(entry.parameter) - own for entry, own in zip(self._named, self._own_writes, strict=True)]

    def begin_look(self) -> list[int]:
        """Start to count writes, until `end_look`. `settle` resets the counts to compare with."""
        self._looks.append(self.versions())
        return self._looks[-1]

    def end_look(self, look: list[int]) -> None:
        """End a `begin_look`."""
        self._looks = [other for other in self._looks if other is not look]

    def settle(self) -> None:
        """Mark all writes so far as seen: no open look reports them as a change."""
        for look in self._looks:
            look[:] = self.versions()

    def outdate_graphs(self, indices: Iterable[int] | None = None) -> None:
        """These (default: all) were updated: a graph that saved them before must not be differentiated with other values.

        torch's own check finds it, as where an optimizer writes to the parameters themselves.
        """
        if indices is None:
            indices = range(len(self._named))
        for index in indices:
            with past_torch_function():
                torch.autograd.graph.increment_version(self._named[index].parameter)
            self._own_writes[index] += 1

    def take_written(self) -> set[int]:
        """Return the parameters that were written in place, or were assigned another `.data`, since the last call."""
        written = self.take_new_data()
        now = self.versions()
        if now != self._versions:
            written |= {index for index, version in enumerate(now) if version != self._versions[index]}
            self._versions = now
        return written

    def _has_new_data(self, index: int) -> bool:
        entry = self._named[index]
        shown = entry.local if self._is_distributed else entry.parameter
        view = self._views[index]
        return not is_same_memory(shown, view) and bool(view.numel())

    def take_new_data(self) -> set[int]:
        """Copy tensors that the user assigned as `.data` into the parameters' memory. Return the indices of these parameters."""
        found = set()
        for index, (entry, view) in enumerate(zip(self._named, self._views, strict=True)):
            if self._has_new_data(index):
                data = entry.local
                if data.shape != view.shape or data.dtype != view.dtype:
                    raise UsageError(
                        f"{entry.fqn} was given data of shape {tuple(data.shape)} and {data.dtype}, and had "
                        f"{tuple(view.shape)} and {view.dtype}. Shapes and dtypes are fixed when zeroshard takes the "
                        "model: convert it before, or pass precision=Precision(...) (in a config, bf16 or fp16)."
                    )
                view.copy_(data)
                entry.show(view)
                self.outdate_graphs([index])
                found.add(index)
        return found

    def expect_present_grads(self) -> None:
        """Record which parameters take a gradient now."""
        self._expected_grad = [entry.parameter.requires_grad for entry in self._named]

    def refuse_unfrozen(self, optimized: set[int]) -> None:
        """Raise if a frozen parameter of the optimizer now takes gradients, which would not be reduced."""
        for index, entry in enumerate(self._named):
            parameter = entry.parameter
            if parameter.requires_grad and not self._expected_grad[index] and id(parameter) in optimized:
                raise UsageError(
                    f"{entry.fqn} was unfrozen, and would not train: call update_trainable() (on every rank) after "
                    "changing requires_grad."
                )

    def refuse_lost_writes(self) -> None:
        """Raise if a parameter was written while it showed a placeholder: its values at rest did not change."""
        self._refuse_lost(self._lost_writes())

    def _lost_writes(self) -> list[str]:
        """Return the fqns of parameters whose placeholders were written (torch calls no `__torch_function__` for `set_`)."""
        if self._placeholders is None or not self._versions:
            return []
        now = self.versions()
        if now == self._versions:
            return []
        self._placeholders.fill_(float("nan"))
        named = zip(self._named, self._versions, now, strict=True)
        return [entry.fqn for entry, before, after in named if before != after]

    def _refuse_lost(self, written: Sequence[str]) -> None:
        if written:
            raise UsageError(
                f"sharded parameters were written in place, and the write has no effect: {', '.join(written)}. Write "
                "inside `with zeroshard.unsharded(module, modifier_rank=0):`."
            )
