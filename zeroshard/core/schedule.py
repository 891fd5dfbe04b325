"""Owns the order of events in a step: when each unit is unsharded, how long it is kept, and which calls are legal now.

All-gathers follow the order in which modules run, which is the same on every rank. The last forward predicts the order of this one,
and this one predicts the order of the backward. For the order of reductions see core/reductions.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain, islice

import torch
from torch import Tensor

from zeroshard.core.context import Context
from zeroshard.core.model_tree import ModelTree
from zeroshard.core.reductions import Reductions
from zeroshard.core.step import Move, Step, StepState, after
from zeroshard.core.unit import Unit, UnitState
from zeroshard.errors import UsageError
from zeroshard.torch_private import forget_grad, forget_grads, grad_of, grads_of

PREFETCHED = 4
"""The maximum number of modules (after a step: of units) that are read ahead from disk. There may be buffers for fewer."""

Run = tuple[Unit, ...]
"""The units of one module: they are used together."""


_NOWHERE = nullcontext()
"""The context of work that stays on its stream."""


class _Order:
    """The order in which the units of modules ran."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._position: dict[Run, int] = {}
        self._numels = [0]
        """The number of elements used before each position."""

    def add(self, run: Run) -> None:
        if run not in self._position:
            # An interrupt between two of these lines must not leave a position without its number of elements.
            self._numels.append(self._numels[-1] + sum(unit.layout.numel for unit in run))
            self.runs.append(run)
            self._position[run] = len(self.runs) - 1

    def after(self, run: Run, *, reverse: bool = False) -> Iterator[Run]:
        """Return the runs after this one, or with `reverse` those before it, nearest first; none if its position is unknown."""
        position = self._position.get(run)
        if position is None:
            return iter(())
        steps = range(position - 1, -1, -1) if reverse else range(position + 1, len(self.runs))
        return (self.runs[step] for step in steps)

    def numel_after(self, run: Run) -> float:
        """Return the number of elements that are used after a run; infinite if its position is unknown."""
        position = self._position.get(run)
        return math.inf if position is None else self._numels[-1] - self._numels[position + 1]


class ForwardStream:
    """The stream that a model runs on, which the user may have created. A CPU has no stream, and the methods do nothing.

    Autograd runs a node on the stream of its forward. It adds up gradients on the stream where the
    parameter was first seen and ends on the stream that called the backward. Scratch memory and the
    units' memory are taken and freed in the order of the forward's stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_only_one = device.type == "cpu"
        self._stream: torch.Stream | None = None

    def begin(self) -> None:
        """Record the stream on which a forward starts."""
        if not self.is_only_one:
            self._stream = torch.accelerator.current_stream(self._device)

    def here(self) -> AbstractContextManager[None]:
        """Return a context whose work runs on the forward's stream, in order with the current stream's other work."""
        if self._stream is None:
            return _NOWHERE
        now = torch.accelerator.current_stream(self._device)
        return _NOWHERE if now == self._stream else self._between(now, self._stream)

    @contextmanager
    def _between(self, now: torch.Stream, stream: torch.Stream) -> Iterator[None]:
        # no test needs this wait: on the simulated device autograd uses only the forward's stream. On other devices it
        # may sum gradients on a different stream, and the work inside reads these sums.
        stream.wait_stream(now)  # type: ignore[attr-defined]
        try:
            with stream:
                yield
        finally:  # also after an error: work that was started continues there
            now.wait_stream(stream)  # type: ignore[attr-defined]


class Schedule:
    """The order of events in one model's steps (see the module's docstring).

    Args:
        units: the model's units, in the order of registration.
        tree: the modules that the model had when it was sharded.
        overlap: whether collectives overlap with computation. If not, each blocks immediately; results are bit-identical.
    """

    def __init__(self, units: Sequence[Unit], tree: ModelTree, context: Context, *, overlap: bool) -> None:
        self.units = list(units)
        self.tree = tree
        self.optimized: set[int] = set()
        """`id`s of the parameters that the optimizer lists, including frozen ones."""
        self._policy = context.policy
        max_live_numel = context.policy.max_live_numel
        self._live_limit = math.inf if max_live_numel is None else max_live_numel
        self._reads_disk = context.policy.uses_disk
        self.stream = ForwardStream(context.storages.accelerator.device)
        self.live = context.live
        self._overlap = overlap
        # Ranks wait for each other inside a backward: to gather units, or to exchange the tokens of experts.
        self.are_closed_in_turn = sum(unit.sharded_at_rest for unit in self.units) > 1 or context.experts is not None
        self._collectives = context.collectives
        numels = sorted((unit.layout.numel for unit in self.units if unit.trainable), reverse=True)
        limit = self._collectives.numel_in_flight(numels) if overlap else 0
        self.reductions = Reductions(
            [unit.gradients for unit in self.units], context, limit, overlap=overlap,
            in_turn=self.are_closed_in_turn,
        )  # fmt: skip
        self._kept: list[Unit] = []  # after their forward, for their backward
        self._leaving: Unit | None = None
        self.is_stepping = False
        """Whether a step is under way or was aborted: some parameters are updated, and others are not."""
        self._backward_ended = False
        self.backwards_ended = 0
        """Counted since the model was sharded: an engine counts microbatches by it."""
        self.values = object()
        """The present values of the parameters; a new object after each step."""
        self._last = _Order()
        self._present = _Order()

    def replace(self, unit: Unit, by: Sequence[Unit]) -> None:
        """Replace `unit` with other units, which hold its parameters from now on. Call it between steps."""
        position = self.units.index(unit)
        self.units[position : position + 1] = by
        self._kept = [kept for kept in self._kept if kept is not unit]
        self.live.step.forget(unit)
        self._last = _Order()
        self._present = _Order()
        self.reductions.set_units([other.gradients for other in self.units])

    @property
    def state(self) -> StepState:
        """The progress of the present step."""
        return self.live.step.state

    def _move(self, move: Move) -> None:
        step = self.live.step
        if move is Move.GRADIENT and step.state is StepState.GRADIENTS:
            self.live.before_later_gradients()
        step.move(move)

    @property
    def awaits_step(self) -> bool:
        """Whether gradients have arrived that no step has used."""
        return self.state in (StepState.BACKWARD, StepState.GRADIENTS, StepState.BROKEN)

    # ------------------------------------------------------------------ parameters

    def begin_forward(self) -> None:
        """Begin a forward of the root module, outside a backward."""
        self._backward_ended = False
        self.refuse_aborted_step()
        self.tree.refuse_replaced_modules()
        for unit in self.units:
            if not unit.trainable:
                unit.refuse_unfrozen(self.optimized)
        if any(self._present.runs):
            self._last = self._present
            self._present = _Order()

    def unshard(self, units: Run, *, backward: bool) -> None:
        """Unshard the units of one module for their use and start to unshard those of the next modules."""
        # Inside `unsharded`, a rank may run a module alone: the others would neither gather the next units nor record the order.
        if units and all(unit.is_pinned for unit in units):
            for unit in units:
                unit.unshard()
            return
        if self._kept:
            self._kept = [unit for unit in self._kept if unit not in units]
            # Units that ran first are resharded first, since the backward needs them last.
            while self._kept and not all(self._has_room(unit) for unit in units):
                self._kept.pop(0).reshard()
        for unit in units:
            unit.start_unshard()
        if self._overlap:
            for unit in self._next_after(units, backward):
                if self._has_room(unit):
                    unit.start_unshard()
            if self._reads_disk:
                for unit in chain.from_iterable(islice(self._after(units, backward), PREFETCHED)):
                    unit.prefetch()
        for unit in units:
            unit.unshard()
        if not backward:
            self._present.add(units)

    def _after(self, units: Run, backward: bool) -> Iterator[Run]:
        """Return the runs that follow: the last forward gives the forward's order, this forward gives the backward's."""
        if backward:
            return self._present.after(units, reverse=True)
        return self._last.after(units)

    def _next_after(self, units: Run, backward: bool) -> Iterator[Unit]:
        """Yield the units to gather now, ahead of their use."""
        limit: float = 1  # only the next run
        if not backward and not self._policy.reshard_after_forward:
            # Units that the forward keeps may be gathered all at once: the first that runs starts the others.
            if not self._present.runs:
                limit = math.inf
        elif self._policy.prefetch_numel is not None:
            limit = self._policy.prefetch_numel
        numel = 0
        for following in self._after(units, backward):
            if numel >= limit:
                return
            numel += sum(unit.layout.numel for unit in following)
            yield from following

    def reshard_after_forward(self, units: Run, *, backward_follows: bool) -> None:
        """Reshard units after their use in a forward, unless the policy keeps them for the backward.

        The last units of a forward are kept, since the backward begins with them, if `max_live_numel` allows it.
        """
        policy = self._policy
        # Between a unit's forward and its backward, each unit after it is used twice.
        is_reused_soon = not policy.reshard_after_forward or 2 * self._last.numel_after(units) <= policy.max_reuse_numel
        if backward_follows and is_reused_soon and self.live.numels.total() <= self._live_limit:
            self._kept += [unit for unit in units if unit not in self._kept]
            return
        for unit in units:
            unit.reshard()

    def _has_room(self, unit: Unit) -> bool:
        if unit.state is not UnitState.AT_REST or self._live_limit == math.inf:
            return True
        return self.live.numels.total() + unit.layout.numel <= self._live_limit

    def give_back(self, *, leaves_graph: bool = True) -> None:
        """Reshard all units after a backward. Held units stay unsharded if the backward leaves a graph that may read them."""
        self._kept.clear()
        for unit in self.units:
            unit.is_held = unit.is_held and leaves_graph
            unit.waiting.received.clear()
            unit.reshard()

    def settle(self) -> None:
        """Wait for every parameter that is still arriving."""
        for unit in self.units:
            unit.settle()

    # ------------------------------------------------------------------ gradients

    def add_gradient(self, unit: Unit, index: int, gradient: Tensor) -> None:
        """Keep a gradient and take all waiting gradients once there are enough of them."""
        if self.state is not StepState.BACKWARD:
            self.refuse_parked("a backward")
            self._move(Move.GRADIENT)
        if self.state is StepState.UNWANTED:
            return
        unit.refuse_replaced_gradients()
        if index in unit.waiting.received or index in unit.waiting.gradients:  # the second is added to the first
            self._take_gradients(unit)
        gradient = unit.named[index].own_part(gradient)
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"{unit.named[index].fqn} got a sparse gradient ({gradient.layout}); zeroshard reduces dense ones. "
                "Make the embedding with sparse=False."
            )
        if unit.waiting.add(index, gradient):
            self._take_gradients(unit)

    def _take_gradients(self, unit: Unit) -> None:
        """Take the unit's waiting gradients and start to reduce complete buckets that have their turn."""
        if not unit.waiting.gradients:
            return
        # First, since this may raise: then the gradients still wait. Reductions of other buckets may stay in flight.
        self.reductions.finish_up_to(unit.buckets_of(unit.waiting.gradients))
        unit.take_gradients()
        self.live.step.gradients_arrived()
        self.reductions.start_ready(unit.gradients)

    def close(self, unit: Unit) -> None:
        """End the unit's backward, at the same point on every rank: missing gradients count as zeros."""
        if unit.gradients:
            self._move(Move.GRADIENT)
        if self.state is StepState.UNWANTED:
            return
        self._take_gradients(unit)
        self.reductions.close(unit.gradients)

    def end_backward(self, *, leaves_graph: bool = False) -> None:
        """End a backward: start to reduce the rest of its gradients in the fixed order and reshard the units."""
        self._move(Move.GRADIENT)  # until the rest is on its way, this backward has not ended
        if self.state is not StepState.UNWANTED:
            try:
                for unit in reversed(self.units):
                    self._take_gradients(unit)
                self.reductions.end_microbatch()
            except BaseException:
                self.abort()
                raise
        self._move(Move.END_BACKWARD)
        self._backward_ended = True
        self.backwards_ended += 1
        self.give_back(leaves_graph=leaves_graph)
        for unit in self.units:
            unit.show_taken()

    def end_backward_once(self) -> None:
        """End the backward if torch did not report its end, since this rank's loss did not use any parameter."""
        if not self._backward_ended:
            self.end_backward()
        self._backward_ended = False

    def abort(self) -> None:
        """End a backward that raised an exception. The step is lost if the backward had computed a gradient."""
        self._move(Move.BREAK_OFF)
        if self.state is StepState.BROKEN:
            self.reductions.forget()
            self.live.step.replaced.clear()
            for unit in self.units:
                unit.used.update(unit.waiting.gradients)  # these parameters show a taken gradient until `zero_grad`
                unit.forget_gradients()
        for unit in self.units:
            unit.show_taken()
        self.give_back(leaves_graph=False)

    def finish_gradients(self) -> None:
        """Block until every gradient that this rank's update uses is the mean over ranks.

        Each `parameter.grad` that the user set counts as this rank's gradient, as if a backward had computed it.
        """
        self.refuse_parked("a step, or a gradient norm,")
        given = self.gradients_of_users()
        if given:
            if after(self.state, Move.GRADIENT) is StepState.UNWANTED:
                after(StepState.UNWANTED, Move.STEP)  # it raises, and `grad` stays as it is
            for unit, index in given:
                unit.refuse_replaced_gradients({index} & unit.used)
            for unit, index in given:
                parameter = unit.named[index].parameter
                gradient = grad_of(parameter)
                assert gradient is not None
                forget_grad(parameter)
                self.add_gradient(unit, index, gradient)
                del gradient  # its memory is free once it is in a bucket
            self.end_backward()
        if self.state is StepState.CLEAN:
            self.end_backward()  # this rank's loss did not use any parameter; the other ranks are waiting for its zeros
        with self.stream.here():  # gradients are freed in the order of the stream that made them
            self.reductions.finish()

    def gradients_of_users(self) -> list[tuple[Unit, int]]:
        """Return (unit, index) of each trained parameter whose `grad` the user has set and no call has taken yet.

        Warn if a parameter that is in no optimizer passed to `shard` has a gradient: another
        optimizer may update it, differently on each rank.

        Raises:
            UsageError: a parameter in the optimizer that was frozen at `shard` has a gradient, which no step would use; or
                a backward was aborted.
        """
        after(self.state, Move.STEP)
        found = []
        for unit in self.units:
            gradients = grads_of(unit.parameters)
            if gradients.count(None) == len(gradients):
                continue
            for index, entry in enumerate(unit.named):
                if gradients[index] is None:
                    continue
                if unit.trainable:
                    found.append((unit, index))
                elif id(entry.parameter) in self.optimized:
                    raise UsageError(
                        f"{entry.fqn} has a gradient, and was frozen when zeroshard took the model: it would not be updated. "
                        "Call update_trainable() (on every rank) after changing requires_grad, or set its grad to None."
                    )
                else:
                    warnings.warn(
                        f"{entry.fqn} has a gradient that is not averaged over ranks: the optimizer that "
                        "zeroshard took does not list it. Make one optimizer of all parameters that train, or freeze this one.",
                        stacklevel=1,
                    )
        return found

    # ------------------------------------------------------------------ step

    def refuse_aborted_step(self) -> None:
        """Raise if an exception left a step before its end: some parameters are updated, and others are not."""
        if self.is_stepping:
            raise UsageError(
                "an exception aborted optimizer.step(), so some parameters are updated and others are not. Load a checkpoint on "
                "every rank, or make and shard a new model."
            )

    def begin_step(self, *, has_looked: bool = False) -> None:
        """Prepare for the optimizer's update: afterwards no parameter is arriving or held.

        Args:
            has_looked: whether this call of the optimizer's step has looked for the user's writes already.
        """
        self.refuse_parked("optimizer.step()")
        self.tree.refuse_changes()
        for unit in self.units:
            if unit.sharded_at_rest:  # it would still show the values from before the step
                unit.refuse_pinned("optimizer.step()")
        self.is_stepping = True
        for unit in self.units:
            unit.begin_step(has_looked=has_looked)

    def refuse_unseen_changes(self) -> None:
        """Raise if the user changed the model, but its states did not follow, so that files would lack the change."""
        self.tree.refuse_changes()
        for unit in self.units:
            if unit.state is UnitState.AT_REST:
                unit.writes.refuse_lost()

    def refuse_parked(self, what: str) -> None:
        """Raise if any model states are parked while `what` runs."""
        if self.live.parked:
            raise UsageError(
                f"{what} needs reloaded states (parked: {', '.join(sorted(self.live.parked))}): call reload_states() first."
            )

    @cached_property
    def fqns(self) -> dict[int, str]:
        """The names of the model's parameters, by `id`."""
        return {id(entry.parameter): entry.fqn for unit in self.units for entry in unit.named}

    def refuse_pinned(self, what: str) -> None:
        for unit in self.units:
            unit.refuse_pinned(what)

    def sync_parameters(self, unit: Unit) -> None:
        """Bring a unit up to date after the optimizer has updated this rank's part of it."""
        unit.sync_parameters()
        if not self._overlap:
            unit.reshard()
            self.settle()
        elif self._leaving is not None:  # the unit before: its all-gather ran while this unit was updated
            self._leave()
        self._leaving = unit

    def _leave(self) -> None:
        assert self._leaving is not None
        for bucket in self._leaving.buckets:
            if bucket.gathering is not None and not self._leaving.sharded_at_rest:
                bucket.gathering.push()  # it would otherwise wait for a reader
        self._leaving.reshard()
        self._leaving = None

    def end_step(self) -> None:
        """End the step, after every unit was updated."""
        if self._leaving is not None:
            self._leave()
        self._move(Move.STEPPED)
        self.is_stepping = False
        self.values = object()
        next_used = dict.fromkeys([*chain.from_iterable(self._present.runs), *self.units])
        for unit in islice(next_used, PREFETCHED):
            unit.prefetch()
        for unit in self.units:  # gradients exist until `zero_grad`
            unit.show_taken()

    def forget_gradients(self) -> None:
        """Drop the gradients and begin a new step, as `zero_grad()` does."""
        self.reductions.forget()
        for unit in self.units:
            unit.is_held = False
            unit.forget_gradients()
            if unit.trainable:
                forget_grads(unit.parameters)
            elif self.optimized:
                forget_grads(one for one in unit.parameters if id(one) in self.optimized)
        self.live.step = Step()
