"""Owns the tensors and classes that a unit's parameters show to the user, and the record of writes to them.

A user's parameter stays the same object. While its values are absent or arriving, or its gradient is in shards, its class is a
subclass of `nn.Parameter` that reports reads to the unit. torch's own lazy parameters change their class, too. Results of
operations on a parameter are never of these classes.

Writes leave a trace in a parameter's version counter, at no cost. Writes through `.data` leave none. Where such a write would be
lost, a parameter records that its `.data` was read. While values are absent, a read of `.data` is refused like any other read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.named_parameter import NamedParameter
from zeroshard.parameters.context import Live
from zeroshard.storage.buffers import in_own_storage
from zeroshard.torch_private import (
    GRAD,
    distributed_class,
    grad_of,
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
"""Operations of torch that need no values of the tensor, among them getters and setters of attributes."""
VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}
"""Attributes that show values. All other attributes describe the tensor."""
CONVERSIONS = {"to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16"}
"""Operations that return the tensor itself if it already has the requested dtype and device."""
DATA: Any = torch.Tensor.data
"""The slot of `data`, past the properties of subclasses."""


class Appearance:
    """The appearance of a unit's parameters to the user (see the module's docstring).

    Args:
        named: the unit's parameters.
        views: views of the flat buffer, one for each parameter, in its shape.
        owner: their unit, which is called for reads, and for gradients that the user sets.
        whole: the class of parameters that have their values; DTensors have a different one from other parameters.
        separate: whether to show each view in a storage of its own, as libraries that write files expect. The flat buffer
            must then keep its memory as long as parameters show it.

    Attributes:
        placeholders: the data of parameters without values, one NaN for each; None if their values never leave.
        hides: the number of times that the values were freed. Version counters count these, too.
    """

    def __init__(
        self,
        named: Sequence[NamedParameter],
        views: Sequence[Tensor],
        owner: Any,
        whole: type[nn.Parameter],
        *,
        separate: bool = False,
    ) -> None:
        self._named = named
        self._separate = separate
        self.whole_class = whole
        self._is_distributed = named[0].is_distributed
        self._views = list(views)
        self._ordinary: type[nn.Parameter] = nn.Parameter
        if self._is_distributed:
            # A DTensor holds the view itself, which counts the user's writes, but not those of all-gathers into the flat buffer.
            self._views = [view.data for view in views]
            kind = distributed_class()
            assert kind is not None
            self._ordinary = kind
        self._absent_class, self._taken_class = classes_of(owner, self.whole_class, self._ordinary)
        self._ours = (self._ordinary, self.whole_class, self._absent_class, self._taken_class)
        self.placeholders: Tensor | None = None
        self._absent_views: list[Tensor] = []
        if views[0].is_floating_point():
            nan = torch.full((len(named),), math.nan, dtype=views[0].dtype, device=views[0].device)
            self.placeholders = nan
            self._absent_views = [nan[index].expand(entry.shape) for index, entry in enumerate(named)]
        self._versions: list[int] = []
        self._looks: list[list[int]] = []
        self._shown_taken: set[int] = set()
        self._in_use = False
        self._own_writes = [0] * len(self._named)
        """For each parameter, the number of counted writes that are not the user's."""
        self.hides = 0
        self.expect_present_grads()

    # ------------------------------------------------------------------ the tensors that they show

    def show_views(self) -> None:
        """Show the values again, instead of placeholders or of tensors that the user assigned."""
        try:
            self.refuse_lost_writes()
        finally:
            self._become(self.whole_class)
            for entry, view in zip(self._named, self._views, strict=True):
                self._show(entry, view)
            self._versions = self.versions()

    def _show(self, entry: NamedParameter, view: Tensor) -> None:
        entry.show(in_own_storage(view) if self._separate else view)

    def end_wait(self) -> None:
        """End `make_readers_wait`: the values have arrived in the views that are shown."""
        self._become(self.whole_class)
        self._versions = self.versions()

    def hide(self) -> None:
        """Hide the values, so that every read calls the unit's `before_read`."""
        if not self._absent_views:
            raise UsageError(
                f"{self._named[0].fqn} is an integer parameter, which cannot be sharded; register it as a buffer."
            )
        self._become(self.whole_class)
        for entry, view in zip(self._named, self._absent_views, strict=True):
            entry.show(view)
        self._versions = self.versions()
        self._become(self._absent_class)

    def outdate_saved(self) -> None:
        """Outdate parameters that autograd saved outside of our hooks, so that torch raises an error instead of reading NaN.

        Do not call it while the user has views: torch would rebuild their gradient functions from the present data.
        """
        for entry in self._named:
            torch.autograd.graph.increment_version(entry.parameter)
        self.hides += 1
        self._versions = self.versions()

    def make_readers_wait(self) -> None:
        """Make readers wait for values that arrive while Python continues."""
        self._become(self._absent_class)

    def show_taken(self, used: Iterable[int]) -> None:
        """Show a `TakenGradient` as `grad` of the `used` parameters, whose gradients were all taken, and of no others."""
        self._exchange(self._taken_class, self.whole_class)
        self._shown_taken = set(used)
        self.end_use()

    def begin_use(self) -> None:
        """Show ordinary parameters while a forward or a backward runs: compiled modules are valid for one class of parameters."""
        self._in_use = True
        self._exchange(self._taken_class, self.whole_class)

    def end_use(self) -> None:
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
            if self.is_own(entry):
                is_taken = cls is self.whole_class and index in self._shown_taken and not self._in_use
                entry.parameter.__class__ = self._taken_class if is_taken else cls

    def is_own(self, entry: NamedParameter) -> bool:
        """Return whether a parameter is of zeroshard's classes, or an ordinary one, and not of a user's own class."""
        return type(entry.parameter) in self._ours

    @property
    def tells_readers(self) -> bool:
        """Whether reads of all parameters can be intercepted. Those of a parameter of a user's own class cannot."""
        return all(map(self.is_own, self._named))

    # ------------------------------------------------------------------ the user's writes

    def versions(self) -> list[int]:
        """Return the number of the user's in-place writes to each parameter."""
        count = writes_of if self._is_distributed else version_of
        with past_torch_function():  # a count is no read
            return [count(entry.parameter) - own for entry, own in zip(self._named, self._own_writes, strict=True)]

    def begin_look(self) -> list[int]:
        """Look for writes until `end_look`. Return the write counts to compare with, which `restart_looks` resets."""
        self._looks.append(self.versions())
        return self._looks[-1]

    @property
    def has_changes_to_report(self) -> bool:
        """Whether the parameters were written to, or were assigned new `.data`, since a `begin_look` that has not ended."""
        if not self._looks:
            return False
        now = self.versions()
        return any(look != now for look in self._looks) or any(self._given_data())

    def end_look(self, look: list[int]) -> None:
        """End the look that `begin_look` began."""
        self._looks = [other for other in self._looks if other is not look]

    def restart_looks(self) -> None:
        """Reset the counts of all looks that have not ended: they no longer report the writes so far."""
        for look in self._looks:
            look[:] = self.versions()

    def outdate_graphs(self, indices: Iterable[int] | None = None) -> None:
        """Record that parameters (default: all) were updated, so that torch refuses to differentiate graphs that saved them before.

        torch does the same where an optimizer writes to the parameters themselves.
        """
        if indices is None:
            indices = range(len(self._named))
        for index in indices:
            with past_torch_function():
                torch.autograd.graph.increment_version(self._named[index].parameter)
            self._own_writes[index] += 1

    def collect_written(self) -> set[int]:
        """Return the parameters that were written to in place, or were assigned new `.data`, since the last call."""
        written = self.adopt_new_data()
        now = self.versions()
        if now != self._versions:
            written |= {index for index, version in enumerate(now) if version != self._versions[index]}
            self._versions = now
        return written

    def adopt_new_data(self) -> set[int]:
        """Copy tensors that the user assigned as `.data` into the parameters' memory. Return the indices of these parameters."""
        found = set()
        for index, entry, view in self._given_data():
            data = entry.local
            if data.shape != view.shape or data.dtype != view.dtype:
                raise UsageError(
                    f"{entry.fqn} was given data of shape {tuple(data.shape)} and {data.dtype}, and had "
                    f"{tuple(view.shape)} and {view.dtype}. Shapes and dtypes are fixed when zeroshard takes the "
                    "model: convert it before, or pass precision=Precision(...) (in a config, bf16 or fp16)."
                )
            view.copy_(data)
            self._show(entry, view)
            self.outdate_graphs([index])
            found.add(index)
        return found

    def _given_data(self) -> Iterator[tuple[int, NamedParameter, Tensor]]:
        """Yield (index, parameter, view) for each parameter whose data is no longer its view of the flat buffer."""
        for index, (entry, view) in enumerate(zip(self._named, self._views, strict=True)):
            shown = entry.local if self._is_distributed else entry.parameter
            if view.numel() and not self._is_shown(shown, view):
                yield index, entry, view

    def _is_shown(self, shown: Tensor, view: Tensor) -> bool:
        # The storage of a shared tensor moves to other memory (`model.share_memory()`).
        return shown.data_ptr() == view.data_ptr() if self._separate else is_same_memory(shown, view)

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
        """Raise if a parameter was written to while it showed a placeholder: its values at rest did not change.

        torch calls no `__torch_function__` for `set_`.
        """
        now = self.versions()
        if self.placeholders is None or not self._versions or now == self._versions:
            return
        self.placeholders.fill_(math.nan)
        named = zip(self._named, self._versions, now, strict=True)
        written = [entry.fqn for entry, before, after in named if before != after]
        raise UsageError(
            f"sharded parameters were written in place, and the write has no effect: {', '.join(written)}. Write "
            "inside `with zeroshard.unsharded(module, modifier_rank=0):`."
        )


# ---------------------------------------------------------------------- the classes of parameters


def whole_class(attributes: type | None, ordinary: type[nn.Parameter] = nn.Parameter) -> type[nn.Parameter]:
    """Return the class of unsharded parameters: `ordinary`, or a subclass of it with `attributes`. Copies are ordinary."""
    # Parameters of a dry run have no values.
    if attributes is None or ordinary not in (nn.Parameter, distributed_class()):
        return ordinary

    class Whole(attributes, ordinary):  # type: ignore[misc, valid-type]
        """A parameter with additional attributes. Operations on it have no overhead."""

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            copied = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    return Whole


def notes_data(live: Live) -> type:
    """Make attributes for `whole_class` that note in `live` that the user read `data`: later writes through it leave no trace."""

    class NotesData:
        @property
        def data(self) -> Tensor:
            if not is_traced():
                live.data_was_read = True
            data: Tensor = DATA.__get__(self)
            return data

        @data.setter
        def data(self, data: Tensor) -> None:
            DATA.__set__(self, data)

    return NotesData


def classes_of(
    owner: Any, whole: type[nn.Parameter], ordinary: type[nn.Parameter]
) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """Return two classes: of parameters whose values are absent or arriving, and of those whose gradient was taken.

    Args:
        owner: their unit, which is called when the user touches them. (A type would import upwards.)
        whole: the class of parameters that have their values.
        ordinary: the class that the user gave them.
    """
    shown: dict[int, Tensor] = {}
    """By `id` of a parameter, the tensor that its `grad` is while its gradient is taken."""

    class Taken(whole):  # type: ignore[misc, valid-type]
        """An `nn.Parameter` whose `grad` represents a gradient in shards. Operations on it have no overhead."""

        @property
        def grad(self) -> Tensor | None:  # type: ignore[override]
            own = grad_of(self)
            if own is not None or is_traced():  # torch.compile describes parameters, without reading them
                return own
            fqn: str | None = owner.taken_gradient(self)
            if fqn is None:
                return None
            local: Tensor | None = owner.local_gradient(self)
            if local is not None:
                return local
            if id(self) not in shown:
                with past_torch_function():
                    nothing = torch.empty((1,) * self.ndim, dtype=self.dtype, device=self.device)
                    gradient = nothing.expand(self.shape).as_subclass(TakenGradient)
                gradient.fqn = fqn
                gradient.parameter = self
                gradient.owner = owner
                shown[id(self)] = gradient
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
            owner.before_read(self, "pickle")
            shown_as = type(self)
            self.__class__ = ordinary  # type: ignore[assignment]
            try:
                return self.__reduce_ex__(protocol)
            finally:
                self.__class__ = shown_as

    class Absent(Taken):
        """A parameter without values: torch operations through any reference to it call `__torch_function__` first."""

        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            attribute = _attribute_of(func)
            if func.__name__ not in METADATA or attribute in VALUES:
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
        return Absent, Taken

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

    return AbsentDistributed, Taken


def _attribute_of(func: Callable[..., Any]) -> str:
    """Return the name of the attribute that `func`, a getter or setter of torch, reads or sets; "" for other operations."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _flat(args: tuple[Any, ...], kwargs: Any) -> list[Any]:
    found: list[Any] = []
    for one in [*args, *(kwargs or {}).values()]:
        found += one if isinstance(one, list | tuple) else [one]
    return found


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return whether a conversion returns the tensor itself, or sets `data` to it, as `module.to(device)` does."""
    if func.__name__ == "__set__":
        return _attribute_of(func) == "data" and args[0] is args[1]
    if func.__name__ not in CONVERSIONS:
        return False
    with past_torch_function():
        return func(*args, **(kwargs or {})) is args[0]


class TakenGradient(Tensor):
    """The `parameter.grad` from the last backward of a step to `zero_grad`: it has a shape and a dtype, but no values.

    The mean over ranks is in shards. The norms, factors and bounds of torch's clipping act on these shards.
    """

    fqn: str
    parameter: Tensor
    owner: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        attribute = _attribute_of(func)
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
            f"GradScaler work on it (as do norm, mul_, div_, clamp_), and {func.__name__} does not. To read it, call "
            f'sharded.states.get("{fqn}", "gradients"); to drop the gradients, optimizer.zero_grad().'
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
"""torch's operations on many gradients at once, which its clipping uses with `foreach=True`. Here they run one by one."""


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Run torch.amp.GradScaler's operation on all gradients of a device: report values that are not finite, and multiply."""
    largest = [torch.linalg.vector_norm(gradient, math.inf) for gradient in gradients if gradient.numel()]
    if not all(torch.isfinite(each) for each in largest):
        found_inf.fill_(1.0)
    for gradient in gradients:
        gradient.mul_(inverse_scale)
