"""Owns what an engine answers when it is asked: its config in DeepSpeed's words, the last step, bytes. Part of engine."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.config.load import Config
from zeroshard.engine.step_report import StepReport
from zeroshard.optim.loss_scaler import LossScaler
from zeroshard.optim.lr_schedules import rates
from zeroshard.policy import Place
from zeroshard.sharded import Sharded
from zeroshard.step.sharded_optimizer import ShardedOptimizer


class Readers:
    """The part of an engine that reads, and changes nothing."""

    optimizer: ShardedOptimizer
    resolved: Config
    loss_scaler: LossScaler
    _sharded: Sharded
    _last: StepReport
    _was_applied: bool

    # ------------------------------------------------------------------ the last step

    def get_global_grad_norm(self) -> float | None:
        """The global L2 norm of the last step's gradients before clipping; None before the first step.

        Infinite where scaled fp16 gradients overflowed, as in DeepSpeed: `step`'s report has the norm as it came out, which is
        NaN where an infinite gradient met another.
        """
        norm = self._last.grad_norm
        overflowed = self.resolved.scales_loss and norm is not None and not math.isfinite(norm)
        return math.inf if overflowed else norm

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` updated the parameters."""
        return self._was_applied

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return rates(self.optimizer)

    def get_mom(self) -> list[Any]:
        """The momentum, or the betas, of each param group."""
        return [group.get("momentum", group.get("betas")) for group in self.optimizer.param_groups]

    # ------------------------------------------------------------------ bytes

    def memory_report(self) -> dict[str, int]:
        """Bytes of live storage on this rank: `parameters`, `gradients`, `optimizer`, `buffers` (communication scratch)."""
        return self._sharded.memory_report()

    def memory_formula(self) -> dict[str, float]:
        """What the ZeRO paper's formulas give for this model, policy and world size, with Adam."""
        return self._sharded.memory_formula()

    def comm_report(self) -> dict[str, int]:
        """Bytes that this rank sent since the last call, by collective, counted as they are sent."""
        return self._sharded.comm_report()

    # ------------------------------------------------------------------ ranks

    @property
    def global_rank(self) -> int:
        """Of this process among all."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def dp_world_size(self) -> int:
        """Ranks that the batch is cut over."""
        return self.resolved.batch.world_size

    @property
    def mp_world_size(self) -> int:
        """1: no tensor is cut for the sake of its computation."""
        return 1

    # ------------------------------------------------------------------ batch sizes

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks and microbatches."""
        return self.resolved.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self.resolved.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per optimizer step."""
        return self.resolved.batch.accumulation

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts microbatches; if not, every `step` ends a step."""
        return self.resolved.schema.managed_gradient_accumulation

    # ------------------------------------------------------------------ precision

    def fp16_enabled(self) -> bool:
        """Whether the config trains in fp16."""
        return self.resolved.schema.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        """Whether the config trains in bf16."""
        return self.resolved.schema.bf16.enabled

    def fp16_auto_cast(self) -> bool:
        """Whether floating-point inputs become fp16."""
        return self.resolved.schema.fp16.enabled and bool(self.resolved.schema.fp16.auto_cast)

    def torch_autocast_enabled(self) -> bool:
        """Whether the forward runs under torch.autocast."""
        return self.resolved.autocast_dtype is not None

    def amp_enabled(self) -> bool:
        """False: Apex is not used."""
        return False

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the model and of the gradient sums."""
        dtypes = self._sharded.dtypes
        return dtypes.param, dtypes.accumulate

    def loss_scale(self) -> float:
        """What the config's loss is multiplied by at the start; 0 where the scale moves by itself."""
        return self.resolved.schema.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves by itself."""
        return self.resolved.scales_loss and not self.resolved.schema.fp16.loss_scale

    def initial_dynamic_scale(self) -> float:
        """Where it starts."""
        return float(2.0**self.resolved.schema.fp16.initial_scale_power)

    # ------------------------------------------------------------------ optimizer and schedule

    def optimizer_name(self) -> str | None:
        """The config's optimizer."""
        return self.resolved.schema.optimizer.type if self.resolved.schema.optimizer else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Its arguments."""
        return dict(self.resolved.schema.optimizer.params) if self.resolved.schema.optimizer else None

    def scheduler_name(self) -> str | None:
        """The config's scheduler."""
        return self.resolved.schema.scheduler.type if self.resolved.schema.scheduler else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Its arguments."""
        return dict(self.resolved.schema.scheduler.params) if self.resolved.schema.scheduler else None

    def gradient_clipping(self) -> float:
        """The largest global L2 norm of the gradients; 0 is off."""
        return self.resolved.schema.gradient_clipping

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed over ranks."""
        return self.resolved.schema.gradient_predivide_factor

    def steps_per_print(self) -> float | None:
        """Steps between two printed lines."""
        return self.resolved.schema.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether the parts of a step are timed."""
        return self.resolved.schema.wall_clock_breakdown

    # ------------------------------------------------------------------ ZeRO

    def zero_optimization(self) -> bool:
        """Whether any model state is sharded."""
        return self.resolved.stage > 0

    def zero_optimization_stage(self) -> int:
        """The stage that the config names."""
        return self.resolved.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self._sharded.policy.gradients.sharded

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded at rest."""
        return self._sharded.policy.parameters.sharded

    def zero_offload_optimizer(self) -> Any:
        """The block `offload_optimizer`, or None."""
        return self.resolved.schema.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        """The block `offload_param`, or None."""
        return self.resolved.schema.zero_optimization.offload_param

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states rest in CPU memory."""
        return self._sharded.policy.optimizer.place is Place.CPU

    def zero_overlap_comm(self) -> bool:
        """Whether collectives run behind the computation."""
        return self.resolved.overlap

    def zero_reduce_bucket_size(self) -> int:
        """The most elements that are reduced at once."""
        return self.resolved.schema.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        """The most elements that are brought together at once, of parameters that are not sharded at rest."""
        return self.resolved.schema.zero_optimization.allgather_bucket_size

    def zero_sub_group_size(self) -> int:
        """The most elements that the optimizer updates in one call, where they come from elsewhere."""
        return self.resolved.schema.zero_optimization.sub_group_size
