"""Owns what an engine answers when it is asked: its config in DeepSpeed's words, the last step, bytes. Called by engine."""

from __future__ import annotations

from zeroshard.config.load import Config
from zeroshard.engine.step_report import StepReport
from zeroshard.sharded import Sharded
from zeroshard.step.sharded_optimizer import ShardedOptimizer


class Readers:
    """The part of an engine that reads, and changes nothing."""

    def __init__(self, sharded: Sharded, config: Config) -> None:
        self.module = sharded.model
        self.optimizer: ShardedOptimizer = sharded.optimizer
        self.config = config
        self._sharded = sharded
        self._last = StepReport(applied=False)

    def get_global_grad_norm(self) -> float | None:
        """The global L2 norm of the last step's gradients before clipping; None before the first step."""
        return self._last.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last step updated the parameters."""
        return self._last.applied

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks and microbatches."""
        return self.config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self.config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per optimizer step."""
        return self.config.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """The stage that the config names."""
        return self.config.stage

    def memory_report(self) -> dict[str, int]:
        """Bytes of live storage on this rank: `parameters`, `gradients`, `optimizer`, `buffers` (communication scratch)."""
        return self._sharded.memory_report()

    def memory_formula(self) -> dict[str, float]:
        """What the ZeRO paper's formulas give for this model, policy and world size, with Adam."""
        return self._sharded.memory_formula()

    def comm_report(self) -> dict[str, int]:
        """Bytes that this rank sent since the last call, by collective, counted as they are sent."""
        return self._sharded.comm_report()
