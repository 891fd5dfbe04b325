"""Owns what the user sees of a unit's parameters: views of the flat buffer or placeholders, their class, and who wrote to them.

Called by unit. Writes leave a trace in a parameter's version counter, at no cost; those through `.data` leave none, but
while values
are away that attribute is refused as any other reader is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.gradients.gradient_bucket import GradientBucket
from zeroshard.layout.bucketing import NamedParameter
from zeroshard.parameters.shown import classes_of
from zeroshard.schedule.states import State
from zeroshard.storage.raw_memory import is_same_memory


class _Unit(Protocol):
    """What it asks of its unit."""

    modules: tuple[nn.Module, ...]
    named: tuple[NamedParameter, ...]
    sharded_at_rest: bool
    state: State
    used: set[int]
    collectives: Collectives
    replaced_gradients: set[int]
    gradients: list[GradientBucket]

    def unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def round(self) -> None: ...


class Appearance:
    """See the module's docstring.

    Args:
        views: of the flat buffer, one for each parameter, in its shape.
        dtype: of the parameters.
    """

    def __init__(
        self, unit: _Unit, views: Sequence[Tensor], dtype: torch.dtype, whole: type[nn.Parameter] = nn.Parameter
    ) -> None:
        self._unit, self._named, self._views = unit, unit.named, list(views)
        self._index_of = {id(entry.parameter): index for index, entry in enumerate(self._named)}
        self.whole_class = whole
        self._away_class, self._taken_class = classes_of(self, self.whole_class)
        self._ours = (nn.Parameter, self.whole_class, self._away_class, self._taken_class)
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
        """Of the counts, those that are no write of the user's."""
        self._is_hidden = True  # or still the user's own
        self.hides = 0
        """How often the values left: so much of the parameters' version counters tells of no write."""
        by_id = {id(entry.parameter): entry for entry in self._named}
        self._places = [
            (module, name, by_id[id(parameter)])
            for module in unit.modules[0].modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in by_id
        ]
        self.expect_present_grads()

    # ------------------------------------------------------------------ what they look at

    def show_views(self) -> None:
        """The values are here."""
        if self._is_hidden:
            self._refuse_written_placeholders()
        self._become(self.whole_class)
        if self._is_hidden:
            self._is_hidden = False
            for entry, view in zip(self._named, self._views, strict=True):
                entry.parameter.data = view
        self._versions = self.versions()

    def hide(self) -> None:
        """The values are away: whoever asks for them comes to `before_read`."""
        if self._absent_views is None:
            raise UsageError(
                f"{self._named[0].fqn} is an integer parameter, which cannot be sharded; register it as a buffer."
            )
        self._become(self.whole_class)
        for entry, view in zip(self._named, self._absent_views, strict=True):
            entry.parameter.data = view
        self._is_hidden = True
        self._versions = self.versions()
        self._become(self._away_class)

    def outdate_saved(self) -> None:
        """The values are gone: a parameter that autograd saved where no hook of ours saw it is not read as NaN: torch raises.

        Not while somebody looks at views: torch would make their gradients anew, from what the parameter shows now.
        """
        for entry in self._named:
            torch.autograd.graph.increment_version(entry.parameter)
        self.hides += 1
        self._versions = self.versions()

    def make_readers_wait(self) -> None:
        """The values arrive while Python goes on."""
        self._become(self._away_class)

    def show_taken(self) -> None:
        """The step's gradients are all taken: `parameter.grad` says where they are."""
        self._shown_taken, self._in_use = set(self._unit.used), False
        self._exchange(self.whole_class, self._taken_class)

    def show_ordinary(self) -> None:
        """The end of `show_taken`."""
        self._exchange(self._taken_class, self.whole_class)
        self._shown_taken = set()

    def begin_use(self) -> None:
        """A forward or a backward begins. Compiled modules hold for one class of parameters: it is the ordinary one."""
        self._in_use = True
        self._exchange(self._taken_class, self.whole_class)

    def end_use(self) -> None:
        """The end of `begin_use`."""
        self._in_use = False
        self._exchange(self.whole_class, self._taken_class)

    def _exchange(self, before: type[nn.Parameter], after: type[nn.Parameter]) -> None:
        """Of those that `show_taken` shows; nearly always there are none."""
        for index in self._shown_taken:
            parameter = self._named[index].parameter
            if type(parameter) is before:
                parameter.__class__ = after

    def release(self) -> None:
        """Ordinary parameters, each in a storage of its own."""
        self._shown_taken = set()
        self._become(nn.Parameter)
        for entry in self._named:
            entry.parameter.data = entry.parameter.data.clone()

    def _become(self, cls: type[nn.Parameter]) -> None:
        for index, entry in enumerate(self._named):
            if type(entry.parameter) in self._ours:
                is_taken = cls is self.whole_class and index in self._shown_taken and not self._in_use
                entry.parameter.__class__ = self._taken_class if is_taken else cls

    @property
    def tells_readers(self) -> bool:
        """No parameter is of a class of the user's own, whose readers cannot be told."""
        return all(type(entry.parameter) in self._ours for entry in self._named)

    # ------------------------------------------------------------------ who reads (see parameters/shown.py)

    def before_read(self, parameter: Tensor, what: str) -> None:
        """Bring the values, where that takes no other rank. Else raise by name."""
        unit, fqn = self._unit, self._named[self._index_of[id(parameter)]].fqn
        if unit.state is State.PARKED:
            raise UsageError(f"{fqn} is parked by offload_states(): call reload_states() before it is used.")
        if not unit.sharded_at_rest:
            unit.unshard()
            return
        raise UsageError(
            f"{fqn} is sharded at rest, and `{what}` wants its values while its module does not run. Read or write inside "
            "`with zeroshard.unsharded(module):` on every rank (to write, with modifier_rank=0). For files: sharded.save, export."
        )

    def taken_gradient(self, parameter: Tensor) -> str | None:
        """The parameter's fqn, if it got a gradient in this step."""
        index = self._index_of.get(id(parameter))
        return (
            None
            if index is None or index not in self._unit.used - self._unit.replaced_gradients
            else self._named[index].fqn
        )

    def local_gradient(self, parameter: Tensor) -> Tensor | None:
        """This rank's sum over the microbatches so far, which nothing has reduced yet: what is written to it counts."""
        index = self._index_of.get(id(parameter))
        if not parameter.numel():
            return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        sums = [bucket.local_sum(index) for bucket in self._unit.gradients] if index is not None else []
        whole = next((one for one in sums if one is not None and one.numel() == parameter.numel()), None)
        return None if whole is None or whole.dtype != parameter.dtype else whole.view(parameter.shape)

    def replace_gradient(self, parameter: Tensor) -> None:
        """Note that the user wants another gradient, or none, where one was taken in this step."""
        index = self._index_of.get(id(parameter))
        if index is not None and index in self._unit.used:
            self._unit.replaced_gradients.add(index)

    def deep_copy(self, parameter: Tensor, memo: dict[int, Any]) -> nn.Parameter:
        """A copy with the true values; where they are sharded at rest, of the whole unit at once, and every rank must copy."""
        unit = self._unit
        if id(parameter) not in self._index_of:  # a copy of a copy
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        if unit.state is State.PARKED:
            self.before_read(parameter, "deepcopy")
        with unit.collectives.operation("deepcopy"):
            unit.unshard()
        new = [entry for entry in self._named if id(entry.parameter) not in memo]  # ordinary ones may have been copied
        for entry in new:
            memo[id(entry.parameter)] = nn.Parameter(entry.parameter.data.clone(), entry.parameter.requires_grad)
        unit.reshard()
        unit.round()
        for entry in new:
            memo[id(entry.parameter)].__dict__.update(copy.deepcopy(entry.parameter.__dict__, memo))
        copied = memo[id(parameter)]
        assert isinstance(copied, nn.Parameter)
        return copied

    # ------------------------------------------------------------------ who writes

    def versions(self) -> list[int]:
        """Counts of in-place writes of the user's, by parameter."""
        return [entry.parameter._version - own for entry, own in zip(self._named, self._own_writes, strict=True)]

    def begin_look(self) -> list[int]:
        """From now on until `end_look`, writes are counted: the counts as they are now, or as `settle` last left them."""
        self._looks.append(self.versions())
        return self._looks[-1]

    def end_look(self, look: list[int]) -> None:
        """The end of a `begin_look`."""
        self._looks = [other for other in self._looks if other is not look]

    def settle(self) -> None:
        """What was written so far is everybody's now: to nobody who looks it is a change any longer."""
        for look in self._looks:
            look[:] = self.versions()

    def outdate_graphs(self, indices: Iterable[int] | None = None) -> None:
        """These (default: all) were updated: a graph that saved them before must not be differentiated with other values.

        torch's own check finds it, as where an optimizer writes to the parameters themselves.
        """
        for index in range(len(self._named)) if indices is None else indices:
            with torch._C.DisableTorchFunctionSubclass():
                torch.autograd.graph.increment_version(self._named[index].parameter)
            self._own_writes[index] += 1

    def take_written(self) -> set[int]:
        """Which parameters somebody wrote to in place, or gave another tensor as data, since this was last asked."""
        written, now = self.take_new_data(), self.versions()
        if now != self._versions:
            written |= {index for index, version in enumerate(now) if version != self._versions[index]}
            self._versions = now
        return written

    def _has_new_data(self, index: int) -> bool:
        parameter, view = self._named[index].parameter, self._views[index]
        return not is_same_memory(parameter, view) and bool(view.numel())

    def take_new_data(self) -> set[int]:
        """Somebody gave a parameter another tensor as its `.data`: its values are the parameter's. Returns which."""
        found = set()
        for index, (entry, view) in enumerate(zip(self._named, self._views, strict=True)):
            if self._has_new_data(index):
                data = entry.parameter.data
                if data.shape != view.shape or data.dtype != view.dtype:
                    raise UsageError(
                        f"{entry.fqn} was given data of shape {tuple(data.shape)} and {data.dtype}, and had {tuple(view.shape)} "
                        f"and {view.dtype}. Shapes and dtypes are fixed when zeroshard takes the model: convert it before, or say "
                        "precision=Precision(...) (in a config, bf16 or fp16)."
                    )
                view.copy_(data)
                entry.parameter.data = view
                self.outdate_graphs([index])
                found.add(index)
        return found

    def refuse_replaced(self) -> None:
        """Raise where a module holds another tensor under a parameter's name: it would train no longer."""
        for module, name, entry in self._places:
            if module._parameters.get(name) is not entry.parameter:
                raise UsageError(
                    f"{entry.fqn} is no longer the tensor that zeroshard took (load_state_dict(assign=True), an assignment, "
                    "weight_norm?), and would not train. Write into it in place, or call remove() and shard anew."
                )

    def expect_present_grads(self) -> None:
        """What takes a gradient now was taken note of."""
        self._expected_grad = [entry.parameter.requires_grad for entry in self._named]

    def refuse_unfrozen(self, optimized: set[int]) -> None:
        """Raise where a frozen parameter of the optimizer takes gradients now: nobody would reduce them, nor update it."""
        for index, entry in enumerate(self._named):
            parameter = entry.parameter
            if parameter.requires_grad and not self._expected_grad[index] and id(parameter) in optimized:
                raise UsageError(
                    f"{entry.fqn} was unfrozen, and would not train: call update_trainable() (on every rank) after changing "
                    "requires_grad."
                )

    def _refuse_written_placeholders(self) -> None:
        """A write to a parameter of a class of the user's own, while its values were away, went nowhere: say so."""
        if self._placeholders is None or self.tells_readers or not self._versions:
            return
        named = zip(self._named, self._versions, self.versions(), strict=True)
        written = [entry.fqn for entry, before, after in named if before != after]
        if not written and self._placeholders.device.type == "cpu" and not self._placeholders.isnan().all():
            values = zip(self._named, self._placeholders.tolist(), strict=True)
            written = [entry.fqn for entry, value in values if value == value]
        if written:
            self._placeholders.fill_(float("nan"))
            raise UsageError(
                f"sharded parameters were written in place, and the write has no effect: {', '.join(written)}. "
                "Write inside `with zeroshard.unsharded(module, modifier_rank=0):`."
            )
