"""Owns the states that the user's optimizer shows, saves and loads: the states of this rank's shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.named_parameter import NamedParameter
from zeroshard.core.resident import ShardView
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.travelling import Travelling
from zeroshard.errors import UsageError
from zeroshard.optim.several import optimizers_of
from zeroshard.optim.states import refuse_whole_states
from zeroshard.torch_private import is_distributed

SHARDS = "shards"
"""The key in a state dict for the names of its shards: the state dict loads only into the same shards."""


class OptimizerStates:
    """The states of a sharded step's optimizer. The optimizer's own hooks hold this object."""

    def __init__(self, step: ShardedStep) -> None:
        self._step = step
        self._groups = step.groups
        self._inner = step.inner
        self._is_asked_by_user = False
        """Whether a `state_dict()` that the user called is under way."""
        self._inner.register_state_dict_pre_hook(self._before_state_dict)
        self._inner.register_state_dict_post_hook(self._after_state_dict)
        self._inner.register_load_state_dict_pre_hook(self._before_load)
        self._inner.register_load_state_dict_post_hook(self._after_load)
        self._take_states()

    def _before_state_dict(self, _: torch.optim.Optimizer) -> None:
        self._step.abandon_own_step()
        if not self._groups.are_on_shards:
            self._step.schedule.refuse_parked("optimizer.state_dict()")
            refuse_whole_states(
                "Save with sharded.save, or pass zeroshard.DistributedState(sharded) to dcp.save.",
                is_part=any(
                    (unit.policy.optimizer.sharded and unit.collectives.world_size > 1) or unit.others.world_size > 1
                    for unit in self._step.schedule.units
                ),
            )
            self._groups.refuse_changes()
            self._groups.enter_shards()
            self._is_asked_by_user = True

    def _after_state_dict(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Complete the state dict of this rank's shards without a collective. Copy the states of shards that rest elsewhere."""
        if not self._is_asked_by_user:
            return state_dict
        self._is_asked_by_user = False
        self._groups.leave_shards()
        step = self._step
        number_of = {id(value): number for number, value in enumerate(chain.from_iterable(self._groups.shards))}
        for resident in step.residents:
            if not isinstance(resident, Travelling):
                continue
            with step.sub_groups.opened(resident):
                for view in resident.views:
                    state = step.inner.state.get(view.value, {})
                    if state:
                        # Counts too: beside copied moments, a count that goes on would be of another step.
                        state_dict["state"][number_of[id(view.value)]] = {
                            name: _copied(value) for name, value in state.items()
                        }
        return {**state_dict, SHARDS: self._names_of_shards()}

    def _names_of_shards(self) -> list[list[Any]]:
        """Return [fqn, first element, numel] of each part of a parameter on this rank, in the order of the state dict's numbers."""
        parts = chain.from_iterable(self._step.parts_of[parameter] for group in self._groups.ids for parameter in group)
        return [[view.named.fqn, view.parameter_start, view.numel] for _, view in parts]

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._step.abandon_own_step()
        self._step.schedule.refuse_parked("optimizer.load_state_dict()")
        self._groups.refuse_changes()
        # The names are those of this optimizer, if its parameters have names.
        groups = [
            {key: value for key, value in one.items() if key != "param_names"} for one in state_dict["param_groups"]
        ]
        state_dict = {**state_dict, "param_groups": groups}
        if SHARDS not in state_dict and not _fits(state_dict, self._groups.shards):
            state_dict = self._cut(state_dict)
        else:  # torch keeps tensors whose dtype and device fit, which the caller may load or save again
            states = state_dict["state"].items()
            copied = {number: {name: _copied(value) for name, value in state.items()} for number, state in states}
            state_dict = {**state_dict, "state": copied}
        # torch numbers parameters and would assign the states of other shards to the wrong parameters.
        own = self._names_of_shards()
        if state_dict.get(SHARDS, own) != own:
            raise UsageError(
                "this state dict holds other shards: it loads only on the rank that made it, with the same world "
                "size, policy and frozen parameters. Otherwise use sharded.save and load."
            )
        self._step.sub_groups.settle()
        self._groups.enter_shards()
        return state_dict

    def _cut(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the state dict of an unsharded optimizer of the same parameters."""
        if [len(group["params"]) for group in state_dict["param_groups"]] != [len(group) for group in self._groups.ids]:
            raise UsageError(
                "this state dict has other param groups than this optimizer: groups of "
                f"{[len(group['params']) for group in state_dict['param_groups']]} parameters instead of "
                f"{[len(group) for group in self._groups.ids]}. Make the same groups."
            )
        named = {id(entry.parameter): entry for unit in self._step.schedule.units for entry in unit.named}
        states: dict[int, dict[str, Any]] = {}
        groups = []
        count = 0
        for group, parameters in zip(state_dict["param_groups"], self._groups.ids, strict=True):
            first = count
            for number, parameter in zip(group["params"], parameters, strict=True):
                state = {
                    name: value.full_tensor() if is_distributed(value) else value
                    for name, value in state_dict["state"].get(number, {}).items()
                }
                # Every rank checks the shapes, with or without a part of the parameter.
                self._refuse_other_shapes(named[parameter], state)
                for _, view in self._step.parts_of[parameter]:
                    if state:
                        states[count] = {name: _part(view, name, value) for name, value in state.items()}
                    count += 1
            groups.append({**group, "params": list(range(first, count))})
        return {**state_dict, "state": states, "param_groups": groups}

    def _refuse_other_shapes(self, entry: NamedParameter, state: Mapping[str, Any]) -> None:
        """Raise if a state cannot fit this parameter. Optimizers of whole parameters have states of other shapes."""
        shape = tuple(entry.placement.shape)
        for name, value in state.items():
            has_elements = isinstance(value, Tensor) and value.ndim > 0 and name not in _COUNTS
            if has_elements and tuple(value.shape) != shape and not self._step.whole_parameters:
                raise UsageError(
                    f"this state dict was saved for other parameters: {name} of {entry.fqn} has shape "
                    f"{tuple(value.shape)}, and the parameter {shape}. Load one that was saved for this model."
                )

    def _after_load(self, _: torch.optim.Optimizer) -> None:
        self._groups.leave_shards()
        self._step.schedule.is_stepping = False  # all states belong to one step again
        self._take_states()
        for resident in self._step.residents:
            if isinstance(resident, Travelling):  # the new states go to their place
                resident.expect_new_states()
                with self._step.sub_groups.opened(resident, write=True):
                    pass

    def _take_states(self) -> None:
        """Refuse the user's parameters as keys of `optimizer.state`, which is keyed by this rank's shards."""
        optimizers = optimizers_of(self._inner)
        # Optimizers other than torch's may keep `state` elsewhere, too.
        if all(type(one).__module__.startswith("torch.optim.") for one in optimizers):
            states = StatesOfShards(self._inner.state, self._refuse_parameter)
            for one in (self._inner, *optimizers):
                one.state = states

    def _refuse_parameter(self, key: object) -> None:
        if id(key) in self._step.parts_of:
            fqn = self._step.schedule.fqns[id(key)]
            raise UsageError(
                f"optimizer.state holds the states of this rank's shards, and not those of {fqn}. Call on every rank "
                f'sharded.states.get("{fqn}", "exp_avg") or set, or local and set_local for this rank\'s part.'
            )


class StatesOfShards(defaultdict[Any, dict[str, Any]]):
    """The states of this rank's shards, which replace an optimizer's `state`.

    Args:
        refuse: raises if a key is a parameter of the model, whose states would be missed or lost.
    """

    def __init__(self, states: Mapping[Any, dict[str, Any]], refuse: Callable[[object], None]) -> None:
        super().__init__(dict, states)
        self._refuse = refuse

    def __setitem__(self, key: Any, value: Any) -> None:  # `state[key]` sets a missing key
        self._refuse(key)
        super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        self._refuse(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the states of a shard, or the default."""
        self._refuse(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the states of a shard, which become the default if it has none."""
        self._refuse(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the states of a shard, and return them."""
        self._refuse(key)
        return super().pop(key, *default)

    def copy(self) -> Any:
        """Return an ordinary defaultdict of the same states."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        if self:
            raise UsageError(
                "a copy or a pickle of the optimizer would lose its states, which are of this rank's shards. Copy "
                "optimizer.state_dict(), or save a checkpoint."
            )
        return defaultdict, (dict,)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _part(view: ShardView, name: str, value: Any) -> Any:
    """Return a copy of a view's part of a state. States whose shape is not the parameter's are copied whole."""
    if not isinstance(value, Tensor):
        return value
    placement = view.named.placement
    if tuple(value.shape) != tuple(placement.shape) or name in _COUNTS:
        return value.clone()
    flat = placement.part(value.detach()).reshape(-1)
    return flat[view.parameter_start : view.parameter_start + view.numel].view(view.value.shape).clone()


_COUNTS = {"step", "mu_product", "eta", "mu"}
"""The states of torch's optimizers that are one number for each parameter, even if the parameter has no dimensions."""


def _fits(state_dict: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the groups are as long as this rank's, and each state of a shard has the shard's shape."""
    if [len(group["params"]) for group in state_dict["param_groups"]] != [len(group) for group in groups]:
        return False
    shards = [shard for group in groups for shard in group]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, shard in zip(numbers, shards, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, Tensor) and name not in _COUNTS and value.shape != shard.shape:
                return False
    return True
