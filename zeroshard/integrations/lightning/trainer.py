"""Owns `ZeroStrategy`: zeroshard under `lightning.pytorch.Trainer`. Made by users, called by the Trainer.

What the Trainer has as precision is the run's: "-mixed" is its autocast over fp32 parameters, with torch's GradScaler for fp16;
"-true" makes 16-bit parameters, whose master weights are in fp32 here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.integrations.lightning import folders
from zeroshard.integrations.lightning.package import trainer_class
from zeroshard.integrations.lightning.scaling import NormOfShards
from zeroshard.integrations.lightning.sharding import Facts, Sharding, refuse_strangers, the_one
from zeroshard.policy import Policy, Units
from zeroshard.sharded import Sharded
from zeroshard.sharded_init import sharded_init

_DDPStrategy: Any = trainer_class("strategies", "DDPStrategy")
_Precision: Any = trainer_class("plugins.precision", "Precision")
_Half: Any = trainer_class("plugins.precision", "HalfPrecision")
_Double: Any = trainer_class("plugins.precision", "DoublePrecision")
_Mixed: Any = trainer_class("plugins.precision", "MixedPrecision")
_LRSchedulerConfig: Any = trainer_class("utilities.types", "LRSchedulerConfig")


class _Clips:
    """Gradient clipping over shards: `parameter.grad` has no values when the Trainer clips."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        optimizer.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        raise UsageError('gradient_clip_algorithm="value" is not offered by ZeroStrategy: clip by norm.')


# Of the same names, under which the Trainer saves their state.
class Precision(_Clips, _Precision):  # type: ignore[misc]
    """ "32-true"."""


class HalfPrecision(_Clips, _Half):  # type: ignore[misc]
    """ "bf16-true" and "16-true"."""


class DoublePrecision(_Clips, _Double):  # type: ignore[misc]
    """ "64-true"."""


class MixedPrecision(_Clips, _Mixed):  # type: ignore[misc]
    """ "bf16-mixed" and "16-mixed"."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure()
        shown = NormOfShards(optimizer, self.scaler.get_scale(), model.device)
        self.scaler.unscale_(shown)
        self._after_closure(model, optimizer)
        result = self.scaler.step(shown, **kwargs)
        self.scaler.update()
        return result


def _over_shards(plugin: Any) -> Any:
    """The plugin that does the same over shards."""
    if isinstance(plugin, _Clips):
        return plugin
    kind = type(plugin)
    if kind is _Mixed:
        return MixedPrecision(plugin.precision, plugin.device, plugin.scaler)
    if kind is _Half:
        return HalfPrecision(plugin.precision)
    if kind in (_Precision, _Double):
        return Precision() if kind is _Precision else DoublePrecision()
    raise UsageError(
        f"ZeroStrategy does not know the precision plugin {kind.__name__}: it takes 32-true, 64-true, bf16-true, 16-true, "
        "bf16-mixed and 16-mixed."
    )


class ZeroStrategy(_DDPStrategy):  # type: ignore[misc]
    """Trains one model with one optimizer under ZeRO, with any number of processes, on CPUs and accelerators.

        trainer = lightning.Trainer(strategy=ZeroStrategy(stage=3), devices=2)

    Also registered as "zeroshard" (stage 2) and "zeroshard_stage_1" to "zeroshard_stage_3". Processes are those of torchrun or of
    another launcher, or are started as Lightning's DDP does. While the Trainer fits, `trainer.strategy.sharded` is what
    `zeroshard.shard` returns. After it the module is whole and ordinary, on every rank.

    A checkpoint is a folder by the name of the `.ckpt`, to which each rank writes its part: it resumes (`ckpt_path=`) at any number
    of processes and any stage. One ordinary file of weights, for `load_from_checkpoint`: `ModelCheckpoint(save_weights_only=True)`,
    or `write_single_file(folder, out)` afterwards. Files that other strategies saved load too, but for their optimizer's state.

    Args:
        stage: of ZeRO, 0 to 3; default 2.
        config: a DeepSpeed config (path or mapping) in place of stage, policy and units.
        policy: where model states rest, in place of the stage.
        units: which parameters are brought together at once, see `zeroshard.shard`.
        auto: values for keys of the config that are "auto" and that only you know.
        ddp: arguments of Lightning's DDPStrategy: process_group_backend, timeout, start_method, cluster_environment and so on.

    Raises:
        UsageError, ConfigError: say what cannot be honoured, and what to do.
    """

    strategy_name = "zeroshard"
    model: Any
    lr_scheduler_configs: Any
    _lightning_module: Any
    optimizers: Any

    def __init__(
        self, stage: int | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, *,
        policy: Policy | None = None, units: Units | None = None, auto: Mapping[str, Any] | None = None, **ddp: Any,
    ) -> None:  # fmt: skip
        refuse_strangers("ZeroStrategy", ddp, "precision_plugin")
        self.sharded: Sharded | None = None
        self._sharding = Sharding(stage, config, policy, units, auto)
        self._loads_file = True
        self._gave_states_up = self._broke_off = False
        super().__init__(**ddp)

    @property
    def precision_plugin(self) -> Any:
        """What the Trainer was told, over shards."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else _over_shards(plugin)

    def _facts(self) -> Facts:
        trainer = self.lightning_module.trainer
        accumulation, clipping = int(trainer.accumulate_grad_batches), float(trainer.gradient_clip_val or 0.0)
        return Facts(str(self.precision_plugin.precision), accumulation, clipping)

    # ------------------------------------------------------------------ set up, and given back

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            self.precision_plugin.clip_grad_by_value(None, 0.0)
        self._broke_off = False
        fits = trainer.state.fn == "fit"
        if fits and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fits:
            self._gave_states_up = False
            self.setup_optimizers(trainer)
        elif any(True for _ in self.model.parameters()):
            self.sharded = self._sharding.shard(self.model, None, self._facts())
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """The module's one optimizer, or the config's, over shards."""
        super().setup_optimizers(trainer)
        optimizer, facts = the_one(self.optimizers, "ZeroStrategy"), self._facts()
        if self._sharding.has_config:
            facts = replace(facts, steps=trainer.estimated_stepping_batches)
        if type(optimizer).__name__ == "_MockOptimizer":  # what Lightning makes of None
            chosen = self._sharding.optimizer_of_config(self.model, facts)
            if chosen is None:
                raise UsageError("configure_optimizers returned None: return an optimizer, or name one in the config.")
            optimizer = chosen
        self.sharded = self._sharding.shard(self.model, optimizer, facts)
        self.optimizers = [self.sharded.optimizer]
        scheduler = self._sharding.scheduler_of_config(self.sharded, facts) if not self.lr_scheduler_configs else None
        if scheduler is not None:
            self.lr_scheduler_configs = [_LRSchedulerConfig(scheduler, interval="step")]

    def on_exception(self, exception: BaseException) -> None:
        """Other ranks may be elsewhere: nothing that waits for them may follow."""
        self._broke_off = True

    def teardown(self) -> None:
        """The module is the user's again, whole; after an exception, as whole as it is without the other ranks."""
        sharded, self.sharded = self.sharded, None
        module = self._lightning_module
        if sharded is not None:
            self._gave_states_up |= bool(self.optimizers)
            if not self._give_back(sharded):
                self._lightning_module = self.model = None  # what has no values cannot be moved to the CPU
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _give_back(self, sharded: Sharded) -> bool:
        """Returns whether the parameters are whole."""
        self._sharding.unwrap()
        whole = True
        if not self._broke_off:
            sharded.remove()
        elif sharded.policy.parameters.sharded and self.world_size > 1:
            whole = False
            sharded.abandon()
        else:
            try:
                sharded.remove()
            except ZeroshardError:  # the exception that led here is told
                sharded.abandon()
        for group in sharded.optimizer.param_groups:
            group["params"].clear()  # schedulers keep the optimizer; its memory goes
        sharded.optimizer.state.clear()
        self.optimizers = []
        return whole

    # ------------------------------------------------------------------ steps

    def _step(self, name: str, *args: Any) -> Any:
        """Run a step as the module's forward: what belongs to no block is brought together once."""
        if self.sharded is None:
            return getattr(self.lightning_module, name)(*args)
        return self._forward_redirection(self.model, self.lightning_module, name, *args)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._step("predict_step", *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        if self.sharded is not None:
            self.sharded.finish_backward()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their step."""
        with self.sharded.accumulate() if self.sharded is not None else nullcontext():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """`configure_model` runs inside: where parameters are sharded, its modules are cut as they are built."""
        with ExitStack() as stack:
            if self._sharding.policy(self._facts()).parameters.sharded:
                stack.enter_context(sharded_init())
            yield

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """A folder's optimizer states are loaded with the model's."""
        return self._loads_file

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty while the module is sharded: each rank saves its own part."""
        return {} if self.sharded is not None else dict(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As `lightning_module_state_dict`."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        filepath = self.broadcast(filepath)
        if self.sharded is not None and "optimizer_states" in checkpoint:
            if storage_options is not None:
                raise UsageError("storage_options have no meaning for ZeroStrategy: ranks write their own files.")
            folders.save_sharded(
                self.sharded, filepath, checkpoint | {"state_dict": {}, "optimizer_states": []}, self.barrier
            )
            return
        if self.sharded is not None:
            checkpoint["state_dict"] = folders.whole_state_dict(self.lightning_module, self.global_rank)
        elif self._gave_states_up and checkpoint.pop("optimizer_states", None) is not None and self.is_global_zero:
            trainer_class("utilities.rank_zero", "rank_zero_warn")(
                f"{filepath} holds weights and no optimizer state: fit is over. ModelCheckpoint(save_last=True) saves what resumes."
            )
        if self.is_global_zero:
            folders.clear_for_file(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        self._loads_file = not folders.is_sharded(path)
        if self._loads_file:
            folders.refuse_what_is_none(path)
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return loaded
        if self.sharded is None:
            raise UsageError(
                f"{path} is a sharded checkpoint, and no model is set up: give it to fit, validate or test as ckpt_path."
            )
        fits = bool(self.optimizers)
        strict = self.lightning_module.strict_loading
        return folders.load_sharded(self.sharded, path, weights_only, strict=strict, optimizer_states=fits, random=fits)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._loads_file:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if any(checkpoint["optimizer_states"]):
            raise UsageError(
                "the checkpoint is one file, whose optimizer states another strategy saved whole: ZeroStrategy resumes from "
                "folders of its own. For the weights alone, load them in the module and fit without ckpt_path."
            )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its names."""
        for name, stage in (("zeroshard", 2), *((f"zeroshard_stage_{stage}", stage) for stage in (1, 2, 3))):
            strategy_registry.register(
                name, cls, description=f"zeroshard, ZeRO stage {stage}", override=True, stage=stage
            )
