"""Owns `Engine`: the road with a JSON config, in the shape that DeepSpeed users know. Made by `initialize`.

The engine is a thin layer over `shard`: it counts microbatches, scales the loss, and calls the plain road.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zeroshard.config.load import Config
from zeroshard.engine.checkpoint_values import COUNTERS, Resumable
from zeroshard.engine.loss_scaling import cast_inputs, create_loss_scaler
from zeroshard.engine.parking_names import destination, states_of
from zeroshard.engine.progress import Progress
from zeroshard.engine.readers import Readers
from zeroshard.engine.step_report import StepReport, why_not_finite
from zeroshard.engine.underflow import count_underflow
from zeroshard.errors import UsageError
from zeroshard.launch import local_rank
from zeroshard.observe.underflow import SCALES, UnderflowReport
from zeroshard.optim.lr_schedules import Floor, LRSchedule
from zeroshard.recompute.checkpointer import Checkpointer
from zeroshard.sharded import Sharded


class Engine(Readers):
    """Trains one model: `loss = engine(batch); engine.backward(loss); engine.step()` for each microbatch.

    Attributes:
        module: the user's own model.
        optimizer, lr_scheduler: what the config or the caller named.
        checkpointing: what checkpoints the units, where the config's `checkpoint_units` asks for it.
        training_dataloader: what has a `state_dict` of its position; rank 0's is saved in checkpoints, and loaded on all. Set your
            own, or the loader that `initialize` made is it.
        loss_scaler: knows the present loss scale (1 but under fp16).
        global_steps, micro_steps, global_samples, skipped_steps: counters since the start; a skipped step counts in all.
    """

    def __init__(
        self, sharded: Sharded, config: Config, lr_scheduler: Any, device: torch.device,
        checkpointing: Checkpointer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sharded, config)
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.checkpointing = checkpointing
        self.loss_scaler = create_loss_scaler(config)
        self.local_rank = local_rank()
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.training_dataloader: Any = None
        self._backward_done = False
        self._last_call: tuple[Any, Any] | None = None
        self._progress = Progress(sharded, config, device)

    # ------------------------------------------------------------------ one microbatch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        args, kwargs = cast_inputs(self.config, (args, kwargs))
        if self.config.scales_loss and torch.is_grad_enabled():
            self._last_call = (args, kwargs)  # for underflow_report
        with self._progress.measure("forward"), self._autocast():
            return self.module(*args, **kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.config.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute this microbatch's gradients. Returns the loss divided by the accumulation steps.

        Args:
            loss: a scalar that depends on the model; under fp16 it is multiplied by the loss scale here.
            scale_wrt_gas: divide by gradient_accumulation_steps, so that a step takes the mean over microbatches.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"engine.backward takes a scalar loss tensor, not {what}.")
        if not self._sharded.trains:
            raise UsageError(
                "this engine is for evaluation alone: give initialize an optimizer, or the config an `optimizer` block."
            )
        if self._backward_done:
            raise UsageError(
                "engine.backward was called twice for one microbatch: call engine.step() after each backward."
            )
        mean = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        # In fp32: a loss in half precision times 65536 is infinite.
        scaled = mean.float() * self.loss_scaler.scale if self.config.scales_loss else mean
        with self._progress.measure("backward"), self._sharded.accumulate(not self.is_gradient_accumulation_boundary()):
            if scaled.requires_grad:
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            elif torch.is_grad_enabled() and self.optimizer.views:
                raise UsageError(
                    "the loss does not require a gradient: was it computed under torch.no_grad(), or detached?"
                )
            self._sharded.finish_backward()
        self._backward_done = True
        self._progress.add_loss(loss.detach())
        return mean.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepReport:
        """End the microbatch; at the last one of a step, clip, update the parameters and move the schedule.

        A step whose gradients are not finite is not applied: parameters, optimizer and schedule stay as they are.

        Args:
            lr_kwargs: arguments of the scheduler's step, such as a metric.

        Raises:
            LossScaleError: fp16 gradients overflow at the smallest loss scale.
        """
        if not self._backward_done:
            raise UsageError("engine.step() was called without a backward: call engine.backward(loss) first.")
        self._backward_done = False
        ends_step = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not ends_step:
            count = self.gradient_accumulation_steps()
            return StepReport(False, f"microbatch {self.micro_steps % count} of {count}: gradients are accumulated")
        with self._progress.measure("step"):
            self._last = self._take_step(lr_kwargs or {})
        self._progress.tell(self._last, self.global_steps, self.global_samples, self.get_lr()[0])
        self.loss_scaler.update(not math.isfinite(self._last.grad_norm or 0.0))
        self._sharded.checkpoints.raise_if_failed()
        return self._last

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> StepReport:
        scale = self.loss_scaler.scale if self.config.scales_loss else 1.0
        not_finite: tuple[str, ...] = ()
        reason = None
        norm = self._sharded.clip_grad_norm_(self.config.schema.gradient_clipping or None, scale)
        if not math.isfinite(norm):
            not_finite = self.optimizer.not_finite()
            reason = why_not_finite(norm, not_finite)
        applied = reason is None or not self.config.skips_steps_that_are_not_finite
        if applied:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.skipped_steps += not applied
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        return StepReport(applied, None if applied else reason, not_finite, norm, scale)

    def zero_grad(self) -> None:
        """Forget the gradients of the step's microbatches so far, after an exception, say: the next is the step's first."""
        self.optimizer.zero_grad()
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._backward_done = False
        self._progress.forget_losses()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch is the last of its step."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False, *, asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> bool:  # fmt: skip
        """Save everything that training needs: it loads at any world size, stage and precision, whole or not at all.

        Every rank must call it, after a step. Saved are parameters, master weights, optimizer states, buffers, the scheduler, the
        loss scaler, counters, every rank's random state, the position of `training_dataloader`, and `client_state`.

        Args:
            save_dir: the folder of all checkpoints.
            tag: default: `global_step` and the number of steps.
            client_state: JSON and tensors; rank 0's is saved.
            save_latest: `load_checkpoint` without a tag loads this one.
            exclude_frozen_parameters: leave out what is not trained.
            asynchronous: copy to CPU memory, and write behind the training. The next save waits for it; what went wrong with
                it is raised by the next `step` or save.
            keep_last: remove all but so many of the newest.

        Raises:
            CheckpointError: on every rank, where any could not write. What was saved before is as it was.
        """
        counters = {name: getattr(self, name) for name in COUNTERS}
        self._sharded.save(
            save_dir,
            tag or f"global_step{self.global_steps}",
            self._resumable.values(counters, client_state),
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            asynchronous=asynchronous,
            keep_last=keep_last,
        )
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False, *,
        fall_back: bool = False,
    ) -> tuple[str, dict[str, Any]]:  # fmt: skip
        """Go on where a checkpoint was saved, at whatever world size, stage and precision. Every rank must call it.

        Args:
            load_dir: the folder of all checkpoints.
            tag: default: what its file `latest` names.
            load_module_strict: parameters that the checkpoint or the model lacks are errors.
            load_optimizer_states: load the optimizer's states, and the loss scaler.
            load_lr_scheduler_states: load the scheduler.
            load_module_only: load parameters and buffers, nothing else.
            fall_back: where a checkpoint is damaged, load the newest whole one in its place.

        Returns:
            (the checkpoint's folder, client_state)

        Raises:
            CheckpointError: on every rank; names the file and the cause.
        """
        states = load_optimizer_states and not load_module_only
        loaded = self._sharded.load(
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=states,
            random=not load_module_only,
            fall_back=fall_back,
        )
        values = loaded.values
        self._backward_done = False
        if not load_module_only:
            for name in COUNTERS:
                setattr(self, name, int(values.get("engine", {}).get(name, getattr(self, name))))
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
            self._resumable.load(values, lr_scheduler=load_lr_scheduler_states, loss_scaler=states)
            self._progress.start_at(self.global_samples)
        return str(loaded.path), values.get("client_state", {})

    @property
    def _resumable(self) -> Resumable:
        return Resumable(self.lr_scheduler, self.loss_scaler, self.training_dataloader)

    def export(self, out: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the model as transformers does (safetensors, ties once), each rank its own part. Every rank must call it.

        Args:
            out: the folder, for `from_pretrained` or `load_pretrained`.
            dtype: of the floating-point tensors; default: fp32, from the master weights.
        """
        self._sharded.export(out, dtype)

    def save_16bit_model(self, save_dir: str | os.PathLike[str]) -> bool:
        """As `export`, in the dtype that the model trains in; bf16 where that is fp32. Every rank must call it."""
        dtype = self.config.precision.param_dtype
        self.export(save_dir, dtype if dtype is not None and dtype.itemsize == 2 else torch.bfloat16)
        return True

    # ------------------------------------------------------------------ looks and changes between steps

    def underflow_report(
        self, compute_loss: Callable[[], Tensor] | None = None, scales: Sequence[float] = SCALES
    ) -> UnderflowReport:
        """What share of each parameter's gradient elements vanishes in fp16, at the present loss scale and at others.

        The loss is computed and differentiated again at each scale; nothing of the training is touched. Every rank must
        call it. `report.table()` is for rich's console, `report.plot(path)` draws it.

        Args:
            compute_loss: makes the loss of some batch; by default the last call of the engine is run again, which must
                then return the loss.
            scales: loss scales to compare with the present one.
        """
        if not self.config.scales_loss:
            raise UsageError("underflow_report looks at fp16 gradients: enable fp16 in the config.")
        return count_underflow(self._sharded, compute_loss or self._replay, self.loss_scaler.scale, scales)

    def _replay(self) -> Tensor:
        if self._last_call is None:
            raise UsageError("underflow_report runs the last microbatch again, and none was run: give it compute_loss.")
        args, kwargs = self._last_call
        with self._autocast():
            loss = self.module(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("the model does not return its loss: give underflow_report a function that computes it.")
        return loss

    def update_trainable(self, param_group: dict[str, Any] | None = None) -> None:
        """Take note of parameters that were frozen or freed, see `Sharded.update_trainable`. Every rank must call it."""
        if param_group is not None and isinstance(self.lr_scheduler, LRSchedule | Floor):
            raise UsageError(
                f"{type(self.lr_scheduler).__name__} was made for the param groups that there were: list the parameters when the "
                "optimizer is made, frozen as they are, or use a scheduler of torch's."
            )
        self._sharded.update_trainable(param_group)

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        nvme_path: str | os.PathLike[str] | None = None,
    ) -> int:
        """Park model states off the accelerator, between steps: see `Sharded.offload_states`.

        Args:
            include: of "parameters", "gradients", "optimizer", or as DeepSpeed calls them: "lp_params", "lp_grads",
                "contiguous_grad_buffer", "hp_params", "optim_states". Default: all.
            device: "cpu", or "nvme" for the disk.
            pin_memory: pin the CPU memory that they go through.
            non_blocking: has no meaning here: when this returns, the accelerator's memory is free.
            nvme_path: the folder; default: the one that the config names.

        Returns:
            The bytes that were given back.
        """
        place, offload = destination(device, nvme_path, self.config.policy, pin_memory)
        return self._sharded.offload_states(states_of(include), place, offload)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` parked."""
        self._sharded.reload_states()

    def train(self, mode: bool = True) -> Engine:
        """As `module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As `module.eval`."""
        return self.train(False)

    def destroy(self) -> None:
        """Take zeroshard off: the module is whole and ordinary again. Every rank must call it."""
        self._progress.close()
        if self.checkpointing is not None:
            self.checkpointing.remove()
        self._sharded.remove()
