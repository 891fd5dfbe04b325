"""Owns `ZeroTrainer`, and the callback for ZeroRedundancyOptimizer in a stock transformers Trainer.

trainer = ZeroTrainer(model, args, zero=3, train_dataset=data)          # a stage, a Policy, or a DeepSpeed config
class MyTrainer(ZeroTrainerMixin, SFTTrainer): ...                      # any other Trainer
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from zeroshard.checkpoint.live_model import adapter_parameters, persistent_buffers
from zeroshard.checkpoint.manifest import LATEST, tags
from zeroshard.core.named_parameter import name_of, named_parameters
from zeroshard.engine.config.load import Config, load_config, refuse_tensor_parallel
from zeroshard.engine.from_config import create_loss_scaler, create_optimizer
from zeroshard.engine.schedulers import create_scheduler
from zeroshard.errors import ConfigError, UsageError
from zeroshard.model.shard import shard
from zeroshard.model.sharded import Sharded
from zeroshard.model.unsharded import home_of, unsharded
from zeroshard.model.zero_redundancy.optimizer import ZeroRedundancyOptimizer
from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from zeroshard.optim.states import looks_at_whole_parameters
from zeroshard.policy import Policy, Precision
from zeroshard.torch_private import compiled_call_of

Zero = Policy | int | str | os.PathLike[str] | Mapping[str, Any]
"""A policy, the number of a ZeRO stage, or a DeepSpeed config (a path, or a mapping)."""
_SCHEDULER = "scheduler.pt"
_logger = logging.get_logger(__name__)


_Trainer: Any = object
"""The mixin's base class, for type checkers. At run time, the mixin's `super()` is the Trainer's class."""


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    Attributes:
        policy, precision: the residencies and the dtypes of model states.
        config: the DeepSpeed config, if one was given.
        shard_arguments: other arguments of `zeroshard.shard`.
        autocast_dtype: the dtype of torch.autocast around the forward, or None.
    """

    policy: Policy
    precision: Precision
    config: Config | None
    shard_arguments: Mapping[str, Any]
    autocast_dtype: torch.dtype | None = None


def read_settings(zero: Zero, args: Any, model: nn.Module | None, total_steps: int = 1) -> Settings:
    """Resolve `zero` together with transformers' TrainingArguments.

    Args:
        zero: the Trainer's argument.
        args: the TrainingArguments.
        model: the model, whose hidden size replaces "auto" in some keys.
        total_steps: optimizer steps of the run, for a schedule whose length is "auto".

    Raises:
        ConfigError: the config cannot be used or contradicts the arguments.
        PolicyError, UsageError: the stage does not exist, or `zero` has a wrong type.
    """
    if isinstance(zero, bool) or not isinstance(zero, Policy | int | str | os.PathLike | Mapping):
        raise UsageError(
            f"zero is {zero!r}: pass a zeroshard.Policy, a stage (0 to 3), or a DeepSpeed config (a path or a dict)."
        )
    if isinstance(zero, int):
        zero = Policy.stage(zero)
    if isinstance(zero, Policy):
        return Settings(zero, _precision_of(args), None, {})
    config = load_config(zero, args.world_size, model, _auto_values(args, total_steps))
    refuse_tensor_parallel(config, "ZeroTrainer")
    _refuse_contradictions(config, args)
    if not config.names_accumulation:
        config = config.with_accumulation(args.gradient_accumulation_steps)
    says = config.schema.fp16.enabled or config.schema.bf16.enabled or config.autocast_dtype is not None
    precision = config.precision
    if not says and precision.param_dtype is None:
        precision = replace(precision, param_dtype=_precision_of(args).param_dtype)
        precision = precision.over_microbatches(args.gradient_accumulation_steps)
    return Settings(config.policy, precision, config, config.shard_arguments, config.autocast_dtype)


def _precision_of(args: Any) -> Precision:
    """Return the dtypes for the arguments' `bf16` or `fp16`: 16-bit parameters with fp32 master weights, as in DeepSpeed."""
    if not (args.bf16 or args.fp16):
        return Precision()
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    return Precision(dtype).over_microbatches(args.gradient_accumulation_steps)


def _auto_values(args: Any, total_steps: int) -> dict[str, Any]:
    """Return the values that transformers sets instead of "auto"."""
    micro = args.per_device_train_batch_size
    accumulation = args.gradient_accumulation_steps
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


_SAME = {
    ("optimizer", "lr"): ("learning_rate",),
    ("optimizer", "betas"): ("adam_beta1", "adam_beta2"),
    ("optimizer", "eps"): ("adam_epsilon",),
    ("optimizer", "weight_decay"): ("weight_decay",),
    ("scheduler", "warmup_max_lr"): ("learning_rate",),
}
"""The TrainingArguments that mean the same as a key in the `params` of a config block."""


def _refuse_contradictions(config: Config, args: Any) -> None:
    """Raise if the config and TrainingArguments contradict each other."""
    schema = config.schema
    if schema.activation_checkpointing.checkpoint_units is not None:
        raise ConfigError(
            "activation_checkpointing.checkpoint_units is for initialize; under a Trainer, set "
            "activation_checkpointing=True in TrainingArguments (in older releases of transformers, gradient_checkpointing=True)."
        )
    if schema.gradient_allreduce_op == "sum":
        raise ConfigError(
            'ZeroTrainer averages gradients over ranks: leave "gradient_allreduce_op": "sum" out, or use an engine.'
        )
    if schema.checkpoint.use_node_local_storage:
        raise ConfigError(
            "ZeroTrainer saves to a folder that all ranks can read: leave checkpoint.use_node_local_storage out, or use an engine."
        )
    said: list[tuple[str, Any, tuple[str, ...]]] = []  # a key, its value, and the arguments that mean the same
    if config.names_batch_size:
        said.append(("train_micro_batch_size_per_gpu", config.batch.micro, ("per_device_train_batch_size",)))
    if config.names_accumulation:
        said.append(("gradient_accumulation_steps", config.batch.accumulation, ("gradient_accumulation_steps",)))
    if "gradient_clipping" in schema.model_fields_set:
        said.append(("gradient_clipping", schema.gradient_clipping, ("max_grad_norm",)))
    for name in ("fp16", "bf16"):
        block = getattr(schema, name)
        if "enabled" in block.model_fields_set:
            said.append((f"{name}.enabled", block.enabled, (name,)))
    for (kind, key), names in _SAME.items():
        block = getattr(schema, kind)
        if block is not None and key in block.params:
            said.append((f"{kind}.params.{key}", block.params[key], names))
    different = [
        f"  {key} = {there!r}, and {', '.join(f'{name}={getattr(args, name)!r}' for name in names)} in TrainingArguments"
        for key, there, names in said
        if (list(there) if isinstance(there, list | tuple) else [there]) != [getattr(args, name) for name in names]
    ]
    if different:
        raise ConfigError(
            'the config and TrainingArguments contradict each other. Set both to one value, or the config\'s to "auto":\n'
            + "\n".join(different)
        )


def refuse_arguments(args: Any) -> None:
    """Raise an error if TrainingArguments enable a feature that ZeroTrainer does not support. The error names the feature."""
    clashes = {
        "deepspeed": (args.deepspeed, "give the config to ZeroTrainer: zero=config"),
        "fsdp": (args.fsdp, "zero=3 shards parameters, too"),
        "parallelism_config": (getattr(args, "parallelism_config", None), "the stock Trainer takes its sp_size"),
        "fp16_full_eval": (args.fp16_full_eval, "evaluation runs in the dtypes of the training"),
        "bf16_full_eval": (args.bf16_full_eval, "evaluation runs in the dtypes of the training"),
        "optim=lomo": ("lomo" in str(args.optim).lower(), "it updates inside the backward, before gradients are reduced"),
        "optim=..._layerwise": ("layerwise" in str(args.optim).lower(), "it updates inside the backward"),
    }  # fmt: skip
    for name, (asked, instead) in clashes.items():
        if asked:
            raise UsageError(f"ZeroTrainer does not support TrainingArguments({name}): {instead}. Leave it out.")
    if args.fp16 and args.bf16:
        raise UsageError(
            "ZeroTrainer trains in one precision, not in fp16 and bf16: leave one of these TrainingArguments out."
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"this process has {args.n_gpu} accelerators. Start one process for each: "
            f"torchrun --nproc-per-node {args.n_gpu} SCRIPT."
        )


def refuse_optimizer(optimizer: Any) -> None:
    """Raise if an optimizer shards its states itself or writes to parameters outside its `step`."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise UsageError(
            "ZeroTrainer shards the optimizer itself. Pass it an optimizer of the inner class and zero=1, or pass the "
            "ZeroRedundancyOptimizer to a stock Trainer."
        )
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        raise UsageError(
            f"{type(optimizer).__name__} (schedule-free) writes to the parameters when evaluation begins and ends, so it "
            "cannot be sharded. Use another optimizer."
        )


# ---------------------------------------------------------------------- the loop's model, optimizer and loss scaler


class OuterModel(nn.DataParallel[nn.Module]):
    """The model as the training loop sees it. To code that unwraps models, it is a DataParallel of one device."""

    def __init__(self, module: nn.Module, sharded: Sharded | None, settings: Settings) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._sharded = sharded
        self._autocast_dtype = settings.autocast_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward, under autocast if the config enables it."""
        if self._autocast_dtype is None:
            return self.module(*args, **kwargs)
        with torch.autocast(next(self.module.parameters()).device.type, self._autocast_dtype):
            return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the step."""
        if self._sharded is not None:
            self._sharded.optimizer.zero_grad()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class OuterOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The sharded optimizer as the training loop sees it.

    Args:
        sharded: the sharded model.
        scaler: the loss scaler.
        skips: whether to skip a step whose gradients are not finite. If not, no step waits for the norm.
    """

    _is_accelerate_prepared = True

    def __init__(self, sharded: Sharded, scaler: LossScaler, *, skips: bool) -> None:
        super().__init__(sharded.optimizer, device_placement=False)
        self._sharded = sharded
        self._loss_scaler = scaler
        self._skips = skips
        self._norm: float | Tensor | None = None

    def clip(self, max_norm: float | None) -> float | Tensor:
        """Clip the gradients and return their norm before clipping; with `skips`, as a float, after a wait for the accelerator."""
        norm = self._sharded.clip_grad_norm_(max_norm, self._loss_scaler.scale)
        self._norm = float(norm) if self._skips else norm
        return self._norm

    def step(self, closure: Any = None) -> None:
        """Update the parameters after the last microbatch of a step; with `skips`, only if the gradients are finite."""
        if closure is not None:
            raise UsageError("a sharded optimizer takes no closure. Run forward and backward before step().")
        if not self.gradient_state.sync_gradients:
            return
        norm = self._norm
        if norm is None:
            norm = self.clip(None)
        self._norm = None
        self._is_overflow = self._skips and not math.isfinite(norm)
        if self._is_overflow:
            names = ", ".join(self._sharded.sharded_step.not_finite()[:3])
            _logger.warning(f"the step is skipped: gradients are not finite (norm {norm}; first in {names}).")
        else:
            self.optimizer.step()
        self._loss_scaler.update(self._is_overflow)


class LossScale:
    """A loss scaler as accelerate's backward and the Trainer's checkpoints see it."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss in fp32: in fp16, a loss of 1 times 65536 would be infinite."""
        return loss.float() * self._scaler.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scaler's own state, which the Trainer saves like that of torch's GradScaler."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._scaler.load_state_dict(state)


class NeedsOtherRanks:
    """The value of `_is_fsdp_managed_module`: whether `generate` must run the same number of forwards on all ranks.

    It is true as long as forwards need to gather parameters. A copied or pickled model gets False.
    """

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = weakref.ref(sharded)

    def __bool__(self) -> bool:
        sharded = self._sharded()
        return sharded is not None and sharded.needs_other_ranks

    def __reduce__(self) -> Any:  # copy.deepcopy and pickle call this
        return bool, ()


def whole_state_dict(sharded: Sharded, *, adapters_alone: bool = False) -> dict[str, Tensor]:
    """Return the model's state dict on rank 0, in its training dtypes; {} elsewhere. Every rank must call it.

    If parameters are sharded, gather them one at a time into rank 0's CPU memory. Otherwise return the model's tensors.

    Args:
        sharded: the sharded model.
        adapters_alone: if parameters are sharded, whether to leave out a PEFT model's frozen base, except its embeddings.

    Raises:
        UsageError: a step was aborted.
    """
    model = sharded.model
    sharded.checkpoints.live.schedule.refuse_aborted_step()
    if not sharded.policy.parameters.sharded:
        if sharded.rank != 0:
            return {}
        return model.state_dict()
    kept = set[int]()
    if adapters_alone:
        kept = {id(parameter) for parameter in adapter_parameters(model)}
        for get in ("get_input_embeddings", "get_output_embeddings"):
            module = getattr(model, get, lambda: None)()
            if isinstance(module, nn.Module):  # PEFT saves embeddings with an adapter if they were changed
                kept |= {id(parameter) for parameter in module.parameters()}
    found: dict[int, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model, all_names=True):
        if adapters_alone and id(parameter) not in kept:
            continue
        if id(parameter) not in found:
            value = sharded.states.get(name)
            assert value is not None
            found[id(parameter)] = value.new_empty(0)
            if sharded.rank == 0:
                found[id(parameter)] = value.to("cpu", parameter.dtype)
        whole[name] = found[id(parameter)]
    whole |= {name_of(fqn): buffer.detach() for fqn, buffer in persistent_buffers(model, all_names=True)}
    if sharded.rank != 0:
        return {}
    return whole


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return whether a Trainer's checkpoint contains a zeroshard checkpoint, even if its file `latest` was lost."""
    return Path(folder, LATEST).is_file() or bool(tags(Path(folder), whole=False))


# ---------------------------------------------------------------------- the Trainer


class ZeroTrainerMixin(_Trainer):  # type: ignore[misc]
    """A mixin that makes a Trainer use zeroshard instead of DistributedDataParallel. Put it before the Trainer's class.

    The model stays `trainer.model`. It is sharded when training begins; `trainer.sharded` is the result of `shard`.
    Every rank must call `train`, `evaluate`, `predict` and `save_model`, as with other Trainers.

    Args:
        zero: a stage (0 to 3), a `zeroshard.Policy`, or a DeepSpeed config (a path or a dict), whose "auto" values come
            from `args`; default: stage 2.

    Raises:
        ConfigError: the config contradicts `args`.
        PolicyError: the stage does not exist.
        UsageError: `args` enable a feature that is not supported, or the model is sharded already.
    """

    sharded: Sharded | None
    optimizer: Any
    lr_scheduler: Any

    _whole: dict[str, Any] | None = None
    """The model's state dict while `save_model` runs, otherwise None."""

    def __init__(self, *args: Any, zero: Zero = 2, **kwargs: Any) -> None:
        self._zero = zero
        self.sharded = None
        self._outer: OuterModel | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Raise an error for unsupported settings, then create the accelerator."""
        refuse_arguments(self.args)
        if self.sharded is None and self.model is not None and any(map(home_of, self.model.parameters())):
            raise UsageError(
                "the model is sharded by another trainer: call its `trainer.sharded.remove()` first, on every rank."
            )
        self._settings = read_settings(self._zero, self.args, self.model)
        if self._settings.policy.parameters.sharded and getattr(self.args, "sync_ref_model", False):
            raise UsageError(
                "TRL's sync_ref_model reads whole parameters on each rank, which are sharded at stage 3: use zero=2, or give the "
                "config to the stock trainer (deepspeed=config) and start the script with `zeroshard run`."
            )
        super().create_accelerator_and_postprocess()
        if not hasattr(super(), "_clip_grad_norm"):  # transformers 4
            self.accelerator.clip_grad_norm_ = lambda *_, **__: self._clip_grad_norm(None)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Return accelerate's arguments without mixed precision: zeroshard casts and scales, on CPUs too."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # ------------------------------------------------------------------ optimizer, scheduler, model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return the caller's optimizer. If there is none, create the config's, or else the Trainer's default."""
        config = self._settings.config
        if self.optimizer is None and config is not None and config.schema.optimizer is not None:
            trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = create_optimizer(config.schema.optimizer, trainable, self.model)
        made: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return the caller's scheduler. If there is none, create the config's, or else the Trainer's default."""
        config = read_settings(self._zero, self.args, self.model, num_training_steps).config
        if self.lr_scheduler is None and config is not None and config.schema.scheduler is not None:
            if optimizer is None:
                optimizer = self.optimizer
            self.lr_scheduler = create_scheduler(config.schema.scheduler, optimizer, config.schema.min_lr)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Release the model of an earlier run, then call the user's `model_init`."""
        self._release()
        made: nn.Module = super().call_model_init(trial)
        return made

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Wrap the model and shard it for training. Neither the Trainer nor accelerate wraps the result again."""
        if isinstance(model, OuterModel):
            return model
        if self._outer is not None and self._outer.module is model:
            return self._outer  # a second train(), or another try after a batch that was too large
        if not training:
            return OuterModel(model, None, self._settings)
        self._release()
        self._settings = settings = read_settings(self._zero, self.args, model)
        refuse_optimizer(self.optimizer)
        if self.args.torch_compile:
            model.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        self.sharded = shard(
            model, self.optimizer, settings.policy, precision=settings.precision,
            elementwise=looks_at_whole_parameters(type(self.optimizer)) is False, **settings.shard_arguments,
        )  # fmt: skip
        if settings.policy.parameters.sharded and compiled_call_of(model) is None:
            # torch.compile would treat a module with this attribute as an FSDP module.
            needs_other_ranks: Any = NeedsOtherRanks(self.sharded)
            for module in model.modules():
                if isinstance(module, transformers.PreTrainedModel) and module.can_generate():
                    module._is_fsdp_managed_module = needs_other_ranks
        config = settings.config
        scaler: LossScaler = StaticLossScaler()
        self.accelerator.scaler = None
        if torch.float16 in (settings.precision.param_dtype, settings.autocast_dtype):
            scaler = DynamicLossScaler()
            if config is not None and config.scales_loss:
                scaler = create_loss_scaler(config)
            self.accelerator.scaler = LossScale(scaler)
        skips = config is None or config.skips_steps_that_are_not_finite
        self.optimizer = OuterOptimizer(self.sharded, scaler, skips=skips)
        self._outer = OuterModel(model, self.sharded, settings)
        return self._outer

    def _release(self) -> None:
        """End the sharding of an earlier run's model."""
        if self.sharded is not None:
            self.sharded.remove()
        self.sharded = self._outer = None

    # ------------------------------------------------------------------ the step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one microbatch; only the last of a step needs to reduce gradients."""
        assert self.sharded is not None
        with self.sharded.accumulate(not self.accelerator.sync_gradients):
            loss: Tensor = super().training_step(*args, **kwargs)
            self.sharded.finish_backward()
        return loss

    def _prepare_input(self, data: Any) -> Any:
        """Cast floating-point inputs to the dtype of the parameters."""
        data = super()._prepare_input(data)
        dtype = self._settings.precision.param_dtype
        if self.sharded is not None and dtype is not None and isinstance(data, Tensor) and data.is_floating_point():
            return data.to(dtype)
        return data

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with rank 0's buffers (running statistics) on every rank, since `save_model` saves rank 0's buffers."""
        if self.sharded is not None:
            self.sharded.broadcast_buffers()
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with `synced_gpus` at stage 3. Compiled models need the argument: they do not get `NeedsOtherRanks`."""
        if self.sharded is not None and self.sharded.policy.parameters.sharded and hasattr(self, "_gen_kwargs"):
            self._gen_kwargs.setdefault("synced_gpus", self.args.world_size > 1)
        return super().prediction_step(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module | None) -> float | Tensor:
        norm: float | Tensor = self.optimizer.clip(self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | Tensor | None = None) -> float | Tensor:
        if grad_norm is None:
            grad_norm = self.optimizer.clip(None)
        assert grad_norm is not None
        return grad_norm

    # ------------------------------------------------------------------ checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`. Every rank must call it.

        All ranks gather the values here, since transformers before 5.23 calls `_save` only on the rank that writes.
        """
        whole: AbstractContextManager[None] = nullcontext()
        if self.sharded is not None and self.sharded.policy.parameters.sharded:
            # On the rank that writes, PEFT runs prompt encoders and creates state dicts: both need whole adapters.
            whole = unsharded(adapter_parameters(self.model))
        try:
            with whole:
                if self.sharded is not None:
                    self._whole = whole_state_dict(self.sharded, adapters_alone=self._is_adapted)
                super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = self._whole
        if self.sharded is not None and state_dict is None:
            state_dict = whole_state_dict(self.sharded, adapters_alone=self._is_adapted)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.sharded is not None and self.lr_scheduler is not None
        values = {"global_step": self.state.global_step}
        self.sharded.save(output_dir, f"global_step{self.state.global_step}", values, exclude_frozen=self._is_adapted)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_ours(resume_from_checkpoint):  # `_load_optimizer_and_scheduler` loads zeroshard's own
            with self._writable():
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if is_ours(checkpoint):
            self._load_sharded(checkpoint, optimizer_states=True)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))
        elif Path(checkpoint, "optimizer.pt").exists() or Path(checkpoint, "optimizer.bin").exists():
            raise UsageError(
                f"{checkpoint} holds another Trainer's optimizer state. Continue with that Trainer, or start a new "
                "run from its weights: from_pretrained(checkpoint), and train() without resume_from_checkpoint."
            )
        else:
            _logger.warning(f"{checkpoint} holds no optimizer state (save_only_model?): the optimizer starts anew.")

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.sharded is not None and is_ours(best):
            self._load_sharded(best, optimizer_states=False)
            return
        with self._writable():
            super()._load_best_model()

    def _load_sharded(self, folder: str, *, optimizer_states: bool) -> None:
        assert self.sharded is not None
        strict = not self._is_adapted  # frozen parameters were left out
        self.sharded.load(folder, strict=strict, optimizer_states=optimizer_states, random=False)

    def _writable(self) -> AbstractContextManager[None]:
        """Unshard parameters in the block. Every rank gets the values that rank 0 writes to them."""
        if self.sharded is None:
            return nullcontext()
        return unsharded(self.model, modifier_rank=0)

    @property
    def _is_adapted(self) -> bool:
        """Whether the model is a PEFT model, whose checkpoints hold only trained parameters."""
        return hasattr(self.model, "peft_config") and hasattr(self.model, "base_model")


class ZeroTrainer(ZeroTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """A transformers Trainer that uses zeroshard; see `ZeroTrainerMixin`."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A transformers Seq2SeqTrainer that uses zeroshard; see `ZeroTrainerMixin`."""


class ZeroConsolidateCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback for a stock Trainer with `ZeroRedundancyOptimizer`: checkpoints hold the full optimizer state."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gather the full optimizer state on rank 0 if a checkpoint follows."""
        if control.should_save:
            self._consolidate(kwargs["optimizer"])

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gather the full optimizer state on rank 0, since the best model may be saved next."""
        if args.save_strategy == SaveStrategy.BEST:
            self._consolidate(kwargs["optimizer"])

    @staticmethod
    def _consolidate(optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, ZeroRedundancyOptimizer):
            raise UsageError(
                f"ZeroConsolidateCallback is for zeroshard.ZeroRedundancyOptimizer, not for {type(inner).__name__}. Leave "
                "the callback out."
            )
        inner.consolidate_state_dict(0)
