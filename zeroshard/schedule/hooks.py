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

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import UsageError
from zeroshard.schedule.module_hooks import (
    Hook,
    Part,
    WeakHook,
    is_compiled,
    part_hooks,
    refuse_distributed_units,
    refuse_transforms,
    untraced,
)
from zeroshard.schedule.saved_parameters import SavedParameters
from zeroshard.schedule.schedule import Run, Schedule
from zeroshard.schedule.state_dicts import hooks_for_state_dicts
from zeroshard.schedule.unit import Unit, UnitState
from zeroshard.torch_private import (
    at_end_of_backward,
    backward_reaches,
    forget_grad,
    grad_of,
    in_backward,
    make_last,
    make_outermost,
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
        self._in_compiled_code = False
        self._on_gradients: list[tuple[nn.Parameter, RemovableHandle]] = []
        self._on_leaves: dict[tuple[int, str, int], RemovableHandle] = {}
        """Hooks on leaves, which outlive the graph."""
        self.before_next_sharding: Callable[[], object] | None = None
        """Ends this sharding on every rank before the model is sharded again."""
        self._handles: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Put hooks on the modules and parameters of the schedule's units."""
        self.is_removed = False
        model = self._root
        schedule = self._schedule
        units: dict[nn.Module, list[Unit]] = {}
        for unit in schedule.units:
            units.setdefault(unit.module, []).append(unit)
        # The root unit is always among them, since it begins a forward.
        self._units: dict[nn.Module, Run] = {model: (), **{module: tuple(used) for module, used in units.items()}}
        self._saved = SavedParameters(schedule.units, self._before_saved_read)
        self._one_thread = OneThread(schedule.units)
        self._outermost: list[tuple[nn.Module, RemovableHandle, RemovableHandle]] = []
        self._parts: dict[nn.Module, Part] = {}
        unit_of = {entry.parameter: unit for unit in schedule.units if unit.sharded_at_rest for entry in unit.named}
        for module in model.modules():
            held = dict.fromkeys(unit_of[p] for p in module.parameters(recurse=False) if p in unit_of)
            if held and module not in self._units:
                self._parts[module] = Part(list(held))
        hook_of, parameter_hook_of = self._hook_of, untraced(WeakHook)
        before_part, after_part = part_hooks()
        around: list[tuple[nn.Module, Callable[..., Any], Callable[..., Any], bool]] = []
        for module in self._units:
            around.append((module, hook_of(self._pre_forward), hook_of(self._post_forward), True))
        for module, part in self._parts.items():
            # If torch.compile traces a module, a hook that also runs after an exception makes it build a graph for each module.
            around.append((module, before_part(self._pre_part, part), after_part(self._post_part, part), False))
        for module, before, after, always in around:
            # Around all other hooks: weight_norm, spectral_norm and the like compute with parameters in their hooks.
            first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            last = module.register_forward_hook(after, always_call=always)
            self._outermost.append((module, first, last))
            self._handles += [first, last]
        owned = {module: part.units for module, part in self._parts.items()}
        self._handles += hooks_for_state_dicts({**self._units, **owned})
        for number, unit in enumerate(schedule.units):
            for index, entry in enumerate(unit.named if unit.trainable else ()):
                hook: Callable[[Tensor], None] = parameter_hook_of(self._post_accumulate, number, index)
                # The short path neither changes streams nor sums a DTensor's gradient over ranks.
                if self._schedule.stream.is_only_one and not entry.is_distributed:
                    hook = unit.waiting.joining(index, hook, unit.appearance.whole_class)
                handle = entry.parameter.register_post_accumulate_grad_hook(hook)
                self._on_gradients.append((entry.parameter, handle))

    def remove(self) -> None:
        self.is_removed = True
        on_gradients = [handle for _, handle in self._on_gradients]
        for handle in [*self._handles, *on_gradients, *self._on_leaves.values()]:
            handle.remove()
        self._on_gradients.clear()
        self._handles.clear()
        self._on_leaves.clear()

    def _keep_places(self) -> None:
        """Move our module hooks around the user's, and our gradient hooks behind the user's, even if these are newer."""
        for module, first, last in self._outermost:
            make_outermost(module, first, last)
        with past_torch_function():  # a parameter whose values are elsewhere has hooks, too
            for parameter, handle in self._on_gradients:
                make_last(parameter, handle)

    # ------------------------------------------------------------------ forward

    def _forget_what_aborted(self) -> None:
        """Clean up after a backward that was aborted. Call it when another backward, or a forward outside one, begins."""
        if self._backward_is_open:
            if self._close_backward():
                self._schedule.abort()
            else:
                self._schedule.give_back()

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module not in self._units:  # a copy of a module has the hooks of the original
            raise UsageError(
                f"this {type(module).__name__} is a copy.copy() of a module of a sharded model, which shares its parameters and "
                "hooks: call the module itself, or take copy.deepcopy()."
            )
        recompute = in_backward()
        is_root = module is self._root
        if recompute:
            self._begin_backward()
        else:
            self._one_thread.begin(module, is_outermost=is_root)
            if is_root:
                self._running.clear()
            self._running[module] += 1
            self._schedule.stream.begin()
            self._forget_what_aborted()
            if is_root:
                self._keep_places()
                self._saved.recover()
                for part in self._parts.values():
                    if part.is_open:
                        part.close()
                self._begin_forward()
                self._schedule.begin_forward()
        refuse_transforms(self._units[module])
        self._in_compiled_code = is_compiled(module, all_callers=is_root) or (self._in_compiled_code and not is_root)
        if self._in_compiled_code:
            refuse_distributed_units(module, self._schedule.units)
        self._schedule.unshard(self._units[module], backward=recompute)
        for unit in self._units[module]:
            unit.appearance.begin_use()
        self._push(module, self._units[module])
        has_frozen = any(not unit.trainable for unit in self._units[module])
        if has_frozen and torch.is_grad_enabled() and not recompute:
            inputs = _differentiable((args, kwargs))
            self._open_calls[module] += self._hook(inputs, self._input_gradient_known, module)

    def _begin_forward(self) -> None:
        """Begin another `Forward` and forget those whose graphs are gone on every rank."""
        if not self._forwards[-1].to_come or all(unit.is_pinned for unit in self._schedule.units):
            return
        exist = self._schedule.reductions.on_any_rank([bool(forward.calls) for forward in self._forwards])
        self._forwards = [forward for forward, exists in zip(self._forwards, exist, strict=True) if exists]
        self._forwards.append(Forward())

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._one_thread.is_another and not in_backward():  # this forward was refused
            return
        self._saved.pop(module, output)
        if in_backward() and not torch.is_grad_enabled():
            return
        outputs = _differentiable(output) if torch.is_grad_enabled() else []
        if outputs:
            forward = self._forwards[-1]
            if in_backward() or all(unit.is_pinned for unit in self._units[module]):
                forward = Forward()  # a recomputation, or a call that this rank may make alone, does not count
            self._hook(outputs, self._pre_backward, module, Call(forward, module))
        if not in_backward():
            self._running[module] -= 1
            if self._running[module] > 0:
                return
            if module is not self._root or not torch.is_grad_enabled():
                self._schedule.reshard_after_forward(self._units[module], backward_follows=torch.is_grad_enabled())
            for unit in self._units[module]:
                unit.appearance.end_use()
            self._one_thread.end(module)

    def _push(self, caller: object, units: Sequence[Unit]) -> None:
        """Hook the tensors that autograd saves from sharded parameters, until the same caller's `SavedParameters.pop`."""
        wanted = torch.is_grad_enabled() and any(unit.sharded_at_rest for unit in units)
        if wanted and refuses_saved_tensors_hooks():
            # torch.func's transforms allow no hooks: their saved tensors are read from a unit that stays whole.
            wanted = False
            for unit in units:
                unit.is_held = True
        if wanted:
            self._saved.push(caller, unseen=self._in_compiled_code)

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

    def _pre_part(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_backward():
            self._forget_what_aborted()
        part = self._parts[module]
        part.close()  # if the last call raised
        missing = [unit for unit in part.units if unit.state is not UnitState.UNSHARDED]
        if missing:
            refuse_transforms(missing)
            _unshard(missing)
            part.gathered = missing
            part.is_open = True
            self._push(module, missing)

    def _post_part(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saved.pop(module, output)
        units = self._parts[module].close()
        if in_backward():
            return  # the backward still needs units that a recomputation gathers
        if units and torch.is_grad_enabled():
            self._hook(_differentiable(output), self._pre_part_backward, units)
        for unit in units:
            unit.reshard()

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
            return any(backward_reaches(get_gradient_edge(parameter).node) for parameter in trainable)
        except (RuntimeError, AttributeError):
            return False  # autograd.grad with respect to parameters, or torch.func's: they get no .grad

    def _before_saved_read(self, unit: Unit) -> None:
        """Unshard a unit before autograd, or code that inspects the graph, reads a parameter that was saved."""
        if not in_backward():
            unit.unshard()
            return
        self._begin_backward()
        self._hold_for_graph((unit,))
        if unit.state is not UnitState.UNSHARDED:
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
        if not self._backward_is_open:
            self._keep_places()
        self._begin_backward()
        call.begin()
        if module is not self._root:  # the root module begins with its last child, at the same tensor
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
            if unit.has_all_gradients:
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
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


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
            if is_another and any(thread.ident == running for thread in threading.enumerate()):
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
