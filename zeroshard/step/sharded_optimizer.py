"""Owns the step: an unmodified torch optimizer that is handed views of shards. Called by the user, or the engine.

Each parameter that has elements in a shard is one 1-D tensor there, in its own param group: so it keeps its own state, step
count and hyperparameters, and one that no rank used in a step is left alone, as plain PyTorch leaves it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.gradients.norm import coefficient_of, norm_of
from zeroshard.gradients.shard import Shard
from zeroshard.layout.bucketing import NamedParameter
from zeroshard.layout.layout import Piece
from zeroshard.observe.memory import STATES_PER_PARAMETER
from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.policy import Policy
from zeroshard.schedule.schedule import Schedule
from zeroshard.schedule.unit import Unit
from zeroshard.step.driven import Driven
from zeroshard.step.mean_gradients import MeanGradients
from zeroshard.step.no_optimizer import NoOptimizer
from zeroshard.step.resident import Resident, placeholder
from zeroshard.step.shard_view import ShardView, runs_along
from zeroshard.step.step_guard import StepGuard
from zeroshard.step.sub_groups import SubGroups
from zeroshard.step.whose_shards import SHARDS, names_of_shards, refuse_other_shards
from zeroshard.storage.base import Storage
from zeroshard.storage.storages import Storages


class ShardedOptimizer(Driven, torch.optim.Optimizer):
    """A torch optimizer over this rank's shards; schedulers, `param_groups` and `state_dict` as ever.

    Args:
        inner: the user's optimizer, over the parameters of the units. Its `param_groups` are given the shards' views
            instead, in the same groups; `step` is its own.
        storages, policy: where states rest, and how what rests elsewhere comes to the step.
        whole_parameters: the layout cuts no parameter, and `inner` is to see their true shapes.

    `param_groups` and `state` are the inner optimizer's own objects, so a change of `lr` by whatever scheduler takes effect.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        schedule: Schedule,
        collectives: Collectives,
        storages: Storages,
        policy: Policy,
        *,
        whole_parameters: bool = False,
    ) -> None:
        self.inner = inner
        self._schedule, self._collectives = schedule, collectives
        self._storages, self._policy = storages, policy
        self._used: tuple[bool, ...] = ()
        self._used_at = -1  # how many gradients the schedule had taken when `_used` was agreed upon
        self.gradients = MeanGradients()
        self._whole_parameters = whole_parameters
        self.views: list[ShardView] = []
        self._residents: list[Resident] = []
        self._parked: list[tuple[Tensor, Tensor]] = []
        self._first_state = dict(next(iter(inner.state.values()), {}))
        """What an optimizer keeps of a parameter before its first step: nothing, or, as Adagrad, some constants."""
        inner.state.clear()
        self._guard = StepGuard(inner)
        self.groups = [[id(parameter) for parameter in group["params"]] for group in inner.param_groups]
        """`id`s of the user's parameters, group by group."""
        self.lay_out()
        self._is_laid_out = False
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups, self.state = inner.param_groups, inner.state
        self._is_laid_out = True

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.inner!r})"

    def lay_out(self) -> None:
        """Find what this rank updates of the schedule's units. A view that was there before stays the tensor that it was."""
        before = {id(resident.shard): resident for resident in self._residents}
        trainable = [unit for unit in self._schedule.units if unit.trainable]
        self._flags = [(unit, index) for unit in trainable for index in range(len(unit.named))]
        flag_of = {flag: number for number, flag in enumerate(self._flags)}
        self._residents = []
        self._unit_of: dict[Resident, Unit] = {}
        for unit in trainable:
            for shard in unit.optimizer_shards():
                there = before.get(id(shard))
                # A shard's padding is zero.
                views = [
                    self._view(shard, piece, unit.named[piece.index], flag_of[unit, piece.index], number, there)
                    for number, piece in enumerate(shard.pieces)
                ]
                resident = there or Resident(shard, views, self.inner.state)
                resident.views = views
                self._residents.append(resident)
                self._unit_of[resident] = unit
        self.views = [view for resident in self._residents for view in resident.views]
        by_parameter: dict[int, list[Tensor]] = {}
        for view in self.views:
            by_parameter.setdefault(id(view.named.parameter), []).append(view.value)
        for group, parameters in zip(self.inner.param_groups, self.groups, strict=True):
            group["params"] = [value for parameter in parameters for value in by_parameter.get(parameter, [])]
        alive = {view.value for view in self.views}
        for value in [value for value in self.inner.state if value not in alive]:
            del self.inner.state[value]
        states = STATES_PER_PARAMETER.get(type(self.inner).__name__, 2)
        states += any(group.get("amsgrad") or group.get("centered") for group in self.inner.param_groups)
        self._sub_groups = SubGroups(self._residents, self._storages, self._policy, states)
        for resident in self._residents if self._first_state else ():
            new = [view for view in resident.views if view.value not in self.inner.state]
            if new:
                with self._sub_groups.opened(resident, write=True):
                    self.inner.state.update({view.value: self._first_states(view) for view in new})

    def _first_states(self, view: ShardView) -> dict[str, Any]:
        return {
            name: first.clone() if first.ndim == 0 else torch.full_like(view.value, first.reshape(-1)[0].item())
            for name, first in self._first_state.items()
        }

    def _view(
        self, shard: Shard, piece: Piece, named: NamedParameter, flag: int, number: int, there: Resident | None
    ) -> ShardView:
        if there is not None:
            value = there.views[number].value
        else:
            shape = named.shape if self._whole_parameters else (piece.numel,)
            value = torch.empty((), dtype=shard.master.dtype, device=shard.step.device).expand(shape)
        return ShardView(named, flag, value, piece.start, piece.numel, piece.parameter_start)

    # ------------------------------------------------------------------ the step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters with the mean gradients. Every rank must call it.

        Args:
            closure: runs forward and backward; called once, before the update. Its value is returned.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        if self.driver is not None and not self._is_driven:
            return self.driver()
        self._agree_on_used()
        self._schedule.begin_step()
        before = [{key: group[key] for key in group if key != "params"} for group in self.inner.param_groups]
        result: Any = None
        left = Counter(self._unit_of[resident] for resident in self._residents)
        updated = {flag for flag, used in zip(self._flags, self._used, strict=True) if used}
        waiting = deque(unit for unit in self._schedule.in_order() if unit.trainable)

        def sync(residents: list[Resident]) -> None:
            # In one order on every rank, however each cuts its sub-groups.
            left.subtract(self._unit_of[resident] for resident in residents)
            while waiting and not left[waiting[0]]:
                unit = waiting.popleft()
                unit.appearance.outdate_graphs(index for index in range(len(unit.named)) if (unit, index) in updated)
                self._schedule.sync_parameters(unit)

        if not self._residents:
            result = self.step_inner()  # nothing to update: its hooks run, or it says so
        for residents in self._sub_groups.run(sync):
            # To the optimizer it is one step: what it keeps of a group as a whole is what it was.
            for group, options in zip(self.inner.param_groups, before, strict=True):
                for key in group.keys() - options.keys() - {"params"}:
                    del group[key]
                group.update(options)
            for resident in residents:
                self._lend_gradients(resident)
            result = self.step_inner()
            for resident in residents:
                for view in resident.views:
                    view.value.grad = None
        self._schedule.end_step()
        return result

    def step_inner(self) -> Any:
        """One call of the inner optimizer, with the gradients that its tensors have."""
        with self._guard.lifted():
            return self.inner.step()

    def release_inner(self) -> None:
        """Zeroshard is taken off: the inner optimizer holds shards of a model that is no more."""
        self._guard.is_removed = True

    def _lend_gradients(self, resident: Resident) -> None:
        parts = resident.gradient_parts
        if parts is None:
            flat = resident.gradient
            assert flat is not None
            flat = self.gradients.lent(resident.shard, flat)
            parts = [view.part_of(flat) for view in resident.views]
        for view, part in zip(resident.views, parts, strict=True):
            if self._used[view.flag]:
                view.value.grad = part.detach()  # a use of the memory that shows, if somebody keeps it beyond zero_grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Their buffers stay, to be overwritten."""
        self._used_at = -1
        self.gradients.reset()
        self._schedule.forget_gradients()
        if not self._schedule.parked:
            self._sub_groups.prefetch()

    # ------------------------------------------------------------------ the norm

    def grad_norm(self) -> float:
        """The L2 norm of the mean gradients of all parameters. Every rank must call it, after the last backward."""
        return float(self._exchange(norm=True))

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> float | Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm`; returns the norm before.

        Every rank must call it, after the last backward of the step. A norm that is not finite leaves them as they are.

        Returns:
            A number; where an accelerator computes it, a tensor of shape [] there: only who reads it waits.

        Args:
            max_norm: None leaves the norm as it is.
            loss_scale: what the loss was multiplied by before the backward; the gradients are divided by it first.
        """
        norm = self._norm = self._exchange(norm=True) / loss_scale
        if max_norm is not None or loss_scale != 1.0:
            coefficient = coefficient_of(norm, max_norm, loss_scale)
            self.gradients.scale((resident.shard for resident in self._residents), coefficient)
        return norm

    def not_finite(self) -> tuple[str, ...]:
        """The fqns of the parameters whose gradient has an element that is infinite or NaN. Every rank must call it."""
        self._schedule.finish_gradients()
        own = bytearray(len(self._flags))
        looks: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for resident in self._residents:
            with self.gradients.opened(resident.shard) as gradient:
                for view in resident.views:
                    part = gradient[view.start : view.start + view.numel]
                    looks.setdefault(part.device, []).append((view.flag, torch.isfinite(part).all()))
        for found in looks.values():  # one look at each device
            answers = torch.stack([answer for _, answer in found]).tolist()
            for (flag, _), is_finite in zip(found, answers, strict=True):
                own[flag] |= not is_finite
        messages = self._collectives.exchange(bytes(own), "the flags of gradients that are not finite")
        anywhere = [any(flags) for flags in zip(*messages, strict=True)]
        return tuple(unit.named[i].fqn for (unit, i), found in zip(self._flags, anywhere, strict=True) if found)

    def used(self) -> dict[str, bool]:
        """By fqn, whether any rank used the parameter in this step. Every rank must call it, after the last backward."""
        self._agree_on_used()
        return {unit.named[i].fqn: used for (unit, i), used in zip(self._flags, self._used, strict=True)}

    def _agree_on_used(self) -> None:
        """Hear who used which parameter, unless nothing came since that was last asked: of a backward, or of a user's hand."""
        if self._schedule.asks_for_gradients() or self._used_at != self._schedule.gradients_taken:
            self._exchange(norm=False)

    def residents(self) -> Iterator[Resident]:
        """What this rank updates: the shards, and their parts by parameter."""
        yield from self._residents

    def opened(self, resident: Resident, *, write: bool = False, read: bool = True) -> AbstractContextManager[None]:
        """Inside, master weights and states of one shard are memory, wherever they rest: see `SubGroups.opened`."""
        return self._sub_groups.opened(resident, write=write, read=read)

    def settle(self) -> None:
        """Wait until every state is where it rests; raises what went wrong on the way."""
        self._sub_groups.settle()

    def park(self, *, states: bool) -> None:
        """The tensors that it updates, and with `states` those that it keeps, will be elsewhere for a while."""
        for resident in self._residents:
            resident.park()
        kept = [value for state in self.state.values() for value in state.values()] if states else []
        self._parked = [(value, value.data) for value in kept if isinstance(value, Tensor) and value.ndim]
        for value, _ in self._parked:
            value.data = placeholder(value)

    def unpark(self) -> None:
        """They are where they were."""
        for resident in self._residents:
            resident.unpark()
        for value, memory in self._parked:
            value.data = memory
        self._parked = []

    def kept_in(self, storage: Storage) -> list[Tensor]:
        """What the optimizer keeps as memory of `storage`."""
        here = [r for r in self._residents if r.shard.step is storage and r.shard.home is storage]
        kept = [value for r in here for view in r.views for value in self.state.get(view.value, {}).values()]
        return [value for value in kept if isinstance(value, Tensor)]

    def refuse_parked(self, what: str) -> None:
        """Raise where model states that `what` needs are away."""
        self._schedule.refuse_parked(what)

    def abandon(self) -> None:
        """Forget what an error left behind: states will be loaded anew."""
        self._sub_groups.abandon()

    @property
    def frames_nbytes(self) -> int:
        """Bytes of memory through which states that rest elsewhere come to the step."""
        return self._sub_groups.nbytes

    def _exchange(self, norm: bool) -> float | Tensor:
        """One small message: who used which parameter, or wrote to it, and, where asked for, the norm, which is returned."""
        self._schedule.finish_gradients()
        sums = self.gradients.squares_by_shard([resident.shard for resident in self._residents]) if norm else {}
        written = {unit: unit.written(owners_follow=True) for unit in dict.fromkeys(unit for unit, _ in self._flags)}
        own_flags = bytes((index in unit.used) | (index in written[unit]) << 1 for unit, index in self._flags)
        collectives = self._collectives
        own = sums.get(collectives.shard, torch.zeros((), dtype=torch.float64)) if norm else None
        by_rank, messages = collectives.exchange_values(
            own, own_flags, "the gradient norm and the flags of used parameters"
        )
        flags = [reduce(or_, each) for each in zip(*messages, strict=True)]
        self._used = tuple(bool(flag & 1) for flag in flags)
        for unit in dict.fromkeys(unit for (unit, _), flag in zip(self._flags, flags, strict=True) if flag & 2):
            unit.take_written()
        self._used_at = self._schedule.gradients_taken
        if not norm:
            return 0.0
        if (
            len(sums) == collectives.world_size
        ):  # an unsharded optimizer holds every shard, bit for bit the same as its owner's
            return norm_of(torch.stack([sums[shard] for shard in sorted(sums)]).to(by_rank.device))
        return norm_of(collectives.by_shard(by_rank))

    # ------------------------------------------------------------------ torch.optim's surface

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards of the optimizer state. Runs no collective. What is on disk is copied into memory."""
        self._schedule.refuse_parked("optimizer.state_dict()")
        whole = {**self.inner.state_dict(), SHARDS: names_of_shards(self.inner, self.views)}
        number_of = {id(p): n for n, p in enumerate(p for group in self.inner.param_groups for p in group["params"])}
        for resident in self._residents:
            if resident.is_in_place:
                continue
            with self.opened(resident):
                for view in resident.views:
                    state = self.state.get(view.value, {})
                    if state:
                        whole["state"][number_of[id(view.value)]] = {
                            name: value.clone() if runs_along(value, name, view.value) else value
                            for name, value in state.items()
                        }
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank, with the same world size and policy."""
        self._schedule.refuse_parked("optimizer.load_state_dict()")
        refuse_other_shards(state_dict, self.inner, self.views)
        self._sub_groups.settle()
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for resident in self._residents:
            resident.look_in(self.state)
            with self.opened(resident, write=True):  # what rests elsewhere goes there
                pass

    @property
    def groups_are_known(self) -> bool:
        """Whether there is anything to update at all."""
        return not isinstance(self.inner, NoOptimizer)

    def list_group(self, param_group: dict[str, Any]) -> None:
        """Know of another param group, over the user's parameters; `lay_out` gives it their views."""
        if isinstance(self.inner, MuonWithAdamW):
            raise UsageError(
                "MuonWithAdamW takes its groups when it is made: list the parameters there, frozen as they are."
            )
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        known = {parameter for group in self.groups for parameter in group}
        again = sum(id(parameter) in known for parameter in parameters)
        if again:
            raise UsageError(f"{again} of the new param group's parameters are in a group of the optimizer already.")
        self.groups.append([id(parameter) for parameter in parameters])
        self.inner.add_param_group({**param_group, "params": parameters})
        self.inner.param_groups[-1]["params"] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the shards are laid out."""
        if self._is_laid_out:
            raise UsageError(
                "the shards are laid out: give the optimizer its param groups before zeroshard, or free parameters with "
                "sharded.update_trainable(param_group)."
            )
        super().add_param_group(param_group)
