"""Owns an engine's getters: its config under DeepSpeed's names, figures of the last step, and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from zeroshard.engine.config.load import Config
from zeroshard.engine.config.schema import Schema
from zeroshard.engine.config.zero_block import ZeroBlock
from zeroshard.engine.engine_optimizer import EngineOptimizer
from zeroshard.engine.progress import StepReport
from zeroshard.model.sharded import Sharded
from zeroshard.optim.loss_scaler import LossScaler
from zeroshard.optim.lr_schedules import rates
from zeroshard.policy import Place

T = TypeVar("T")


def _returns(doc: str, read: Callable[[Readers], T]) -> Callable[[Any], T]:
    """Create a method without arguments that returns one value."""

    def method(self: Readers) -> T:
        return read(self)

    method.__doc__ = doc
    method.__annotations__.clear()  # help() would show type variables
    return method


class Readers:
    """The getters of an engine. DeepSpeed's getters form a table, with one row each."""

    optimizer: EngineOptimizer
    resolved: Config
    loss_scaler: LossScaler
    _sharded: Sharded
    _last: StepReport
    _was_applied: bool

    @property
    def _schema(self) -> Schema:
        return self.resolved.schema

    @property
    def _zero(self) -> ZeroBlock:
        return self.resolved.schema.zero_optimization

    def get_global_grad_norm(self) -> float | None:
        """Return the global L2 norm of the last step's gradients before clipping; None before the first step.

        It is infinite if scaled fp16 gradients overflowed, as in DeepSpeed. The report of `step` has the computed norm,
        which is NaN if infinities of both signs were added.
        """
        norm = self._last.grad_norm
        if self.resolved.scales_loss and norm is not None and not math.isfinite(norm):
            return math.inf
        return norm

    # fmt: off
    # processes
    global_rank = property(_returns(
        "This process's rank in the job.", lambda _: dist.get_rank() if dist.is_initialized() else 0))
    world_size = property(_returns(
        "The number of processes.", lambda _: dist.get_world_size() if dist.is_initialized() else 1))
    # the last step
    was_step_applied = _returns("Return whether the last call of `step` updated the parameters.", lambda self: self._was_applied)
    get_lr = _returns("Return the learning rate of each param group.", lambda self: rates(self.optimizer))
    get_mom = _returns(
        "Return the momentum, or the betas, of each param group.",
        lambda self: [group.get("momentum", group.get("betas")) for group in self.optimizer.param_groups])
    # bytes
    memory_report = _returns(
        "Return the memory that each kind of state takes on this rank, in bytes, see `Sharded.memory_report`.",
        lambda self: self._sharded.memory_report())
    memory_formula = _returns(
        "Return each rank's bytes at rest, by the ZeRO paper's formulas for this model under Adam.",
        lambda self: self._sharded.memory_formula())
    comm_report = _returns(
        "Return the bytes that this rank has sent since the last call, by collective.",
        lambda self: self._sharded.comm_report())
    # batches
    dp_world_size = property(_returns("The number of data-parallel ranks.", lambda self: self.resolved.batch.world_size))
    mp_world_size = property(_returns(
        "The number of tensor-parallel ranks of a model.", lambda self: self._sharded._context.others.world_size))
    train_batch_size = _returns(
        "Return the number of samples per optimizer step, over all ranks and microbatches.",
        lambda self: self.resolved.batch.train)
    train_micro_batch_size_per_gpu = _returns(
        "Return the number of samples per forward on one rank.", lambda self: self.resolved.batch.micro)
    gradient_accumulation_steps = _returns(
        "Return the number of microbatches per optimizer step.", lambda self: self.resolved.batch.accumulation)
    managed_gradient_accumulation = _returns(
        "Return whether the engine counts microbatches. If not, every `step` ends a step.",
        lambda self: self._schema.managed_gradient_accumulation)
    # precision
    fp16_enabled = _returns("Return whether the config trains in fp16.", lambda self: self._schema.fp16.enabled)
    bfloat16_enabled = _returns("Return whether the config trains in bf16.", lambda self: self._schema.bf16.enabled)
    fp16_auto_cast = _returns(
        "Return whether floating-point inputs become fp16.", lambda self: self._schema.fp16.enabled and self._schema.fp16.auto_cast)
    torch_autocast_enabled = _returns(
        "Return whether the forward runs under torch.autocast.", lambda self: self.resolved.autocast_dtype is not None)
    amp_enabled = _returns("Return False: zeroshard does not use Apex.", lambda _: False)
    get_data_types = _returns(
        "Return the dtypes of the model and of the gradient sums.",
        lambda self: (self._sharded.dtypes.param, self._sharded.dtypes.accumulate))
    loss_scale = _returns("Return the config's fixed loss scale; 0 means dynamic, or that fp16 is off.",
        lambda self: self._schema.fp16.loss_scale)
    dynamic_loss_scale = _returns(
        "Return whether the loss scale is dynamic.", lambda self: self.resolved.scales_loss and not self._schema.fp16.loss_scale)
    initial_dynamic_scale = _returns(
        "Return the first dynamic loss scale.", lambda self: float(2.0**self._schema.fp16.initial_scale_power))
    # optimizer, scheduler and log
    optimizer_name = _returns(
        "Return the type of the config's optimizer.", lambda self: self._schema.optimizer and self._schema.optimizer.type)
    optimizer_params = _returns(
        "Return the arguments of the config's optimizer.",
        lambda self: self._schema.optimizer and dict(self._schema.optimizer.params))
    scheduler_name = _returns(
        "Return the type of the config's scheduler.", lambda self: self._schema.scheduler and self._schema.scheduler.type)
    scheduler_params = _returns(
        "Return the arguments of the config's scheduler.",
        lambda self: self._schema.scheduler and dict(self._schema.scheduler.params))
    gradient_clipping = _returns(
        "Return the largest global L2 norm of the gradients; 0 means no clipping.", lambda self: self._schema.gradient_clipping)
    gradient_predivide_factor = _returns(
        "Return the config's `gradient_predivide_factor`, which `prescale_gradients` overrides.",
        lambda self: self._schema.gradient_predivide_factor)
    steps_per_print = _returns("Return the number of steps between two printed lines.", lambda self: self._schema.steps_per_print)
    wall_clock_breakdown = _returns("Return whether the parts of a step are timed.", lambda self: self._schema.wall_clock_breakdown)
    # ZeRO
    zero_optimization = _returns("Return whether any model state is sharded.", lambda self: self._sharded.policy.optimizer.sharded)
    zero_optimization_stage = _returns("Return the stage that the config names.", lambda self: self.resolved.stage)
    zero_optimization_partition_gradients = _returns(
        "Return whether gradients are sharded.", lambda self: self._sharded.policy.gradients.sharded)
    zero_optimization_partition_weights = _returns(
        "Return whether parameters are sharded at rest.", lambda self: self._sharded.policy.parameters.sharded)
    zero_offload_optimizer = _returns("Return the block `offload_optimizer`, or None.", lambda self: self._zero.offload_optimizer)
    zero_offload_param = _returns("Return the block `offload_param`, or None.", lambda self: self._zero.offload_param)
    zero_cpu_offload = _returns(
        "Return whether optimizer states are in CPU memory.", lambda self: self._sharded.policy.optimizer.place is Place.CPU)
    zero_overlap_comm = _returns(
        "Return whether collectives overlap with the computation.", lambda self: self.resolved.overlap)
    zero_reduce_bucket_size = _returns(
        "Return the config's `reduce_bucket_size`. The smaller of it and `allgather_bucket_size` limits all buckets.",
        lambda self: self._zero.reduce_bucket_size)
    zero_allgather_bucket_size = _returns(
        "Return the config's `allgather_bucket_size`, see `zero_reduce_bucket_size`.",
        lambda self: self._zero.allgather_bucket_size)
    zero_sub_group_size = _returns(
        "Return the most elements that the optimizer updates in one call, for offloaded states.",
        lambda self: self._zero.sub_group_size)
    # fmt: on


for _name, _method in vars(Readers).items():
    if getattr(_method, "__name__", "") == "method":
        _method.__name__ = _name
        _method.__qualname__ = f"Readers.{_name}"
