"""Owns `Engine`: training with a JSON config, with the methods of DeepSpeed's engine.

The engine is a thin layer over `shard`: it counts microbatches, scales the loss, and calls the sharded model.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from zeroshard.core.parking import STATES
from zeroshard.engine.config.load import Config
from zeroshard.engine.engine_optimizer import EngineOptimizer
from zeroshard.engine.from_config import create_loss_scaler
from zeroshard.engine.loader import StatefulLoader
from zeroshard.engine.microbatches import Microbatches
from zeroshard.engine.progress import Progress, StepReport
from zeroshard.engine.recompute.checkpointer import Checkpointer
from zeroshard.engine.saving import Saving
from zeroshard.errors import UsageError
from zeroshard.errors.hints import add_hint
from zeroshard.launch import local_rank
from zeroshard.model.sharded import Sharded
from zeroshard.optim.lr_schedules import Floor, LRSchedule, refuse_without_metrics
from zeroshard.policy import Offload, Place
from zeroshard.torch_private import compiled_call_of, tree_map

_PARKED = {
    "lp_params": "parameters", "lp_grads": "gradients", "contiguous_grad_buffer": "gradients", "hp_params": "optimizer",
    "optim_states": "optimizer",
}  # fmt: skip
"""DeepSpeed's names for the states that `offload_states` parks."""


class Engine(Saving, nn.Module):
    """An engine that trains one model: `loss = engine(batch); engine.backward(loss); engine.step()` for each microbatch.

    The engine is a module that wraps the user's model: `parameters()`, `state_dict()` (keys begin with `module.`), `train()`
    and `eval()` work as for any wrapper. Attributes that the engine lacks are looked up in the model.

    Attributes:
        module: the user's own model.
        optimizer, lr_scheduler: objects from the config or the caller. `optimizer.step()` does not advance the scheduler.
        config: the config as a dict, as it was read, with values instead of "auto".
        resolved: the resolved config: each key with its value, its origin and its effect.
        checkpointing: the `Checkpointer` of the units, if the config sets `checkpoint_units`.
        training_dataloader: an object whose `state_dict` is its position, by default the loader that `initialize` made.
            A checkpoint holds rank 0's position, and all ranks load it.
        client_optimizer: the optimizer that was passed to `initialize`, or the callable that creates it.
        loss_scaler: the object with the current loss scale (1 except under fp16).
        global_steps, micro_steps, global_samples, skipped_steps: counters since the start of training. A skipped step
            counts in all of them.
    """

    def __init__(
        self, sharded: Sharded, config: Config, lr_scheduler: Any, device: torch.device,
        checkpointing: Checkpointer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module = sharded.model
        self.config = dict(config.document)
        self.resolved = config
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.checkpointing = checkpointing
        self.loss_scaler = create_loss_scaler(config)
        self.optimizer = EngineOptimizer(sharded.sharded_step, self.loss_scaler)
        self.local_rank = local_rank()
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.training_dataloader: Any = None
        self.client_optimizer: Any = None
        self._sharded = sharded
        self._last = StepReport(applied=False)
        self._was_applied = self._destroyed = False
        self._whole_adapters = ExitStack()
        """The context in which the adapters that a trainer is saving stay whole. The next use of the engine closes it."""
        self._microbatches = Microbatches(sharded)
        self._progress = Progress(sharded, config, device)
        sharded.sharded_step.driver = self._step_of_optimizer
        sharded.sharded_step.loss_scale = self.loss_scaler.scale

    def __getattr__(self, name: str) -> Any:
        """Fall back to the user's model for attributes that the engine lacks."""
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if "module" in modules and hasattr(modules["module"], name):
            return getattr(modules["module"], name)
        raise AttributeError(f"neither the engine nor the model has an attribute {name!r}.")

    # ------------------------------------------------------------------ one microbatch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, with autocast or fp16 inputs if the config sets them. A destroyed engine runs only without gradients."""
        self._whole_adapters.close()
        if self.fp16_auto_cast():
            args, kwargs = tree_map(_to_half, (args, kwargs))
        if torch.is_grad_enabled():
            if self._destroyed:
                raise UsageError(
                    "the engine was destroyed, and cannot train. A stock Trainer's train() destroys the engine of an earlier "
                    "train() or evaluate(): make a new Trainer with a new model for each. In your own loop, call "
                    "initialize again."
                )
            self._microbatches.expect_backward(self.is_gradient_accumulation_boundary())
        with self._progress.measure("forward"), self._autocast():
            return self.module(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.resolved.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.resolved.autocast_dtype)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute this microbatch's gradients and return the detached loss after the division below.

        A microbatch may have several backwards. `loss.backward()` works too: the step then divides the gradients. Under
        fp16, call `engine.scale(loss).backward()` instead. Use one of these ways throughout a step.

        Args:
            loss: a scalar that depends on the model. Under fp16, this method multiplies it by the loss scale.
            scale_wrt_gas: whether to divide by gradient_accumulation_steps, so that a step takes the mean over microbatches.
                If false, the caller must divide. Either way, logs show the sum of a step's losses after the division.

        Raises:
            UsageError: the loss is not a scalar tensor or requires no gradient, or the engine is for evaluation only.
        """
        self._refuse_untrained("backward")
        _refuse_not_scalar(loss, "backward")
        mean = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        scaled = self._scaled(mean)
        self._microbatches.expect_backward(self.is_gradient_accumulation_boundary())
        with self._progress.measure("backward"), self._microbatches.own_backward():
            if scaled.requires_grad:
                try:
                    scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
                except Exception as error:
                    add_hint(error)
                    raise
            elif torch.is_grad_enabled() and self._sharded.sharded_step.views:
                raise UsageError(
                    "the loss does not require a gradient: it was computed under torch.no_grad(), or detached. "
                    "Pass the loss as the model returned it."
                )
        self._progress.losses.append(mean.detach())
        return mean.detach()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss in fp32 times the loss scale, for `engine.scale(loss).backward()`; without fp16, the loss itself."""
        self._refuse_untrained("scale")
        _refuse_not_scalar(loss, "scale")
        if loss.grad_fn is None:
            raise UsageError(
                "engine.scale takes a loss with a graph, but this one was computed under torch.no_grad() or "
                "detached. Pass the loss as the model returned it."
            )
        self._microbatches.was_scaled = True
        return self._scaled(loss)

    def _scaled(self, loss: Tensor) -> Tensor:
        if not self.resolved.scales_loss:
            return loss
        return loss.float() * self.loss_scaler.scale  # in fp32: an fp16 loss of 1 times 65536 would be infinite

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepReport:
        """End the microbatch. After the last one of a step, clip, update the parameters and advance the scheduler.

        A step whose gradients are not finite is skipped: parameters, optimizer and scheduler do not change. Under bf16,
        it is skipped only with `bf16.check_grad_overflow`. Parameters without a gradient on any rank do not change.

        Args:
            lr_kwargs: arguments of the scheduler's step, such as a metric.

        Raises:
            LossScaleError: fp16 gradients overflow at the smallest loss scale.
            CheckpointError: an asynchronous save has failed.
            UsageError: the call is out of order, such as after `optimizer.step()`.
        """
        if self._microbatches.ended_by_optimizer:  # this call would end a microbatch that never ran
            raise UsageError(
                "engine.step() was called after optimizer.step(), which had already ended the step. Call one of them. "
                "After optimizer.step(), call lr_scheduler.step() yourself."
            )
        if self._ends_step and not lr_kwargs:
            refuse_without_metrics(self.lr_scheduler)
        return self._step(lambda: self.lr_scheduler.step(**(lr_kwargs or {})))

    def _step_of_optimizer(self) -> StepReport:
        """Run `optimizer.step()` without advancing the scheduler."""
        if not self._ends_step:
            raise UsageError(
                f"optimizer.step() was called in microbatch {self._microbatches.count + 1} of "
                f"{self.gradient_accumulation_steps()}. Call engine.step() after each microbatch, or set "
                "gradient_accumulation_steps to 1 and accumulate in engine.no_sync()."
            )
        report = self._step(lambda: None)
        self._microbatches.ended_by_optimizer = True
        return report

    @property
    def _ends_step(self) -> bool:
        """Whether a call of `step()` now would end a step. If the caller counts microbatches, every call does."""
        return not self.managed_gradient_accumulation() or self.is_gradient_accumulation_boundary()

    def _step(self, move_schedule: Callable[[], Any]) -> StepReport:
        self._refuse_untrained("step")
        self._whole_adapters.close()
        if self._microbatches.is_no_sync:
            raise UsageError(
                "engine.step() was called inside engine.no_sync(), which delays the reduction. Call it outside."
            )
        ends_step = self._ends_step
        if self.managed_gradient_accumulation():
            self._microbatches.warn_of_missing_steps(self.gradient_accumulation_steps())
        self._microbatches.end(ends_step=ends_step)
        self.micro_steps += 1
        if not ends_step:
            self._was_applied = False
            count = self.gradient_accumulation_steps()
            return StepReport(False, f"microbatch {self._microbatches.count} of {count}: gradients are accumulated")
        # Until the step is counted, a save would be incomplete.
        with self._progress.measure("step"), self._sharded.sharded_step.driven():
            self._last = self._take_step(move_schedule)
        self._was_applied = self._last.applied
        self._progress.log(self._last, self.global_steps, self.global_samples, self.get_lr()[0])
        self.loss_scaler.update(not self._last.applied)  # where no step is skipped, the scale is constant
        self._sharded.sharded_step.loss_scale = self.loss_scaler.scale
        self._sharded.checkpoints.raise_if_failed()
        return self._last

    def _take_step(self, move_schedule: Callable[[], Any]) -> StepReport:
        scale = self.loss_scaler.scale  # 1 except under fp16
        multiple = self._microbatches.multiple(self.gradient_accumulation_steps(), self.resolved)
        norm = self._sharded.clip_grad_norm_(self._schema.gradient_clipping or None, scale * multiple)
        skips = self.resolved.skips_steps_that_are_not_finite
        if skips:
            norm = float(norm)  # waits for an accelerator
        not_finite: tuple[str, ...] = ()
        applied = True
        if not isinstance(norm, Tensor) and not math.isfinite(norm):
            not_finite = self._sharded.sharded_step.not_finite()
            applied = not skips
        if applied:
            self.optimizer.step()
        self._sharded.sharded_step.overflow = not applied
        self.optimizer.zero_grad()
        batch = self.resolved.batch
        samples = batch.train
        if not self.managed_gradient_accumulation():  # then each backward counts as a microbatch
            samples = batch.micro * batch.world_size * self._microbatches.backwards
        self.global_samples += samples
        self._microbatches.start_step()
        self.skipped_steps += not applied
        self.global_steps += 1
        if isinstance(self.training_dataloader, StatefulLoader):
            self.training_dataloader.state_of_step = self.training_dataloader.state_dict()
        if applied and self.lr_scheduler is not None:  # after the counts: a schedule may raise
            move_schedule()
        reason = None
        if not applied:
            reason = f"the gradient norm is {norm}; {len(not_finite)} gradients are not finite"
            if not_finite:
                reason += f": those of {', '.join(not_finite[:3])}"
            if len(not_finite) > 3:
                reason += ", ..."
        return StepReport(applied, reason, not_finite, norm, scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the step's gradients so far, as after an error. The next microbatch is then the step's first.

        `set_to_none` has no effect.
        """
        self._microbatches.warn_of_dropped_gradients()
        self.optimizer.zero_grad()
        self.micro_steps -= self._microbatches.count
        self._microbatches.start_step()
        self._progress.losses.clear()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current microbatch is the last of its step.

        If the config sets `managed_gradient_accumulation` to false, the result is False until `step`.
        """
        if self._microbatches.boundary is not None:
            return self._microbatches.boundary
        if not self.managed_gradient_accumulation():
            return False  # unknown before `step`
        return self._microbatches.count + 1 >= self.gradient_accumulation_steps()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Declare whether the current microbatch is the last of its step. `managed_gradient_accumulation` must be true.

        From then on, these calls replace the engine's own count. A call between forward and backward is allowed too.
        """
        if not self.managed_gradient_accumulation():
            raise UsageError(
                "set_gradient_accumulation_boundary() was called with managed_gradient_accumulation false, where every "
                "engine.step() ends a step. Leave the call out."
            )
        self._microbatches.boundary = bool(is_boundary)
        self._microbatches.expect_backward(bool(is_boundary))

    def no_sync(self) -> AbstractContextManager[None]:
        """Sum the gradients of backwards inside the block on this rank only.

        `parameter.grad` is the sum. Sharded gradients are reduced as usual, since no rank has memory for whole gradients.
        """
        self._warn_of_narrow_sums("engine.no_sync()")
        return self._microbatches.no_sync()

    def coalesce_grad_reduction(self) -> AbstractContextManager[None]:
        """Return a context for several backwards of one microbatch. It has no effect: gradients are always summed."""
        return nullcontext()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Do nothing: the backward of a step's last microbatch reduces gradients, and `step` reduces the others."""

    def _warn_of_narrow_sums(self, what: str) -> None:
        """Warn if the engine was created for one microbatch per step, so gradients are not summed in a wider dtype."""
        dtype = self._sharded.dtypes.accumulate
        if dtype.itemsize < 4 and self.resolved.schema.data_types.grad_accum_dtype is None:
            warnings.warn(
                f"{what}: gradients of several microbatches are summed in {dtype}, since the config names one microbatch. Set "
                "data_types.grad_accum_dtype to fp32, or to this dtype to turn the warning off.",
                stacklevel=3,
            )

    def _refuse_untrained(self, what: str) -> None:
        if not self._sharded.trains:
            raise UsageError(
                f"engine.{what} was called on an engine for evaluation only. Pass initialize an optimizer (with "
                "accelerate: prepare the model and its optimizer in one call), or add an `optimizer` block to the config."
            )

    # ------------------------------------------------------------------ inspection and changes between steps

    def underflow_report(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise UsageError: this method was removed."""
        raise UsageError(
            "engine.underflow_report() was removed. If gradients vanish in fp16, raise initial_scale_power, or train in bf16."
        )

    def update_trainable(self, param_group: dict[str, Any] | None = None) -> None:
        """Update the training state after parameters were frozen or unfrozen. Every rank must call it.

        See `Sharded.update_trainable`. Passing a `param_group` raises UsageError if the scheduler is one of
        zeroshard's.
        """
        if param_group is not None and isinstance(self.lr_scheduler, LRSchedule | Floor):
            raise UsageError(
                f"{type(self.lr_scheduler).__name__} was made for the optimizer's existing param groups. List the frozen "
                "parameters when you make the optimizer, or use one of torch's schedulers."
            )
        self._whole_adapters.close()
        self._sharded.update_trainable(param_group)

    def offload_states(
        self, include: Iterable[str] | None = None, device: str = "cpu", pin_memory: bool = True, non_blocking: bool = False,
        nvme_path: str | os.PathLike[str] | None = None,
    ) -> int:  # fmt: skip
        """Park model states off the accelerator, between steps; see `Sharded.offload_states`.

        Args:
            include: some of "parameters", "gradients" and "optimizer", or DeepSpeed's names for these; default: all.
            device: "cpu", or "nvme" for the disk, in the folder `nvme_path` (default: the config's folder).
            pin_memory: whether CPU memory for the states is pinned.
            non_blocking: no effect; when this method returns, the accelerator's memory is free.

        Returns:
            The number of freed bytes.

        Raises:
            UsageError: the device is unknown, or no folder is named; see also `Sharded.offload_states`.
        """
        self._whole_adapters.close()
        place = {"cpu": Place.CPU, "nvme": Place.DISK}.get(_value(device))
        if place is None:
            raise UsageError(f'offload_states to the device {_value(device)!r} is not supported. Pass "cpu" or "nvme".')
        policy = self.resolved.policy
        folder = nvme_path or policy.offload_optimizer.path or policy.offload_parameters.path
        if place is Place.DISK and folder is None:
            raise UsageError(
                "offload_states to nvme needs nvme_path, since the config names no folder. Pass it, or set it in an offload "
                "block."
            )
        offload = Offload(None if folder is None else os.fspath(folder), pin_memory)
        names = [_value(name) for name in (STATES if include is None else include)]
        states = list(dict.fromkeys(_PARKED.get(name, name) for name in names))
        return self._sharded.offload_states(states, place, offload)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Reload the states that `offload_states` parked. `non_blocking` has no effect."""
        self._sharded.reload_states()

    def empty_partition_cache(self) -> None:
        """Release the accelerator's memory that torch's allocator keeps for reuse. Do nothing on a CPU."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the number of microbatches, between steps, so that a step has this number of samples over all ranks.

        Raises:
            UsageError: a step has begun, or the number is not a multiple of all ranks' samples in one microbatch.
        """
        batch = self.resolved.batch
        step = batch.micro * batch.world_size
        if train_batch_size < 1 or train_batch_size % step:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}): choose a multiple of {step}: {batch.micro} samples on "
                f"each of {batch.world_size} ranks."
            )
        self._refuse_within_step("set_train_batch_size")
        if train_batch_size > step:
            self._warn_of_narrow_sums(f"set_train_batch_size({train_batch_size})")
        changed = replace(batch, train=train_batch_size, accumulation=train_batch_size // step)
        self.resolved = replace(self.resolved, batch=changed)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the number of samples per microbatch, between steps. The number of microbatches stays the same.

        A loader that already exists keeps its batch size.

        Raises:
            UsageError: a step has begun, or the number is below 1.
        """
        if micro_batch_size < 1:
            raise UsageError(
                f"set_train_micro_batch_size({micro_batch_size}): pass the samples of one forward, 1 or more."
            )
        self._refuse_within_step("set_train_micro_batch_size")
        batch = self.resolved.batch
        train = micro_batch_size * batch.accumulation * batch.world_size
        self.resolved = replace(self.resolved, batch=replace(batch, train=train, micro=micro_batch_size))

    def _refuse_within_step(self, what: str) -> None:
        if self._microbatches.count:
            raise UsageError(f"{what}() was called within a step. Call it after the step's last microbatch.")

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Any = None, collate_fn: Callable[..., Any] | None = None, num_local_io_workers: int | None = None,
    ) -> StatefulLoader:  # fmt: skip
        """Create a loader over this rank's part of a dataset, as `initialize(training_data=...)` does.

        Args:
            batch_size: the number of samples in a batch; default: the samples of a microbatch.
            route, pin_memory, num_local_io_workers: no effect. (`data_sampler` must be None.)
        """
        if data_sampler is not None:
            raise UsageError(
                "deepspeed_io(data_sampler=...) is not supported: use torch's DataLoader with your sampler."
            )
        batch = self.resolved.batch
        drop_last = self._schema.dataloader_drop_last
        size = batch.micro if batch_size is None else batch_size
        return StatefulLoader(
            dataset, size, self._sharded.rank, batch.world_size, drop_last=drop_last, collate_fn=collate_fn
        )

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:  # type: ignore[override]
        """Compile the model in place, as `module.compile` does. The graph breaks at the boundaries of units."""
        self.module.compile(backend=backend, **{**(compile_kwargs or {}), **kwargs})

    @property
    def is_compiled(self) -> bool:
        """Whether the model is compiled."""
        return compiled_call_of(self.module) is not None

    def destroy(self, *, alone: bool = False) -> None:
        """End the sharding and leave the module whole and ordinary. Every rank must call it.

        Args:
            alone: whether this rank may call it without the others, as in DeepSpeed. If it then lacks parameters, the
                model stays sharded until it is passed to `initialize` again.
        """
        self._whole_adapters.close()
        self._destroyed = True
        self._progress.close()
        if self.checkpointing is not None:
            self.checkpointing.remove()
        if alone:
            self._sharded.remove_alone()
        else:
            self._sharded.remove()


def _to_half(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) and value.is_floating_point() else value


def _value(name: Any) -> str:
    """Return the name of a state or a device. DeepSpeed uses enums, whose values are the names."""
    return str(getattr(name, "value", name))


def _refuse_not_scalar(loss: Any, what: str) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    kind = type(loss).__name__
    if isinstance(loss, Tensor):
        kind = f"a tensor of shape {tuple(loss.shape)}"
    raise UsageError(f"engine.{what} takes a scalar loss tensor, not {kind}. Pass the mean of the losses.")
