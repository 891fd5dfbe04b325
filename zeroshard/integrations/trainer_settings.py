"""Owns what `zero=` of a `ZeroTrainer` comes to, with the values that TrainingArguments know. Called by transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zeroshard.config.load import Config, load_config
from zeroshard.engine.loss_scaling import create_loss_scaler
from zeroshard.errors import ConfigError, UsageError
from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from zeroshard.policy import Policy, Precision
from zeroshard.zero_redundancy.optimizer import ZeroRedundancyOptimizer

Zero = Policy | int | str | os.PathLike[str] | Mapping[str, Any]
"""A policy, the number of a ZeRO stage, or a DeepSpeed config (a path, or a mapping)."""


@dataclass(frozen=True)
class Settings:
    """What a training needs to know.

    Attributes:
        policy, precision: where model states rest, and in which dtypes.
        config: the DeepSpeed config, where one was given.
        shard_arguments: what else `zeroshard.shard` is told.
        autocast_dtype: the dtype of torch.autocast around the forward, or None.
    """

    policy: Policy
    precision: Precision
    config: Config | None
    shard_arguments: Mapping[str, Any]
    autocast_dtype: torch.dtype | None = None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What floating-point inputs are cast to: the parameters' dtype where it was chosen here."""
        return self.precision.param_dtype

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16."""
        return torch.float16 in (self.precision.param_dtype, self.autocast_dtype)

    def create_loss_scaler(self) -> LossScaler:
        """A scaler that moves under fp16; a scale of 1 else."""
        if self.config is not None and self.config.scales_loss:
            return create_loss_scaler(self.config)
        return DynamicLossScaler() if self.precision.param_dtype is torch.float16 else StaticLossScaler()


def read_settings(zero: Zero, args: Any, model: nn.Module | None, total_steps: int = 1) -> Settings:
    """Resolve `zero=` with transformers' TrainingArguments.

    Args:
        model: tells its hidden size to keys that are "auto".
        total_steps: optimizer steps of the whole training, for a schedule whose length is "auto".

    Raises:
        ConfigError: the config cannot be used, or says other than the arguments.
        UsageError: `zero` is none of the things that it may be.
    """
    if isinstance(zero, bool) or not isinstance(zero, Policy | int | str | os.PathLike | Mapping):
        raise UsageError(
            f"zero={zero!r}: give a zeroshard.Policy, a stage (0 to 3), or a DeepSpeed config (a path or a dict)."
        )
    if isinstance(zero, Policy | int):
        policy = zero if isinstance(zero, Policy) else Policy.stage(zero)
        return Settings(policy, _precision_of(args), None, {})
    config = load_config(zero, args.world_size, model, _auto_values(args, total_steps))
    _refuse_contradictions(config, args)
    says = config.schema.fp16.enabled or config.schema.bf16.enabled or config.autocast_dtype is not None
    precision = config.precision
    if not says and precision.param_dtype is None:
        of_arguments = _precision_of(args)
        kept = precision.accumulate_dtype or of_arguments.accumulate_dtype
        precision = replace(precision, param_dtype=of_arguments.param_dtype, accumulate_dtype=kept)
    shard_arguments = {"units": config.units, "bucket_numel": config.bucket_numel, "overlap": config.overlap}
    return Settings(config.policy, precision, config, shard_arguments, config.autocast_dtype)


def _precision_of(args: Any) -> Precision:
    """16 bits for parameters and gradients, fp32 for what the optimizer updates, as DeepSpeed and FSDP have it."""
    if not (args.bf16 or args.fp16):
        return Precision()
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    # With one microbatch there is nothing to sum.
    return Precision(dtype, accumulate_dtype=dtype if args.gradient_accumulation_steps == 1 else None)


def _auto_values(args: Any, total_steps: int) -> dict[str, Any]:
    """What transformers puts in the place of "auto"."""
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * args.world_size,
        "gradient_clipping": args.max_grad_norm,
        "lr": args.learning_rate,
        "betas": [args.adam_beta1, args.adam_beta2],
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": args.learning_rate,
        "warmup_num_steps": max(1, args.get_warmup_steps(total_steps)),
        "total_num_steps": total_steps,
        "fp16": args.fp16,
        "bf16": args.bf16,
        "bfloat16": args.bf16,
    }


def _refuse_contradictions(config: Config, args: Any) -> None:
    """Two places that say different things: nobody would know which holds."""
    schema = config.schema
    if schema.activation_checkpointing.checkpoint_units is not None:
        raise ConfigError(
            "activation_checkpointing.checkpoint_units is for initialize; under a Trainer, set gradient_checkpointing=True in "
            "TrainingArguments."
        )
    said: dict[str, tuple[Any, Any, str]] = {}
    if config.names_batch_size:
        said["train_micro_batch_size_per_gpu"] = (
            config.batch.micro, args.per_device_train_batch_size, "per_device_train_batch_size",
        )  # fmt: skip
    if schema.gradient_accumulation_steps is not None or schema.train_batch_size is not None:
        said["gradient_accumulation_steps"] = (
            config.batch.accumulation, args.gradient_accumulation_steps, "gradient_accumulation_steps",
        )  # fmt: skip
    if "gradient_clipping" in schema.model_fields_set:
        said["gradient_clipping"] = (schema.gradient_clipping, args.max_grad_norm, "max_grad_norm")
    for name in ("fp16", "bf16"):
        block = getattr(schema, name)
        if "enabled" in block.model_fields_set:
            said[f"{name}.enabled"] = (block.enabled, getattr(args, name), name)
    params = schema.optimizer.params if schema.optimizer is not None else {}
    names = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
    said |= {f"optimizer.params.{k}": (params[k], getattr(args, n), n) for k, n in names.items() if k in params}
    different = [
        f"  {key} = {there!r}, and {name}={here!r} in TrainingArguments"
        for key, (there, here, name) in said.items()
        if there != here
    ]
    if different:
        raise ConfigError(
            'the config and TrainingArguments contradict each other; set both alike, or the config\'s to "auto":\n'
            + "\n".join(different)
        )


def refuse_arguments(args: Any) -> None:
    """Raise where TrainingArguments ask for what ZeroTrainer cannot do beside, and name it."""
    clashes = {
        "deepspeed": (args.deepspeed, "give the config to ZeroTrainer: zero=config"),
        "fsdp": (args.fsdp, "zeroshard is in its place: zero=3 shards parameters too"),
        "parallelism_config": (getattr(args, "parallelism_config", None), "there is data parallelism alone"),
        "fp16_full_eval": (args.fp16_full_eval, "evaluation runs in the dtypes of the training"),
        "bf16_full_eval": (args.bf16_full_eval, "evaluation runs in the dtypes of the training"),
        "fp16 and bf16": (args.fp16 and args.bf16, "a model trains in one precision"),
        "optim=lomo": ("lomo" in str(args.optim).lower(), "it updates inside of the backward, before gradients are reduced"),
        "optim=..._layerwise": ("layerwise" in str(args.optim).lower(), "it updates inside of the backward"),
    }  # fmt: skip
    for name, (asked, instead) in clashes.items():
        if asked:
            raise UsageError(f"TrainingArguments({name}) does not go with ZeroTrainer: {instead}.")
    if args.n_gpu > 1:
        raise UsageError(
            f"one process sees {args.n_gpu} accelerators: start one for each, torchrun --nproc-per-node {args.n_gpu} SCRIPT."
        )


def refuse_optimizer(optimizer: Any) -> None:
    """Raise where an optimizer does something of its own to parameters between steps."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise UsageError(
            "ZeroTrainer shards the optimizer itself: give it the optimizer class that ZeroRedundancyOptimizer was given, and "
            "zero=1; or a stock Trainer the ZeroRedundancyOptimizer."
        )
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        raise UsageError(
            f"{type(optimizer).__name__} writes to the parameters when evaluation begins and ends (schedule-free): it cannot "
            "be sharded. Take another optimizer."
        )
