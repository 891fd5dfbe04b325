"""Owns the parts that both strategies share: Lightning's classes, the strategies' arguments, and a DeepSpeed config."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.engine.config.fields import Kind, is_off
from zeroshard.engine.config.load import Config, load_config, refuse_tensor_parallel, without_training
from zeroshard.engine.recompute.checkpointer import Checkpointer
from zeroshard.errors import ConfigError, UsageError
from zeroshard.model.shard import shard
from zeroshard.model.sharded import Sharded
from zeroshard.policy import Policy, Units

_HONOURED = {
    "zero_optimization", "aio", "communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor", "bf16",
    "activation_checkpointing", "optimizer", "scheduler", "min_lr", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "gradient_clipping", "ignored_keys",
}  # fmt: skip
"""Blocks and keys of a config that take effect under Lightning. They must agree with the Trainer's own settings."""


def _packages() -> tuple[str, str]:
    """Return the names of the Trainer's and Fabric's packages: lightning's, unless the script imported only pytorch_lightning's.

    If only one of the two is installed, return its packages.

    Raises:
        UsageError: neither is installed.
    """
    imported = {name for name in ("lightning", "pytorch_lightning") if name in sys.modules}
    if find_spec("lightning") is not None and imported != {"pytorch_lightning"}:
        return ("lightning.pytorch", "lightning.fabric")
    if find_spec("pytorch_lightning") is not None:
        return ("pytorch_lightning", "lightning_fabric")
    raise UsageError("zeroshard.integrations.lightning needs Lightning, which is not installed: pip install lightning.")


def _refuse_older(release: str) -> None:
    """Raise for a release of Lightning whose Fabric and checkpoints make other calls of a strategy."""
    if tuple(int(part) for part in release.split(".")[:2]) < OLDEST:
        raise UsageError(
            f"Lightning {release} is older than {'.'.join(map(str, OLDEST))}, the oldest release that zeroshard's strategies "
            "work in: pip install --upgrade lightning."
        )


OLDEST = (2, 6)
"""The oldest release, in whose tests the strategies pass: 2.4's Fabric expects no scheduler, and resumes with other losses."""
_TRAINER, _FABRIC = _packages()
_refuse_older(import_module(_FABRIC).__version__)


def trainer_class(module: str, name: str) -> Any:
    """Return a class or object of lightning.pytorch."""
    return getattr(import_module(f"{_TRAINER}.{module}"), name)


def fabric_class(module: str, name: str) -> Any:
    """Return a class or object of lightning.fabric."""
    return getattr(import_module(f"{_FABRIC}.{module}"), name)


@dataclass(frozen=True)
class ShardingFacts:
    """The settings of the Trainer, or of Fabric.

    Attributes:
        precision: Lightning's name for the precision, such as "32-true" or "bf16-mixed".
        accumulation: microbatches per step; None if the user's loop decides.
        clipping: the maximum norm of the gradients, 0 for none; None if the user's loop decides.
        steps: optimizer steps of the run, for the config's scheduler; infinite if unknown.
    """

    precision: str
    accumulation: int | None = None
    clipping: float | None = None
    steps: float = math.inf


class ShardingStrategy:
    """The base of both strategies: their arguments, their names, and the sharding of a model; see `ZeroStrategy`."""

    _precision_argument = ""

    def __init__(
        self, stage: int | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, *,
        policy: Policy | None = None, units: Units | None = None, auto: Mapping[str, Any] | None = None, **ddp: Any,
    ) -> None:  # fmt: skip
        # DDPStrategy also takes arguments that would have no effect here.
        known = (
            "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", self._precision_argument, "timeout",
            "process_group_backend", "start_method",
        )  # fmt: skip
        for name in ddp:
            if name not in known:
                raise UsageError(f"{type(self).__name__} has no argument {name!r}: pass only {', '.join(known)}.")
        if config is not None and (stage is not None or policy is not None or units is not None):
            raise UsageError("a config sets the stage, the policy and the units: leave the other arguments out.")
        if stage is not None and policy is not None:
            raise UsageError("a policy also sets the stage: pass only one of them.")
        if isinstance(stage, str | os.PathLike | Mapping):
            raise UsageError(f"a stage is 0, 1, 2 or 3, not {stage!r}. Pass one of these, or a config as config=...")
        if stage is None:
            stage = 2
        self._policy = policy or Policy.stage(stage)
        self._config = config
        self._units = units
        self._auto = dict(auto or {})
        self._checkpointer: Checkpointer | None = None
        super().__init__(**ddp)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's names: "zeroshard" (stage 2), and one for each of the stages 1 to 3."""
        names = {"zeroshard": 2, "zeroshard_stage_1": 1, "zeroshard_stage_2": 2, "zeroshard_stage_3": 3}
        for name, stage in names.items():
            strategy_registry.register(
                name, cls, description=f"zeroshard, ZeRO stage {stage}", override=True, stage=stage
            )

    def _shards_parameters(self, facts: ShardingFacts) -> bool:
        if self._config is None:
            return self._policy.parameters.sharded
        return self._resolve(None, None, facts, trains=False).policy.parameters.sharded

    def _shard(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], facts: ShardingFacts) -> Sharded:
        """Shard a model; without optimizers, for evaluation only. Every rank must call it."""
        if self._config is None:
            return shard(model, optimizers or None, self._policy, units=self._units)
        config = self._resolve(model, optimizers[0] if optimizers else None, facts, trains=bool(optimizers))
        self._checkpointer = Checkpointer.of(config, model)
        return shard(model, optimizers or None, config.policy, precision=config.precision, **config.shard_arguments)

    def _resolve(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        facts: ShardingFacts,
        trains: bool = True,
    ) -> Config:
        assert self._config is not None
        given = self._config if trains else without_training(self._config)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        known: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": facts.accumulation or 1,
            "gradient_clipping": facts.clipping or 0.0,
            "bf16": facts.precision == "bf16-true",
            "fp16": False,
        }
        if math.isfinite(facts.steps):
            known["total_num_steps"] = max(0, int(facts.steps))  # Lightning has -1 for a run without batches
        if optimizer is not None:
            options = ("lr", "weight_decay", "betas", "eps")
            known |= {key: optimizer.defaults[key] for key in options if key in optimizer.defaults}
            known["optimizer.type"] = type(optimizer).__name__
        config = load_config(given, world_size, model, known | self._auto)
        refuse_tensor_parallel(config, "Lightning's strategy")
        is_auto = "gradient_accumulation_steps" in config.auto and config.schema.train_batch_size is None
        if not config.names_accumulation or (is_auto and facts.accumulation is None):
            # Use the Trainer's number of microbatches. A user's loop may have several: 2 stands for any number above 1.
            config = config.with_accumulation(facts.accumulation or 2)
        elif config.batch.accumulation != (facts.accumulation or 1):
            where = "and Fabric's loop is yours: leave it out, and use no_backward_sync."
            if facts.accumulation is not None:
                where = f"and accumulate_grad_batches is {facts.accumulation}: set both to the same value."
            raise ConfigError(f"gradient_accumulation_steps comes to {config.batch.accumulation}, {where}")
        _refuse_disagreement(config, facts)
        if model is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            unused = list(_unused(config))
            if optimizer is not None and config.schema.optimizer is not None:
                unused.append("optimizer")
            if unused:
                warnings.warn(
                    f"these keys of the config have no effect under Lightning: {', '.join(unused)}.", stacklevel=2
                )
        return config


def _refuse_disagreement(config: Config, facts: ShardingFacts) -> None:
    """Raise if the config enables fp16 or autocast, which Lightning sets, or contradicts Lightning's bf16 or clipping."""
    schema = config.schema
    autocast = "16-mixed" if config.scales_loss else "bf16-mixed"
    for key, said in (("fp16", "16-mixed"), ("torch_autocast", autocast)):
        if getattr(schema, key).enabled:
            raise ConfigError(
                f'{key}.enabled: Lightning sets the precision itself. Leave {key} out, and set precision="{said}".'
            )
    if schema.bf16.enabled and facts.precision != "bf16-true":
        raise ConfigError(
            f'bf16.enabled is true, and Lightning\'s precision is "{facts.precision}". Set precision="bf16-true", or leave '
            "bf16 out."
        )
    clipping = facts.clipping or 0.0
    if "gradient_clipping" in schema.model_fields_set and schema.gradient_clipping != clipping:
        where = f"and gradient_clip_val is {clipping}: set both to the same value."
        if facts.clipping is None:
            where = "but Fabric clips in your loop: leave it out, and call fabric.clip_gradients."
        raise ConfigError(f"gradient_clipping is {schema.gradient_clipping}, {where}")


def _unused(config: Config) -> Iterator[str]:
    """Yield the config's blocks and keys that have an effect only in an engine."""
    seen = dict.fromkeys(
        entry.path.partition(".")[0]
        for entry in config.entries()
        if entry.origin == "file" and entry.effect.kind is Kind.WORKS and not is_off(entry.value)
    )
    for name in seen:
        block = getattr(config.schema, name, None)
        if name not in _HONOURED and getattr(block, "enabled", True):
            yield name
