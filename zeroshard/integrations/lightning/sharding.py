"""Owns what is sharded, and how: the strategies' arguments, or a DeepSpeed config. Called by the two strategies."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.config.fields import Kind, is_off
from zeroshard.config.load import Config, load_config
from zeroshard.errors import ConfigError, UsageError
from zeroshard.optim.from_config import create_optimizer
from zeroshard.optim.lr_schedules import Floor, create_scheduler
from zeroshard.policy import Policy, Units
from zeroshard.recompute.checkpointer import Checkpointer, Checkpointing
from zeroshard.shard import DEFAULT_BUCKET_NUMEL, shard
from zeroshard.sharded import Sharded

_HONOURED = {
    "zero_optimization", "aio", "communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor", "bf16",
    "activation_checkpointing", "optimizer", "scheduler", "min_lr", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "gradient_clipping", "ignored_keys",
}  # fmt: skip
"""Blocks and keys of a config that take effect here. (What the Trainer decides too must agree with it.)"""


_OF_DDP = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "timeout",
    "process_group_backend",
    "start_method",
)


def refuse_strangers(strategy: str, given: Mapping[str, Any], precision: str) -> None:
    """Raise where a strategy was given an argument that is none of DDPStrategy's, or has no meaning here.

    Args:
        precision: what its argument for the precision is called.
    """
    known = (*_OF_DDP[:4], precision, *_OF_DDP[4:])
    strangers = [name for name in given if name not in known]
    if strangers:
        raise UsageError(f"{strategy} has no argument {strangers[0]!r}: of DDPStrategy's it takes {', '.join(known)}.")


@dataclass(frozen=True)
class Facts:
    """What the Trainer, or Fabric, has decided already.

    Attributes:
        precision: as it is called there: "32-true", "bf16-mixed".
        accumulation, clipping: microbatches a step, the largest norm of the gradients (0: none). None: the user's loop decides.
        steps: of the optimizer in the whole run, for schedulers of the config; infinite where nobody knows.
    """

    precision: str
    accumulation: int | None = None
    clipping: float | None = None
    steps: float = math.inf


class Sharding:
    """What both strategies are told about sharding.

    Args:
        stage: of ZeRO, 0 to 3; default 2.
        config: a DeepSpeed config (path or mapping) in place of `stage`, `policy` and `units`.
        policy: where model states rest, in place of `stage`.
        units: see `zeroshard.shard`.
        auto: values for keys of the config that are "auto" and that only you know.
    """

    def __init__(
        self,
        stage: int | None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None,
        policy: Policy | None,
        units: Units | None,
        auto: Mapping[str, Any] | None,
    ) -> None:
        if config is not None and (stage is not None or policy is not None or units is not None):
            raise UsageError("a config says the stage, the policy and the units itself: leave the others out.")
        if stage is not None and policy is not None:
            raise UsageError("a policy says more than a stage: give one of them.")
        if isinstance(stage, str | os.PathLike | Mapping):
            raise UsageError(f"a stage is a number from 0 to 3, not {stage!r}; a config is given as config=...")
        self._policy = policy or Policy.stage(2 if stage is None else stage)
        self._config, self._units, self._auto = config, units, dict(auto or {})
        self._checkpointer: Checkpointer | None = None
        self.has_config = config is not None

    def policy(self, facts: Facts) -> Policy:
        """Where model states rest."""
        return self._policy if self._config is None else self._resolve(None, None, facts).policy

    def shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, facts: Facts) -> Sharded:
        """Shard a model; without an optimizer for evaluation alone. Every rank must call it."""
        if self._config is None:
            return shard(model, optimizer, self._policy, units=self._units)
        config = self._resolve(model, optimizer, facts)
        block = config.schema.activation_checkpointing
        if block.checkpoint_units is not None:
            self._checkpointer = Checkpointer(Checkpointing.of(block))
            self._checkpointer.checkpoint_units(model, block.checkpoint_units, config.units)
        return shard(
            model,
            optimizer,
            config.policy,
            precision=config.precision,
            bucket_numel=min(config.bucket_numel, DEFAULT_BUCKET_NUMEL),
            overlap=config.overlap,
            units=config.units,
        )

    def unwrap(self) -> None:
        """Units are no longer checkpointed."""
        if self._checkpointer is not None:
            self._checkpointer.remove()
            self._checkpointer = None

    def optimizer_of_config(self, model: nn.Module, facts: Facts) -> torch.optim.Optimizer | None:
        """What the config's `optimizer` block names, where it has one."""
        if self._config is None:
            return None
        block = self._resolve(model, None, facts).schema.optimizer
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return None if block is None else create_optimizer(block, trained, model)

    def scheduler_of_config(self, sharded: Sharded, facts: Facts) -> Any:
        """What the config's `scheduler` block names, where it has one; it steps with the optimizer."""
        if self._config is None:
            return None
        schema = self._resolve(None, sharded.optimizer, facts).schema
        if schema.scheduler is None:
            return None
        scheduler = create_scheduler(schema.scheduler, sharded.optimizer)
        return Floor(scheduler, sharded.optimizer, schema.min_lr) if schema.min_lr else scheduler

    def _resolve(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, facts: Facts) -> Config:
        assert self._config is not None
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        known: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": facts.accumulation or 1,
            "gradient_clipping": facts.clipping or 0.0,
            "bf16": facts.precision == "bf16-true",
            "fp16": False,
        }
        if math.isfinite(facts.steps):
            known["total_num_steps"] = int(facts.steps)
        if optimizer is not None:
            known |= {
                key: optimizer.defaults[key]
                for key in ("lr", "weight_decay", "betas", "eps")
                if key in optimizer.defaults
            }
            known |= {"optimizer.type": type(optimizer).__name__}
        config = load_config(self._config, world_size, model, known | self._auto)
        told = config.schema.gradient_accumulation_steps, config.schema.train_batch_size
        if told == (None, None):  # the Trainer's; of a loop, that there may be several
            config = dataclasses.replace(
                config, batch=dataclasses.replace(config.batch, accumulation=facts.accumulation or 2)
            )
        else:
            _refuse_accumulation(config, facts)
        _refuse_disagreement(config, facts)
        if model is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            unused = [*_unused(config), *(["optimizer"] if optimizer is not None and config.schema.optimizer else [])]
            if unused:
                warnings.warn(
                    f"these keys of the config have no effect under Lightning: {', '.join(unused)}.", stacklevel=2
                )
        return config


def _refuse_disagreement(config: Config, facts: Facts) -> None:
    """What two places decide, they must decide alike: nobody would see which one won."""
    schema = config.schema
    for key, said in (("fp16", "16-mixed"), ("torch_autocast", f"{'16' if config.scales_loss else 'bf16'}-mixed")):
        if getattr(schema, key).enabled:
            raise ConfigError(
                f'{key}.enabled: under Lightning the precision is its own: precision="{said}", and no {key} here.'
            )
    if schema.bf16.enabled and facts.precision != "bf16-true":
        raise ConfigError(
            f'bf16.enabled is true, and Lightning\'s precision is "{facts.precision}": give it "bf16-true", or leave bf16 out.'
        )
    clipping = facts.clipping or 0.0
    if "gradient_clipping" in schema.model_fields_set and schema.gradient_clipping != clipping:
        where = (
            "the loop is yours: call fabric.clip_gradients"
            if facts.clipping is None
            else f"gradient_clip_val is {clipping}"
        )
        raise ConfigError(f"gradient_clipping is {schema.gradient_clipping}, and {where}: let them agree.")


def _refuse_accumulation(config: Config, facts: Facts) -> None:
    if config.batch.accumulation != (facts.accumulation or 1):
        where = "the loop is yours, with no_backward_sync"
        if facts.accumulation is not None:
            where = f"accumulate_grad_batches is {facts.accumulation}"
        raise ConfigError(
            f"gradient_accumulation_steps comes to {config.batch.accumulation}, and {where}: let them agree."
        )


def _unused(config: Config) -> Iterator[str]:
    """Blocks of the config that ask an engine for something."""
    seen = dict.fromkeys(
        entry.path.partition(".")[0]
        for entry in config.entries()
        if entry.origin == "file" and entry.effect.kind is Kind.WORKS and not is_off(entry.value)
    )
    for name in seen:
        block = getattr(config.schema, name, None)
        if name not in _HONOURED and getattr(block, "enabled", True):
            yield name


def the_one(optimizers: list[torch.optim.Optimizer], who: str) -> torch.optim.Optimizer:
    """The only optimizer.

    Raises:
        UsageError: there are several.
    """
    if len(optimizers) != 1:
        raise UsageError(
            f"{who} takes one optimizer for one model, not {len(optimizers)}: put the parameters into param groups of one, or use "
            'Lightning\'s "ddp" with zeroshard.ZeroRedundancyOptimizer.'
        )
    return optimizers[0]
