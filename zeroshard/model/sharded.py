"""Owns `Sharded`: a model whose states are sharded, and the calls that its user may make."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.checkpoints import Checkpoints
from zeroshard.checkpoint.display import Display
from zeroshard.checkpoint.hugging_face import export_live
from zeroshard.core.context import Context
from zeroshard.core.hooks import Hooks
from zeroshard.core.model_states import ModelStates
from zeroshard.core.parking import STATES, Parking
from zeroshard.core.schedule import Schedule
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.state_dicts import state_dict_in_memory
from zeroshard.core.step import Move, StepState, after
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.members import refuse_no_rank
from zeroshard.core.unit import UnitState
from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.model.freezing import Freezing
from zeroshard.model.memory import formula, live_nbytes, memory_report
from zeroshard.model.named_weights import named_weights
from zeroshard.model.unsharded import unregister
from zeroshard.model.weight_shards import WeightShard, WeightsVersion, changed_since, weight_shards
from zeroshard.policy import DTypes, Offload, Place, Policy, place_of

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of_checkpoints(
    method: Callable[Concatenate[Checkpoints, _Arguments], _Result],
) -> Callable[Concatenate[Sharded, _Arguments], _Result]:
    """Make a method of `Sharded` that calls `method` of its `checkpoints`, with the same signature and docstring."""

    @wraps(method)
    def call(self: Sharded, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return method(self.checkpoints, *args, **kwargs)

    return call


@dataclass(frozen=True)
class Sharded:
    """A model whose states are sharded, as `shard` returns it.

    Attributes:
        model: the user's own model.
        optimizer: the user's optimizer, whose `step` and `zero_grad` work on the shards. If the model is for
            evaluation only, the optimizer has no parameters.
        policy: the residencies of the model states.
        checkpoints: the checkpoints, with `save`, `load` and `wait`.
        display: the progress lines on rank 0's terminal.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    policy: Policy
    checkpoints: Checkpoints
    display: Display
    _schedule: Schedule
    _hooks: Hooks
    _context: Context
    _parking: Parking
    _freezing: Freezing
    sharded_step: ShardedStep

    def clip_grad_norm_(self, max_norm: float | None, loss_scale: float = 1.0) -> float | Tensor:
        """Scale the gradients so that their global L2 norm is at most `max_norm` and return the norm before scaling.

        Every rank must call it after the last backward of the step. torch.nn.utils.clip_grad_norm_ works too, if all
        ranks used the same parameters.

        Args:
            max_norm: the maximum norm; with None, nothing is clipped.
            loss_scale: the loss scale of the backward (see `DynamicLossScaler`). Gradients are first divided by
                it. If the norm is not finite, they are left unchanged; then skip the step.

        Returns:
            A number if the CPU computes the norm. If an accelerator does, a tensor of shape [] there, as torch's own
            clipping returns; `float(norm)` waits for it.
        """
        return self.sharded_step.clip_grad_norm_(max_norm, loss_scale)

    @contextmanager
    def accumulate(self, active: bool = True) -> Iterator[None]:
        """Declare that the backwards inside are not the last of their step.

        If gradients are not sharded, this rank only sums them and does not send them. With `active` False, the block
        has no effect, so a loop can write `with sharded.accumulate(i < n - 1): loss.backward()`.
        """
        before = self._schedule.reductions.is_last_microbatch
        self._schedule.reductions.is_last_microbatch = before and not active
        try:
            yield
        finally:
            self._schedule.reductions.is_last_microbatch = before

    @property
    def backwards_ended(self) -> int:
        """The number of backwards that have ended on this rank since the model was sharded."""
        return self._schedule.backwards_ended

    def expect_last_microbatch(self, is_last: bool) -> None:
        """Declare, until the next call, whether backwards belong to the last microbatch of their step."""
        self._schedule.reductions.is_last_microbatch = is_last

    def end_backward(self) -> None:
        """End this microbatch's backward. Call it only if `backwards_ended` shows that torch did not report it.

        Raises:
            UsageError: an exception has aborted the backward.
        """
        self._refuse_aborted_backward()
        self._schedule.end_backward()

    def end_accumulation(self) -> None:
        """Reduce the gradients that this rank only summed. Every rank must call it.

        Raises:
            UsageError: an exception has aborted the last backward.
        """
        if not self.policy.gradients.sharded:
            self._refuse_aborted_backward()
            self.expect_last_microbatch(True)
            self._schedule.end_backward()

    def probe(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise UsageError: this method was removed."""
        raise UsageError(
            "probe() was removed. To see this rank's gradients, register a hook: parameter.register_hook(see)."
        )

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return a small tensor's sum over ranks, added in one tree of ranks, on its device. The host waits for the values.

        Every rank must call it, with the same shape and dtype.
        """
        if not isinstance(values, Tensor):
            raise UsageError(f"sum_over_ranks takes a tensor, not a {type(values).__name__}. Pass torch.tensor(value).")
        if not values.numel():
            return values.clone()
        own = values.detach().cpu().contiguous().reshape(-1)
        dtype = own[None].sum(0).dtype  # of integers, torch's sum is in 64 bits
        wide = own.to(torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype)

        def added(one: bytes, other: bytes) -> bytes:
            first, second = (torch.frombuffer(bytearray(each), dtype=wide.dtype) for each in (one, other))
            return first.add_(second).view(torch.uint8).numpy().tobytes()

        total = self._context.collectives.combine(wide.view(torch.uint8).numpy().tobytes(), added, "a sum over ranks")
        found = torch.frombuffer(bytearray(total), dtype=wide.dtype)
        return found.to(dtype).view(values.shape).to(values.device)

    def exchange_json(self, value: Any, what: str) -> list[Any]:
        """Return every rank's small `value`, converted by JSON, in rank order. Every rank must call it. Errors name `what`.

        A rank sends O(log W) messages if all values are equal.
        """
        return self._context.everyone.exchange_json(value, what)

    def consolidated_state_dict(self, to: int = 0) -> dict[str, Tensor] | None:
        """Return `model.state_dict()` in CPU memory on rank `to`, and None on the others. Every rank must call it.

        Units are unsharded one at a time. If ranks divide tensors (DTensors), several ranks have the number `to`: the
        first of them gets the state dict.

        Raises:
            UsageError: `to` is not a rank, or a step was aborted.
        """
        refuse_no_rank(f"consolidated_state_dict(to={to})", to, self.world_size)
        self._schedule.refuse_aborted_step()
        keeps = self.rank == to and self._context.others.rank == 0
        state = state_dict_in_memory(self.model, keeps=keeps)
        return state if keeps else None

    @overload
    def named_weights(
        self, to: int | None = None, *, merge_adapters: bool = False, names: str = "checkpoint",
        shards: Literal[False] = False,
    ) -> Iterator[tuple[str, Tensor]]: ...  # fmt: skip

    @overload
    def named_weights(
        self,
        to: None = None,
        *,
        merge_adapters: Literal[False] = False,
        names: str = "checkpoint",
        shards: Literal[True],
    ) -> Iterator[tuple[str, WeightShard]]: ...

    def named_weights(
        self, to: int | None = None, *, merge_adapters: bool = False, names: str = "checkpoint", shards: bool = False
    ) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, WeightShard]]:
        """Yield the model's weights one by one, for another program such as vLLM or SGLang.

        At most one unit is whole at a time, and no files are written. Names are the same as in an export, and values
        and dtypes the same as in the forward. Persistent buffers are included, and tied parameters come once, under the
        first name. For a PEFT model, only its adapters are included. Names for an adapter other than "default" begin
        with the adapter's name.

        If parameters are sharded at rest, every rank must run the loop and leave it at the same unit. Tensors may share the
        model's memory: only read them, and copy those that you keep after the loop. Writes to sharded parameters have no effect.

        Args:
            to: the rank that gets the weights. On other ranks, the loop yields nothing and ends when that rank leaves
                its own loop. None: every rank gets the weights.
            merge_adapters: for a PEFT model, yield the weights that `merge_and_unload` returns, under their names. The
                model does not change; one layer is copied at a time. Other models are not affected.
            names: "checkpoint": the names and shapes of files. For a model of transformers 5 they are those that
                `save_pretrained` writes, such as one weight for each expert. "model": the names and shapes in memory.
                Adapters have PEFT's names in both cases.
            shards: yield only the parts that this rank holds, each as a `WeightShard` with its place in the whole
                weight. A rank may run this loop without the others, and nothing is sent. All ranks' parts together are
                exactly the weights, with buffers from rank 0. A weight may come in several parts.

        Yields:
            The name, and the whole tensor on the device that computes; with `shards`, the name and a `WeightShard`.

        Raises:
            UsageError: `to` is not a rank, an adapter cannot be merged or handed over, or the model has DTensors. Or
                `shards` comes with `to` or `merge_adapters`.
                During the loop: some ranks left it early, the optimizer stepped, or unsharded weights were written to.
        """
        if not shards:
            return named_weights(self.checkpoints.live, to, merge_adapters=merge_adapters, names=names)
        if to is not None or merge_adapters:
            raise UsageError(
                "named_weights(shards=True) yields what each rank holds, so there is no receiver, and no whole layer to merge. "
                "Leave out `to` and `merge_adapters`, or leave out `shards`."
            )
        return weight_shards(self.checkpoints.live, names)

    def weights_version(self, names: str = "checkpoint") -> WeightsVersion:
        """Keep a copy of the weights that this rank holds, for `changed_since`. A rank may call it without the others.

        Call it when another program gets all weights. The copy takes, on the device that computes, the memory of this
        rank's part in the dtypes of the forward: 2 bytes an element in 16 bits, divided by the number of ranks.
        Its `nbytes` is that number. Delete the copy to free it.

        Args:
            names: see `named_weights`.
        """
        return WeightsVersion(self.checkpoints.live, names)

    def changed_since(self, version: WeightsVersion) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the elements, of those that this rank holds, whose bits changed since a version, and update the version.

        If the changes of all ranks are applied, by `weight.view(-1)[index] = value`, the other program's weights equal the
        model's to the last bit. A rank may run the loop without the others, and nothing is sent. If a loop ends early,
        the part of its last turn comes again in the next loop, with all its elements.

        In 16 bits, a step with a small learning rate leaves most weights as they are after rounding. An element with
        its index takes 10 bytes in 16 bits, or 6 after `index.int()`, so a whole part is the smaller message if more than a
        third of it has changed.

        Args:
            version: what the other program has, from `weights_version`. Several programs have a version each.

        Yields:
            The weight's name; the places of the changed elements in the flattened whole weight, int64 of shape [changed];
            and their new values, of the same shape.

        Raises:
            UsageError: the model has DTensors, states are parked, or the optimizer stepped inside the loop.
        """
        return changed_since(self.checkpoints.live, version)

    def measure_waits(self, measure: Callable[[str], AbstractContextManager[None]]) -> None:
        """Enter the context `measure(kind)` around each wait for other ranks.

        The kind is "reduce", "gather", "exchange", "broadcast" or "transfer".
        """
        self._context.collectives.measure = measure

    def finish_backward(self) -> None:
        """End this microbatch's backward if torch did not report its end, as when this rank's loss did not use any parameter.

        Raises:
            UsageError: an exception has aborted the backward.
        """
        self._refuse_aborted_backward()
        self._schedule.end_backward_once()

    def _refuse_aborted_backward(self) -> None:
        """Raise if the last backward did not end: a part of its gradients would count as all of them."""
        if self._schedule.state is StepState.BACKWARD:
            after(StepState.BACKWARD, Move.STEP)

    @property
    def states(self) -> ModelStates:
        """The model states by parameter name, to read and write as a whole or as this rank's part."""
        return ModelStates(self._schedule.units, self.sharded_step, self._context.collectives)

    def memory_report(self) -> dict[str, int]:
        """Return the memory that each kind of state takes on this rank, in bytes.

        The kinds are `parameters`, `gradients`, `optimizer` and `buffers` (communication scratch). With offload, there
        are also `disk` and `cpu`, which includes buffers for transfers to the disk.
        """
        storages = self._context.storages
        here = storages.accelerator
        scratch = self._context.pool.nbytes + self._context.collectives.buffers_nbytes
        if self._context.experts is not None:
            scratch += self._context.experts.collectives.buffers_nbytes
        kept = self.sharded_step.kept_in(here)
        report = memory_report(self._schedule.units, kept, scratch)
        elsewhere = storages.nbytes()
        elsewhere["cpu"] += self.sharded_step.sub_groups.nbytes
        if storages.host is not here:
            elsewhere["cpu"] += live_nbytes(self.sharded_step.kept_in(storages.host), set())
        if any(elsewhere.values()):
            report = report | elsewhere
        return report

    def offload_states(
        self, states: Iterable[str] = STATES, place: Place = Place.CPU, offload: Offload | None = None
    ) -> int:
        """Park model states off the accelerator between steps, so that other code may use its memory.

        A rank may call it without the others. Until `reload_states`, backwards, steps and saves raise an error, and so
        do forwards if parameters are parked. The memory of parameters stays allocated while other code refers to it,
        such as a kept `parameter.detach()`.

        Args:
            states: some of "parameters", "gradients" and "optimizer" (optimizer states, and master weights that are
                separate tensors).
            place: CPU memory, or the disk: a `Place` or its name. `Place.CPU` has no effect without an accelerator.
            offload: the settings for the disk; its `path` is the folder.

        Returns:
            The number of freed bytes.

        Raises:
            UsageError: gradients are waiting for a step, an `unsharded` block is open, states are parked already, a name is
                not a model state, or a parameter to park is of a class of your own.
            PolicyError: `place` is unknown, or it is the disk and `offload` does not name a folder.
            StorageError: there is no room; nothing has changed.
        """
        return self._parking.offload(states, place_of(place), offload or Offload())

    def reload_states(self) -> None:
        """Reload the model states that `offload_states` parked."""
        self._parking.reload()

    def memory_formula(self) -> dict[str, float]:
        """Return each rank's bytes at rest, by model state, from the ZeRO paper's formulas for trained parameters under Adam."""
        numels = Counter[Collectives]()  # experts may be sharded over fewer ranks than other parameters
        for unit in self._schedule.units:
            if unit.trainable:
                numels[unit.collectives] += sum(entry.shape.numel() for entry in unit.named)
        found: dict[str, float] = {}
        for ranks, numel in numels.items():
            own = formula(self.policy, self.dtypes, numel, ranks.world_size, ranks_per_host=ranks.inside.world_size)
            found = {state: found.get(state, 0.0) + nbytes for state, nbytes in own.items()}
        return found

    @property
    def dtypes(self) -> DTypes:
        """The dtypes of the model states of the first parameter, and of all parameters of its dtype."""
        return self._context.dtypes(next(self.model.parameters()).dtype)

    def comm_report(self, *, clear: bool = True) -> dict[str, int]:
        """Return the bytes that this rank has sent since the last call with `clear`, by collective."""
        report = dict(self._context.collectives.sent)
        if clear:
            self._context.collectives.sent.clear()
        return report

    @property
    def rank(self) -> int:
        """The rank of this process in the data-parallel group."""
        return self._context.collectives.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the data-parallel group."""
        return self._context.collectives.world_size

    def broadcast_buffers(self) -> None:
        """Copy rank 0's floating-point buffers, such as running statistics, to every rank.

        Only buffers of the state dict are copied. Every rank must call it.
        """
        collectives = self._context.collectives
        with collectives.operation("broadcast_buffers()"):
            for buffer in self.checkpoints.live.buffers.values():
                if buffer.is_floating_point():
                    values = buffer.contiguous()
                    collectives.broadcast(values.view(-1).view(torch.uint8))
                    buffer.copy_(values)

    @property
    def needs_other_ranks(self) -> bool:
        """Whether a forward gathers parameters: they are sharded, and no `unsharded` block holds them."""
        is_attached = not self._hooks.is_removed
        return is_attached and any(unit.sharded_at_rest and not unit.is_pinned for unit in self._schedule.units)

    @property
    def trains(self) -> bool:
        """Whether any parameter is trained."""
        return any(unit.trainable for unit in self._schedule.units)

    def update_trainable(self, param_group: dict[str, Any] | None = None) -> None:
        """Update the training state after changes to parameters' `requires_grad`.

        Every rank must call it between steps, with the same arguments. Frozen parameters lose their gradient and
        optimizer states. Unfrozen ones begin with new states, in the param group that listed them when the model was
        sharded. One unit is unsharded at a time. Gradients that a step has used are dropped.

        Args:
            param_group: a new group for unfrozen parameters that the optimizer lacks: `{"params": [...], "lr": ...}`.
                The user's own `optimizer.add_param_group(param_group)` does the same.

        Raises:
            UsageError: gradients are waiting for a step, or an unfrozen parameter is not in a group of the optimizer.
                For a new group: it repeats a parameter, or the model has several optimizers.
        """
        self._freezing.update(param_group)

    save = _of_checkpoints(Checkpoints.save)
    """See `Checkpoints.save`."""

    load = _of_checkpoints(Checkpoints.load)
    """See `Checkpoints.load`."""

    def export(self, out: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the model for `from_pretrained` (see `Engine.export`). Every rank must call it, to write its part."""
        self._schedule.refuse_aborted_step()
        with self.checkpoints.operation(f'export to "{out}"'):
            export_live(self.checkpoints, out, dtype)

    def remove(self) -> None:
        """End the sharding and leave the parameters whole, ordinary and current. Every rank must call it.

        The optimizer cannot step afterwards: create a new one. A second call has no effect.

        Raises:
            UsageError: an `unsharded` block or a loop over `named_weights` is open.
            CheckpointError: the last asynchronous save failed.
        """
        if self._hooks.is_removed:
            return
        self._schedule.refuse_pinned("remove()")
        self.reload_states()
        self._schedule.forget_gradients()  # nothing is in flight any longer
        self._hooks.remove()
        for unit in self._schedule.units:
            unit.release()
        unregister(self._schedule.units)
        self.sharded_step.release_inner()
        try:
            self.checkpoints.close()  # raises the error of an asynchronous save
        finally:
            self._context.close()

    def remove_alone(self) -> None:
        """Call `remove` if this rank has all parameters. If not, the model stays sharded until you shard it again or delete it."""
        if all(unit.state is UnitState.UNSHARDED for unit in self._schedule.units):
            self.remove()
        else:
            self.remove_before_next_sharding(self.remove)

    def remove_before_next_sharding(self, remove: Callable[[], object]) -> None:
        """Have the next sharding of the model, which every rank begins, call `remove` first."""
        self._hooks.before_next_sharding = remove

    def abandon(self) -> None:
        """End the sharding on this rank only, after an error. Other ranks that wait for this one then raise an error.

        Parameters that are sharded at rest stay placeholders, since only all ranks together can gather them. Others are whole.
        """
        self._hooks.remove()
        unregister(self._schedule.units)
        self.sharded_step.release_inner()
        with suppress(ZeroshardError):  # the first error counts, not this one
            self.checkpoints.close()
        self._context.close()
