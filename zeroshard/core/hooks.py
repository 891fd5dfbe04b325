"""Owns the hooks on the user's modules and parameters, which reveal whether a forward or a backward is running.

[Note: when a unit is whole in the backward]
A hook on a module's output runs when the module's backward begins. It unshards the module's unit and starts to unshard the next
one. Outputs may escape (attributes, dataclasses, features that other hooks capture), so correctness never depends on this hook.
Every read of a parameter that autograd saved goes through saved_parameters.py, which unshards the unit.

[Note: when a unit may be resharded in the backward]
When every trainable parameter of a unit has its gradient, no node of the backward reads the unit any more. A node that needs a
parameter's value to compute some gradient computes that parameter's gradient too. Frozen parameters have no gradient. A module
with frozen parameters is finished only when the gradients of all its inputs are also known. Other units are resharded when the
backward ends.

[Note: when a module's backward is over]
Autograd runs later modules first: when a module's backward begins, the backward of any other module whose calls have all begun is
over. All ranks must reach the same answer, since they then reduce its gradients. But a forward may have no backward, and ranks may
free its graph at different times: on one rank, the user or an exception's traceback may keep the output. So if no backward came
after a forward, ranks that gather units exchange, at the next forward, whether its graph still exists. Inside `unsharded`, where a
rank may run modules alone, no call counts, and units are closed when the backward ends.

[Note: recomputation]
Activation checkpointing runs a module's forward inside the backward. That forward unshards the unit but must not reshard it: the
backward is about to read it. Non-reentrant checkpointing may also leave the forward early, by an exception, so no code here relies
on a forward's end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeroshard.core.module_hooks import (
    ForwardHook,
    Hook,
    WeakHook,
    digest_of,
    is_compiled_wrapper,
    refuse_cuda_graphs_of_callers,
    untraced,
)
from zeroshard.core.saved_parameters import SavedParameters
from zeroshard.core.schedule import Run, Schedule
from zeroshard.core.state_dicts import hooks_for_state_dicts
from zeroshard.core.unit import Unit, UnitState, is_alive, runs_beside
from zeroshard.errors import CollectiveError, UsageError
from zeroshard.errors.hints import add_hint
from zeroshard.torch_private import (
    HooksById,
    at_end_of_backward,
    backward_reaches,
    forget_grad,
    forward_hooks_of,
    grad_of,
    gradient_hooks_of,
    in_backward,
    in_transform,
    keep_first,
    keep_last,
    past_torch_function,
    refuses_saved_tensors_hooks,
    tree_leaves,
)


class Forward:
    """A forward of the model, and calls of its modules until the next one.

    Attributes:
        to_come: by module, the number of its calls whose backward has not begun; empty if no call counts.
        calls: the calls whose graph exists on this rank. Only the hooks on the graph keep them alive.
    """

    def __init__(self) -> None:
        self.to_come: Counter[nn.Module] = Counter()
        self.calls = weakref.WeakSet[Call]()


class Call:
    """A call of a module. The hooks on the call's graph keep this object alive."""

    def __init__(self, forward: Forward, module: nn.Module) -> None:
        forward.calls.add(self)
        forward.to_come[module] += 1
        self._to_come = forward.to_come
        self._module = module
        self._has_begun = False

    def begin(self) -> None:
        """Record that its backward begins. A kept graph may have several backwards."""
        if not self._has_begun:
            self._has_begun = True
            self._to_come[self._module] -= 1


class Hooks:
    """The hooks that connect a model's modules and parameters to a schedule, until `remove`."""

    def __init__(self, model: nn.Module, schedule: Schedule) -> None:
        self._schedule = schedule
        self._aside: list[Unit] | None = None
        """The closed units of a backward that has reached no parameter yet, and so belongs to no step."""
        self._backward_is_open = False
        """Whether a backward has begun whose end was not reported."""
        self._ending: Callable[[], object] = lambda: None
        """Returns the callback for the end of this backward, or None after autograd has dropped it."""
        self._leaves_graph = False
        # By module, the number of inputs whose gradients are unknown; see [Note: when a unit may be resharded in the backward].
        self._open_calls: Counter[nn.Module] = Counter()
        self._running: Counter[nn.Module] = Counter()
        """Forwards in progress, by module. A recursive module has several: its units stay whole until the outermost ends."""
        self._root = model
        self._forwards = [Forward()]
        """The forwards since the last backward ended (see [Note: when a module's backward is over])."""
        self._in_progress: dict[nn.Module, None] = {}
        """The modules whose backward has begun, oldest first."""
        self._hook_of = untraced(Hook)
        self._on_gradients: list[tuple[HooksById, RemovableHandle]] = []
        self._on_leaves: dict[tuple[int, str, int], RemovableHandle] = {}
        """Hooks on leaves, which outlive the graph."""
        self.before_next_sharding: Callable[[], object] | None = None
        """Ends this sharding on every rank before the model is sharded again."""
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Put hooks on the modules and parameters of the schedule's units.

        Modules whose units are always here need none: a gradient tells that a backward runs.
        """
        self.is_removed = False
        model = self._root
        schedule = self._schedule
        hook_of = self._hook_of
        forward_hook_of = untraced(ForwardHook)
        self._in_turn = schedule.are_closed_in_turn or any(unit.sharded_at_rest for unit in schedule.units)
        """Whether ranks gather units or exchange tokens in a backward, so that they must close all units in one order."""
        self._attached_to = list(schedule.units)
        self._first: list[tuple[HooksById, RemovableHandle]] = []
        self._last: list[tuple[HooksById, RemovableHandle]] = []
        units: dict[nn.Module, list[Unit]] = {}
        for unit in schedule.units:
            if unit.comes_and_goes or self._in_turn:
                units.setdefault(unit.module, []).append(unit)
            elif unit.trainable:  # the number of hooks stays the same: torch.compile guards on it
                wait = partial(self._pre_arrival, unit)
                hook = forward_hook_of(wait, partial(self._pre_arrival_in_compiled_code, unit))
                waiting = unit.module.register_forward_pre_hook(hook, prepend=True)
                self._handles.append(waiting)
                self._first.append((forward_hooks_of(unit.module)[0], waiting))
        # The root unit is always among them, since it begins a forward.
        self._units: dict[nn.Module, Run] = {model: (), **{module: tuple(used) for module, used in units.items()}}
        self._leaves_others_alone = not units
        """Whether all parameters stay here, so that forwards of other threads need nothing."""
        self._saved = SavedParameters(schedule.units, self._before_saved_read)
        self._one_thread = OneThread(schedule.units)
        owned = self._attach_to_parts()
        for module in self._units:
            hook = forward_hook_of(self._pre_forward, self._pre_forward_in_compiled_code)
            # Around all other hooks: weight_norm, spectral_norm and the like compute with parameters in their hooks.
            first = module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            last = module.register_forward_hook(hook_of(self._post_forward), always_call=True)
            before, after = forward_hooks_of(module)
            self._first.append((before, first))
            self._last.append((after, last))
            self._handles += [first, last]
        self._handles += hooks_for_state_dicts({**self._units, **owned})
        parameter_hook_of = untraced(WeakHook)
        for number, unit in enumerate(schedule.units):
            for index, entry in enumerate(unit.named if unit.trainable else ()):
                on_gradient: Callable[[Tensor], None] = parameter_hook_of(self._post_accumulate, number, index)
                # The short path neither changes streams nor sums a DTensor's gradient over ranks.
                if self._schedule.stream.is_only_one and not entry.is_distributed:
                    on_gradient = unit.waiting.joining(index, on_gradient, unit.appearance.whole_class)
                handle = entry.parameter.register_post_accumulate_grad_hook(on_gradient)
                self._on_gradients.append((gradient_hooks_of(entry.parameter), handle))

    def _attach_to_parts(self) -> dict[nn.Module, list[Unit]]:
        """Put hooks on the modules inside units that own parameters. Return the units of each that come and go."""
        unit_of = {
            entry.parameter: unit for unit in self._schedule.units if unit.comes_and_goes for entry in unit.named
        }
        owned: dict[nn.Module, list[Unit]] = {}
        self._open_parts: dict[nn.Module, list[RemovableHandle]] = {}
        """Modules whose call has gathered units, and their hooks that reshard these at its end."""
        for module in self._root.modules():
            held = dict.fromkeys(unit_of[p] for p in module.parameters(recurse=False) if p in unit_of)
            if held and module not in self._units:
                owned[module] = list(held)
                for unit in held:
                    unit.away.add(module, self._hook_of(self._pre_part, unit), is_away=unit.is_away)
        return owned

    def remove(self) -> None:
        self.is_removed = True
        on_gradients = [handle for _, handle in self._on_gradients]
        for handle in [*self._handles, *on_gradients, *self._on_leaves.values()]:
            handle.remove()
        for unit in self._attached_to:  # update_trainable may have replaced some since then
            unit.away.remove()
        self._close_parts()
        self._on_gradients.clear()
        self._handles.clear()
        self._on_leaves.clear()

    def _keep_places(self) -> None:
        """Move our module hooks around the user's, even if these are newer."""
        for hooks, first in self._first:
            keep_first(hooks, first)
        for hooks, last in self._last:
            keep_last(hooks, last)

    # ------------------------------------------------------------------ forward

    def _forget_what_aborted(self) -> None:
        """Clean up after a backward that was aborted. Call it when another backward, or a forward outside one, begins."""
        if self._backward_is_open:
            if self._close_backward():
                self._schedule.abort()
            else:
                self._schedule.give_back()

    def _pre_forward_in_compiled_code(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        refuse_cuda_graphs_of_callers(module)
        refuse_distributed_units(module, self._schedule.units)
        self._pre_forward(module, args, kwargs, in_compiled_code=True)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any, *, in_compiled_code: bool = False) -> None:
        units = self._units.get(module)
        if units is None:  # a copy of a module has the hooks of the original
            raise UsageError(
                f"this {type(module).__name__} is a copy.copy() of a module of a sharded model, which shares its parameters and "
                "hooks: call the module itself, or take copy.deepcopy()."
            )
        recompute = in_backward()
        is_root = module is self._root
        if recompute:
            self._begin_backward()
        else:
            if self._refuses_or_leaves_alone():
                return
            self._one_thread.begin(module, is_outermost=is_root)
            if is_root:
                self._running.clear()
            self._running[module] += 1
            self._schedule.stream.begin()
            self._forget_what_aborted()
            if is_root:
                self._keep_places()
                self._saved.recover()
                self._close_parts()
                self._begin_forward((args, kwargs))
                self._schedule.begin_forward()
        if not units:
            if is_root:
                for unit in self._schedule.units:
                    unit.appearance.begin_use()
            return
        refuse_transforms(units)
        in_compiled_code = in_compiled_code or is_compiled_wrapper(module)
        if in_compiled_code:
            refuse_distributed_units(module, self._schedule.units)
        self._schedule.unshard(units, backward=recompute)
        for unit in units:
            unit.appearance.begin_use()
            unit.away.end()
        self._push(module, units, in_compiled_code=in_compiled_code)
        if not recompute and torch.is_grad_enabled() and any(not unit.trainable for unit in units):
            inputs = _differentiable((args, kwargs))
            self._open_calls[module] += self._hook(inputs, self._input_gradient_known, module)

    @property
    def _is_beside_training(self) -> bool:
        """Whether this is not the thread that trains (see `runs_beside`)."""
        return runs_beside(self._schedule.live.trainer)

    def _refuses_or_leaves_alone(self) -> bool:
        """Return whether a forward runs beside the thread that trains, and reads only parameters that stay here.

        Raises:
            UsageError: it would gather units in the middle of a step.
        """
        if not self._is_beside_training:
            return False
        if self._leaves_others_alone:
            return True
        if self._schedule.awaits_step or self._schedule.is_stepping:
            raise UsageError(
                "a forward began on a second thread in the middle of a step, and would gather parameters between those that the "
                "first one gathers. Run the model on one thread at a time, or keep parameters unsharded (Policy.stage(2))."
            )
        return False

    def _begin_forward(self, batch: Any) -> None:
        """Begin another `Forward` and forget those whose graphs are gone on every rank."""
        live = self._schedule.live
        if live.first_batch is None and torch.is_grad_enabled():
            live.first_batch = digest_of(batch)
        if not self._in_turn:
            return  # and any rank may run the model alone
        if not self._forwards[-1].to_come or all(unit.is_pinned for unit in self._schedule.units):
            return
        exist = self._schedule.reductions.on_any_rank([bool(forward.calls) for forward in self._forwards])
        self._forwards = [forward for forward, exists in zip(self._forwards, exist, strict=True) if exists]
        self._forwards.append(Forward())

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        # The forward's own error, if there is one: torch raises it after this hook.
        passing = sys.exc_info()[1] if output is None else None
        if passing is not None:
            add_hint(passing)
        try:
            self._end_forward(module, output)
        except CollectiveError:
            if not isinstance(passing, CollectiveError):  # it would be told twice
                raise

    def _end_forward(self, module: nn.Module, output: Any) -> None:
        is_recomputed = in_backward()
        if not is_recomputed:
            is_left_alone = self._leaves_others_alone and self._is_beside_training
            if (
                is_left_alone or self._one_thread.is_another or not self._running[module]
            ):  # it was left alone, or refused
                return
        self._saved.pop(module, output)
        backward_follows = torch.is_grad_enabled()
        if is_recomputed and not backward_follows:
            return
        units = self._units[module]
        outputs = _differentiable(output) if backward_follows else []
        if outputs:
            forward = self._forwards[-1]
            if is_recomputed or not units or all(unit.is_pinned for unit in units):
                forward = Forward()  # a recomputation, or a call that this rank may make alone, does not count
            self._hook(outputs, self._pre_backward, module, Call(forward, module))
        if not is_recomputed:
            self._running[module] -= 1
            if self._running[module] > 0:
                return
            if module is not self._root or not backward_follows:
                self._schedule.reshard_after_forward(units, backward_follows=backward_follows)
            for unit in units or (self._schedule.units if module is self._root else ()):
                unit.appearance.end_use()
            if module is self._root and backward_follows:
                for unit in units:
                    unit.away.begin()  # they stay, but what autograd saves of them from now on has no hooks
            self._one_thread.end(module)

    def _pre_arrival_in_compiled_code(self, unit: Unit, module: nn.Module, args: Any) -> None:
        refuse_cuda_graphs_of_callers(module)
        refuse_distributed_units(module, self._schedule.units)
        self._pre_arrival(unit, module, args)

    def _pre_arrival(self, unit: Unit, module: nn.Module, args: Any) -> None:
        """Wait, before a module's forward, for the updated values of a unit that stays here."""
        if unit.state is not UnitState.UNSHARDED:
            unit.refuse_elsewhere()
            unit.unshard()

    def _push(self, caller: object, units: Sequence[Unit], *, in_compiled_code: bool = False) -> None:
        """Hook the tensors that autograd saves from parameters that leave, until the same caller's `SavedParameters.pop`."""
        wanted = torch.is_grad_enabled() and any(unit.comes_and_goes for unit in units)
        if wanted and refuses_saved_tensors_hooks():
            # torch.func's transforms allow no hooks: their saved tensors are read from a unit that stays whole.
            wanted = False
            for unit in units:
                unit.is_held = True
        if wanted:
            self._saved.push(caller, unseen=in_compiled_code)

    def _hook(self, tensors: Sequence[Tensor], method: Callable[..., None], *args: Any) -> int:
        """For each tensor, register a call of `method(*args, gradient)` that runs once the tensor's gradient is known.

        Return the number of new calls. On a leaf, a hook replaces that of an earlier forward, which may have had no backward.
        """
        before = len(self._on_leaves)
        others = 0
        for tensor in tensors:
            handle = tensor.register_hook(self._hook_of(method, *args))
            if not tensor.is_leaf:
                others += 1
                continue
            key = (id(tensor), method.__name__, id(args[0]))
            if key in self._on_leaves:
                self._on_leaves[key].remove()
            self._on_leaves[key] = handle
        return others + len(self._on_leaves) - before

    # A part of a unit's module that is called by itself: `model.lm_head(x)`, or the model inside a model, whose root
    # module does not run.

    def _pre_part(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self._forget_what_aborted()
        was_here = unit.state is UnitState.UNSHARDED
        if was_here and (in_backward() or not torch.is_grad_enabled()):
            return
        refuse_transforms((unit,))
        unit.unshard()
        caller = object()
        # Checkpointing counts the tensors that it gets in the forward and in the recomputation, where the unit may be here: it
        # gets the same in both. Tensors that others keep hold the unit's memory until they are gone.
        if not self._saved.others_are_in_force:
            self._push(caller, (unit,))
        end = module.register_forward_hook(self._hook_of(self._post_part, unit, caller, was_here))
        self._open_parts.setdefault(module, []).append(end)

    def _post_part(self, unit: Unit, caller: object, was_here: bool, module: nn.Module, args: Any, output: Any) -> None:
        for end in self._open_parts.pop(module, ()):
            end.remove()
        self._saved.pop(caller, output)
        if in_backward():
            return  # the backward still needs units that a recomputation gathers
        if torch.is_grad_enabled():
            self._hook(_differentiable(output), self._pre_part_backward, (unit,))
        if not was_here:
            unit.reshard()

    def _close_parts(self) -> None:
        """Forget calls of parts that raised."""
        for ends in self._open_parts.values():
            for end in ends:
                end.remove()
        self._open_parts.clear()

    def _pre_part_backward(self, units: Sequence[Unit], gradient: Tensor) -> None:
        if self.is_removed:
            return
        self._begin_backward()
        _unshard(units)

    @contextmanager
    def whole(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep results that the block computes from temporarily unsharded units differentiable."""
        own = object()
        self._push(own, units)
        try:
            with self._saved.kept():
                yield
        finally:
            self._saved.pop(own)

    # ------------------------------------------------------------------ backward

    def _begin_backward(self) -> None:
        if self.is_removed:  # the graph is from before `remove`
            return
        if self._ending() is None:  # autograd dropped the callback without a call: that backward is no longer running
            self._forget_what_aborted()
        if not self._backward_is_open:
            for hooks, handle in self._on_gradients:  # behind the user's, even if these are newer
                if len(hooks) > 1:
                    keep_last(hooks, handle)
            self._backward_is_open = True
            for unit in self._schedule.units:  # recomputations run compiled modules, and not always through our hooks
                unit.appearance.begin_use()
            if not self._reaches_parameters():
                # No parameter is visible here, but a backward inside a node of this one (reentrant checkpointing) may reach some.
                self._aside = []
            ending = self._hook_of(self._end_backward)
            self._ending = weakref.ref(ending, self._end_use_of_broken)
            at_end_of_backward(ending)

    def _end_use_of_broken(self, _: object) -> None:
        """Show earlier gradients again when autograd drops the callback for a backward's end without calling it.

        Other traces of that backward are removed later, and not in the middle of an exception.
        """
        if self._backward_is_open:
            for unit in self._schedule.units:
                unit.appearance.end_use()

    def _reaches_parameters(self) -> bool:
        """Return whether this backward computes a gradient of any parameter. torch.autograd.grad for inputs does not."""
        trainable = (entry.parameter for unit in self._schedule.units if unit.trainable for entry in unit.named)
        try:
            # Checked each time, since kept nodes would keep the parameters alive. The first answer is nearly always yes.
            with past_torch_function():  # parameters that are away are asked, too
                return any(backward_reaches(get_gradient_edge(parameter).node) for parameter in trainable)
        except (RuntimeError, AttributeError):
            return False  # autograd.grad with respect to parameters, or torch.func's: they get no .grad

    def _before_saved_read(self, unit: Unit) -> None:
        """Unshard a unit before autograd, or code that inspects the graph, reads a parameter that was saved."""
        if not in_backward():
            unit.unshard()
            return
        if self._backward_is_open and self._ending() is not None and not unit.is_away and not torch.is_grad_enabled():
            return  # the usual case, for each parameter that a backward reads
        self._begin_backward()
        self._hold_for_graph((unit,))
        if unit.is_away:
            self._schedule.unshard(self._units[unit.module], backward=True)

    def _hold_for_graph(self, units: Sequence[Unit]) -> None:
        """Hold units in a backward with `create_graph=True`, which saves parameters where none of our hooks can see them."""
        if torch.is_grad_enabled():
            self._leaves_graph = True
            for unit in units:
                unit.is_held = True

    def _pre_backward(self, module: nn.Module, call: Call, gradient: Tensor) -> None:
        if self.is_removed:
            return
        self._begin_backward()
        call.begin()
        if self._in_turn and module is not self._root:  # the root module begins with its last child, at the same tensor
            for other in list(self._in_progress):  # see [Note: when a module's backward is over]
                is_alone = any(unit.is_pinned for unit in self._units[other])
                if other is module or is_alone or any(forward.to_come[other] for forward in self._forwards):
                    continue
                del self._in_progress[other]
                for unit in self._units[other]:
                    if self._aside is not None:
                        self._aside.append(unit)
                    else:
                        self._schedule.close(unit)
            self._in_progress[module] = None
        for unit in self._units[module]:
            unit.waiting.received.clear()  # the backward of this call computes each gradient again
        self._hold_for_graph(self._units[module])
        self._schedule.unshard(self._units[module], backward=True)

    def _post_accumulate(self, number: int, index: int, parameter: Tensor) -> None:
        self._begin_backward()
        if self._aside is not None:  # this backward does reach parameters
            closed = self._aside
            self._aside = None
            for other in closed:
                self._schedule.close(other)
        unit = self._schedule.units[number]
        gradient = grad_of(parameter)
        if gradient is None:  # frozen since the forward: autograd computes no gradient, but calls this hook anyway
            return
        forget_grad(parameter)
        with self._schedule.stream.here():
            self._schedule.add_gradient(unit, index, gradient)
            unit.waiting.backward = self._ending
            if unit.comes_and_goes and unit.has_all_gradients:
                self._give_back(unit.module)

    def _input_gradient_known(self, module: nn.Module, gradient: Tensor) -> None:
        if self.is_removed:
            return
        self._open_calls[module] -= 1
        self._give_back(module)

    def _give_back(self, module: nn.Module) -> None:
        """Reshard a module's units if its backward is over (see [Note: when a unit may be resharded in the backward])."""
        if self._open_calls[module] > 0:
            return
        units = self._units[module]
        for unit in units:
            if not unit.has_all_gradients and any(entry.parameter.requires_grad for entry in unit.named):
                return  # a unit that no optimizer updates may take gradients, too
        for unit in units:
            unit.reshard()

    def _end_backward(self) -> None:
        leaves_graph = self._leaves_graph
        is_of_step = self._close_backward()
        with self._schedule.stream.here():
            if is_of_step:
                self._schedule.end_backward(leaves_graph=leaves_graph)
            else:
                self._schedule.give_back(leaves_graph=leaves_graph)

    def _close_backward(self) -> bool:
        """Forget the state of this backward. Return whether it belongs to a step."""
        is_of_step = self._aside is None
        self._aside = None
        self._backward_is_open = False
        self._leaves_graph = False
        self._open_calls.clear()
        self._forwards = [Forward()]
        self._in_progress.clear()
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()
        for unit in self._schedule.units:
            unit.appearance.end_use()
        return is_of_step


def _unshard(units: Sequence[Unit]) -> None:
    for unit in units:
        unit.start_unshard()
    for unit in units:
        unit.unshard()


def _differentiable(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def refuse_distributed_units(module: nn.Module, units: Sequence[Unit]) -> None:
    """Raise if units have DTensors: torch.compile describes these by their local tensors, whose memory belongs to a unit.

    Args:
        module: the module that runs in compiled code.
    """
    for unit in units:
        if unit.named[0].is_distributed:
            raise UsageError(
                f"{unit.named[0].fqn} is a DTensor, and {type(module).__name__} runs inside torch.compile, which "
                "cannot describe sharded DTensors: leave out torch.compile or tensor parallelism."
            )


def refuse_transforms(units: Sequence[Unit]) -> None:
    """Raise if a unit must be gathered where its memory may not change: in a torch.func transform, or in torch.jit.trace."""
    away = [unit for unit in units if unit.comes_and_goes and unit.is_away]
    if not away:
        return
    rest = "sharded at rest" if away[0].sharded_at_rest else "at rest in CPU memory"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise UsageError(
            f"{away[0].label} is {rest}, and torch.jit.trace would record placeholders. Call it on a "
            "copy.deepcopy(model), or call it, save and run its result inside `with zeroshard.unsharded(model):`."
        )
    if in_transform():
        raise UsageError(
            f"{away[0].label} is {rest}, and runs inside of a transform of torch.func, where it cannot "
            "be gathered: use torch.autograd.grad, or Policy.stage(2) or below without offloaded parameters."
        )


class OneThread:
    """The check that only one thread at a time runs a forward. A second one would reshard parameters that the first is reading.

    Args:
        units: the model's units.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._is_asked = any(unit.comes_and_goes for unit in units)
        self._lock = threading.RLock()  # after an interrupt inside `begin`, this thread may begin again
        self._thread: int | None = None
        """The thread that runs a forward."""
        self._forward: Hashable = None
        """The outermost forward that it began."""

    def begin(self, forward: Hashable, *, is_outermost: bool) -> None:
        """Record that a forward begins on this thread; raise if another thread is running one.

        Args:
            is_outermost: whether it is the whole model's forward. If so, an unfinished forward of this thread was aborted.
        """
        if not self._is_asked:
            return
        with self._lock:
            running = self._thread  # `end` sets it to None without the lock
            is_another = running not in (None, threading.get_ident())
            if running is not None and is_another and is_alive(running):
                raise UsageError(
                    "a forward began while one of another thread runs, or was aborted there. Under this policy parameters have "
                    "memory only while a forward uses them: run the model on one thread at a time, or keep parameters "
                    "unsharded on the accelerator (Policy.stage(2))."
                )
            if is_outermost or self._thread != threading.get_ident():
                self._thread = threading.get_ident()
                self._forward = forward

    @property
    def is_another(self) -> bool:
        return self._thread not in (None, threading.get_ident())

    def end(self, forward: Hashable) -> None:
        if self._forward is forward:
            self._forward = None
            self._thread = None  # last: then another thread may begin
