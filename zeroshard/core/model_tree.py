"""Finds changes in a model's tree of modules since zeroshard took the model.

Steps, saves and exports use the parameters that the model had then. A module that is added later, or replaces another,
would not train, and its values would be missing from files.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from zeroshard.core.named_parameter import name_of
from zeroshard.errors import UsageError
from zeroshard.torch_private import own_parameters, own_parts


class ModelTree:
    """The modules and parameters that a model has when this object is created."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = _places(model)
        self._record()

    def _record(self) -> None:
        self._parts = own_parts(list(self._model.modules()))
        self._lengths = [*map(len, self._parts)]
        self._filled = [part for part in self._parts if part]
        self._content: list[Any] = [*chain.from_iterable(map(dict.values, self._filled))]

    @property
    def _is_unchanged(self) -> bool:
        """Whether the model is unchanged. Every step reads it, so it compares identities, without a Python call per parameter."""
        content = chain.from_iterable(map(dict.values, self._filled))
        return [*map(len, self._parts)] == self._lengths and all(map(is_, content, self._content))

    def refuse_changes(self) -> None:
        """Raise `UsageError` if a parameter was added, removed or replaced, or now has a name that another parameter had.

        Modules without parameters may be added and removed. Modules may be wrapped in others, which gives their parameters
        new names.
        """
        if self._is_unchanged:
            return
        self.refuse_replaced_modules()
        now = _places(self._model)
        taken = {id(parameter) for _, _, parameter in self._places.values()}
        by_name = {fqn: parameter for fqn, _, parameter in self._places.values()}
        for place, (fqn, _, parameter) in self._places.items():
            if place not in now or now[place][2] is not parameter:
                raise UsageError(
                    f"{fqn} is no longer the tensor that zeroshard took (load_state_dict(assign=True), an assignment, "
                    "weight_norm, prune?), and would not train. Write into it in place, or call model.zero_grad() and remove(), "
                    "and shard again."
                )
        for fqn, _, parameter in now.values():
            if id(parameter) not in taken:
                raise UsageError(
                    f"{fqn} was put into the model after zeroshard took it: it would not train, and files would lack "
                    "it. Change the model before shard(), or call model.zero_grad() and remove(), and shard again, with a new "
                    "optimizer."
                )
            if by_name.get(fqn, parameter) is not parameter:
                raise UsageError(
                    f"{fqn} is not the parameter that zeroshard took: modules changed places, and files "
                    "would mix them up. Change the model before shard(), or call model.zero_grad() and remove(), and shard again."
                )
        self._record()

    def refuse_replaced_modules(self) -> None:
        """Raise if a module with parameters was replaced or removed: a forward would run without the parameters that train.

        `torch.func.functional_call` replaces parameters with other tensors for one forward, which is allowed.
        """
        if self._is_unchanged:
            return
        present = {id(module) for module in self._model.modules()}
        for fqn, module, _ in self._places.values():
            if id(module) not in present:
                raise UsageError(
                    f"{fqn} is no longer part of the model: its module was replaced or removed after zeroshard took "
                    "the model. Change the model before shard(), or call model.zero_grad() and remove(), and shard again, with a "
                    "new optimizer."
                )


def _places(model: nn.Module) -> dict[tuple[int, str], tuple[str, nn.Module, nn.Parameter]]:
    """Return (fqn, module, parameter) by the place of each parameter: its module's `id`, and its name in that module."""
    return {
        (id(module), name): (name_of(f"{prefix}.{name}".lstrip(".")), module, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in own_parameters(module).items()
        if parameter is not None
    }
