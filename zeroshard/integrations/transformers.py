"""Owns `ZeroTrainer`, transformers' Trainer on zeroshard, and what a stock Trainer needs beside ZeroRedundancyOptimizer.

trainer = ZeroTrainer(model, args, zero=3, train_dataset=data)          # a stage, a Policy, or a DeepSpeed config
class MyTrainer(ZeroTrainerMixin, SFTTrainer): ...                      # any other Trainer
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from zeroshard.errors import UsageError
from zeroshard.integrations.trainer_parts import LossScale, OuterModel, OuterOptimizer, is_ours, whole_state_dict
from zeroshard.integrations.trainer_settings import Zero, read_settings, refuse_arguments, refuse_optimizer
from zeroshard.optim.from_config import create_optimizer
from zeroshard.optim.lr_schedules import Floor, create_scheduler
from zeroshard.shard import shard
from zeroshard.sharded import Sharded
from zeroshard.step.elementwise import looks_at_whole_parameters
from zeroshard.unsharded import is_taken, unsharded
from zeroshard.zero_redundancy.optimizer import ZeroRedundancyOptimizer

_SCHEDULER = "scheduler.pt"
_logger = logging.get_logger(__name__)


_Trainer: Any = object
"""To type checkers: whatever Trainer comes after."""


class ZeroTrainerMixin(_Trainer):  # type: ignore[misc]
    """Trains with zeroshard what a Trainer would train with DistributedDataParallel. Put it before the Trainer's class.

    The model stays `trainer.model`; once training has begun it is sharded, by `trainer.sharded`. Every rank must call `train`,
    `evaluate`, `predict` and `save_model`, as ever.

    Args:
        zero: a stage (0 to 3), a `zeroshard.Policy`, or a DeepSpeed config (a path, a dict), whose "auto" values are those of
            `args`.

    Raises:
        ConfigError, UsageError: the config contradicts `args`, or `args` ask for what cannot be had together.
    """

    sharded: Sharded | None
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zero: Zero = 2, **kwargs: Any) -> None:
        self._zero = zero
        self.sharded = None
        self._outer: OuterModel | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse what cannot be had together, before anything is moved or made."""
        refuse_arguments(self.args)
        if self.sharded is None and self.model is not None and any(is_taken(p) for p in self.model.parameters()):
            raise UsageError(
                "the model is sharded by another trainer: call its `trainer.sharded.remove()` first, on every rank."
            )
        self._settings = read_settings(self._zero, self.args, self.model)
        super().create_accelerator_and_postprocess()
        if not hasattr(super(), "_clip_grad_norm"):  # transformers 4
            self.accelerator.clip_grad_norm_ = lambda *_, **__: self._clip_grad_norm(None)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """accelerate neither casts nor scales: zeroshard does, on CPUs too."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # ------------------------------------------------------------------ optimizer, scheduler, model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The config's, where it names one."""
        config = self._settings.config
        if self.optimizer is None and config is not None and config.schema.optimizer is not None:
            trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = create_optimizer(config.schema.optimizer, trainable, self.model)
        made: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The config's, where it names one."""
        config = read_settings(self._zero, self.args, self.model, num_training_steps).config
        if self.lr_scheduler is None and config is not None and config.schema.scheduler is not None:
            of = optimizer if optimizer is not None else self.optimizer
            made, floor = create_scheduler(config.schema.scheduler, of), config.schema.min_lr
            self.lr_scheduler = Floor(made, of, floor) if floor else made
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model of an earlier training gives its memory back first."""
        self._release()
        made: nn.Module = super().call_model_init(trial)
        return made

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Shard the model. What is returned is not the model itself: so neither Trainer nor accelerate wraps it."""
        if isinstance(model, OuterModel):
            return model
        if (
            self._outer is not None and self._outer.module is model
        ):  # trained before, or with a batch that was too large
            return self._outer
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
        scaler = settings.create_loss_scaler()
        self.accelerator.scaler = LossScale(scaler) if settings.scales_loss else None
        self.optimizer = OuterOptimizer(self.sharded, scaler)
        self._outer = OuterModel(model, self.sharded, settings)
        return self._outer

    def _release(self) -> None:
        """Take zeroshard off the model of an earlier training."""
        if self.sharded is not None:
            self.sharded.remove()
        self.sharded = self._outer = None

    # ------------------------------------------------------------------ the step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One microbatch; only the last of a step needs to reduce gradients."""
        assert self.sharded is not None
        with self.sharded.accumulate(not self.accelerator.sync_gradients):
            loss: Tensor = super().training_step(*args, **kwargs)
            self.sharded.finish_backward()
        return loss

    def _prepare_input(self, data: Any) -> Any:
        """Floating-point inputs in the dtype of the parameters."""
        data = super()._prepare_input(data)
        dtype = self._settings.input_dtype
        casts = self.sharded is not None and dtype is not None and isinstance(data, Tensor) and data.is_floating_point()
        return data.to(dtype) if casts else data

    def _clip_grad_norm(self, model: nn.Module | None) -> float:
        return self._outer_optimizer.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        return self._outer_optimizer.clip(None) if grad_norm is None else grad_norm

    @property
    def _outer_optimizer(self) -> OuterOptimizer:
        assert isinstance(self.optimizer, OuterOptimizer)
        return self.optimizer

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Ranks that generate stop at different lengths: under sharded parameters they go on together until the last has."""
        if self.sharded is not None and self.sharded.policy.parameters.sharded and hasattr(self, "_gen_kwargs"):
            self._gen_kwargs.setdefault("synced_gpus", self.args.world_size > 1)
        return super().prediction_step(*args, **kwargs)

    # ------------------------------------------------------------------ checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.sharded is not None and state_dict is None:
            state_dict = whole_state_dict(self.sharded, adapters_alone=self._is_adapted)
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.sharded is not None and self.lr_scheduler is not None
        tag, values = f"global_step{self.state.global_step}", {"global_step": self.state.global_step}
        self.sharded.save(output_dir, tag, values, exclude_frozen=self._is_adapted)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not is_ours(resume_from_checkpoint):  # else it is loaded when the model is sharded
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
                f"{checkpoint} holds the optimizer's state of another Trainer. Go on with that one, or begin a new training "
                "from its weights: from_pretrained(checkpoint), and train() without resume_from_checkpoint."
            )
        else:
            _logger.warning(f"{checkpoint} holds no optimizer state (save_only_model?): it begins anew.")

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

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Inside, whole parameters may be written to, by every rank alike."""
        with unsharded(self.model, modifier_rank=0) if self.sharded is not None else nullcontext():
            yield

    @property
    def _is_adapted(self) -> bool:
        """Whether it is a PEFT model, of which checkpoints hold what is trained alone."""
        return hasattr(self.model, "peft_config") and hasattr(self.model, "base_model")


class ZeroTrainer(ZeroTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer on zeroshard: see `ZeroTrainerMixin`."""


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """transformers' Seq2SeqTrainer on zeroshard: see `ZeroTrainerMixin`."""


class ZeroConsolidateCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """For a stock Trainer with `ZeroRedundancyOptimizer`: checkpoints hold the whole optimizer state, for any number of ranks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint may follow."""
        if control.should_save:
            self._consolidate(kwargs["optimizer"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint may follow."""
        if control.should_save:
            self._consolidate(kwargs["optimizer"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is saved if it is the best is known only after."""
        if args.save_strategy == SaveStrategy.BEST:
            self._consolidate(kwargs["optimizer"])

    @staticmethod
    def _consolidate(optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, ZeroRedundancyOptimizer):
            raise UsageError(
                f"ZeroConsolidateCallback is for zeroshard.ZeroRedundancyOptimizer; this optimizer is {type(inner).__name__}."
            )
        inner.consolidate_state_dict(0)
