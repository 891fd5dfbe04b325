"""Owns `ZeroStrategy`: zeroshard under `lightning.pytorch.Trainer`.

The Trainer sets the precision. "-mixed" is its autocast over fp32 parameters, with torch's GradScaler for fp16.
"bf16-true" and "16-true" mean 16-bit parameters, with fp32 master weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

from torch import Tensor

from zeroshard.checkpoint.loading import some_of
from zeroshard.core.named_parameter import name_of, named_parameters
from zeroshard.core.state_dicts import state_dict_in_memory
from zeroshard.engine.from_config import create_optimizer
from zeroshard.engine.schedulers import create_scheduler
from zeroshard.errors import CheckpointError, UsageError, ZeroshardError
from zeroshard.integrations.lightning import folders
from zeroshard.integrations.lightning.sharding import ShardingFacts, ShardingStrategy, trainer_class
from zeroshard.model.born import sharded_init
from zeroshard.model.sharded import Sharded

_DDPStrategy: Any = trainer_class("strategies", "DDPStrategy")
_LRSchedulerConfig: Any = trainer_class("utilities.types", "LRSchedulerConfig")


class ZeroStrategy(ShardingStrategy, _DDPStrategy):  # type: ignore[misc]
    """A strategy that trains one model with ZeRO, on any number of processes, on CPUs and accelerators.

        trainer = lightning.Trainer(strategy=ZeroStrategy(stage=3), devices=2)

    Importing `zeroshard.integrations.lightning` registers it as "zeroshard" (stage 2) and "zeroshard_stage_1" to
    "zeroshard_stage_3". Lightning starts the processes, as with DDP, unless torchrun or another launcher does. During
    `fit`, `trainer.strategy.sharded` is the result of `zeroshard.shard`. Afterwards the module is whole and ordinary on
    every rank.

    A checkpoint is a folder with the name that the `.ckpt` file would have. Each rank writes its part to the folder.
    Training resumes from it (`ckpt_path=`) with any number of processes and at any stage. For one ordinary file of weights,
    which `load_from_checkpoint` reads, use `ModelCheckpoint(save_weights_only=True)` or `write_single_file(folder,
    out)`. Files of other strategies load in `validate` and `test`, and in `fit` only if they have no optimizer states.

    Args:
        stage: the ZeRO stage, 0 to 3; default 2.
        config: a DeepSpeed config (path or mapping) instead of stage, policy and units.
        policy: the residencies of model states, instead of the stage.
        units: the parameters that are unsharded together; see `zeroshard.shard`.
        auto: values for keys that are "auto" in the config and cannot be derived.
        ddp: arguments of Lightning's DDPStrategy: accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin (for Fabric, precision), timeout, process_group_backend and start_method.

    Raises:
        UsageError, ConfigError: a setting cannot be honoured. The message names the setting and the remedy.
    """

    strategy_name = "zeroshard"
    _precision_argument = "precision_plugin"
    model: Any
    lr_scheduler_configs: Any
    _lightning_module: Any
    optimizers: Any
    sharded: Sharded | None = None
    _loads_file = True
    _gave_states_up = False
    _aborted = False
    _shown: Mapping[str, Any] = {}
    """The state dict that hooks of a save got."""
    _given: Mapping[str, Any] = {}
    """The state dict that hooks of a load got."""
    _in_folder: Mapping[str, Any] = {}
    """The shapes of the tensors in the folder that is being loaded, by name."""
    _load: Callable[[Mapping[str, Any], bool], None] | None = None
    """Loads a folder after the hooks; None if it was loaded before."""

    def _facts(self) -> ShardingFacts:
        trainer = self.lightning_module.trainer
        clipping = float(trainer.gradient_clip_val or 0.0)
        return ShardingFacts(str(self.precision_plugin.precision), int(trainer.accumulate_grad_batches), clipping)

    # ------------------------------------------------------------------ set-up and tear-down

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self._aborted = False
        fits = trainer.state.fn == "fit"
        if fits and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fits:
            self._gave_states_up = False
            self.setup_optimizers(trainer)
            self._refuse_averages(trainer.callbacks)
        elif any(True for _ in self.model.parameters()):
            self.sharded = self._shard(self.model, [], self._facts())
        self.setup_precision_plugin()

    def _refuse_averages(self, callbacks: Iterable[Any]) -> None:
        """Raise if a callback averages weights at stage 3. Late in training, it would read parameters without values."""
        if self.sharded is None or not self.sharded.policy.parameters.sharded:
            return
        for callback in callbacks:
            if any(one.__name__ in ("StochasticWeightAveraging", "WeightAveraging") for one in type(callback).__mro__):
                raise UsageError(
                    f"{type(callback).__name__} reads parameters between steps, which have no values at stage 3: use stage 2, or "
                    "leave the callback out."
                )

    def setup_optimizers(self, trainer: Any) -> None:
        """Shard the module with its optimizers, or with the config's."""
        super().setup_optimizers(trainer)
        facts = self._facts()
        if self._config is not None:
            facts = replace(facts, steps=trainer.estimated_stepping_batches)
        if type(self.optimizers[0]).__name__ == "_MockOptimizer":  # Lightning's value for None
            block = None
            if self._config is not None:
                block = self._resolve(self.model, None, facts).schema.optimizer
            if block is None:
                raise UsageError("configure_optimizers returned None: return an optimizer, or name one in the config.")
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizers = [create_optimizer(block, trained, self.model)]
        self.sharded = self._shard(self.model, self.optimizers, facts)
        if self._config is not None and not self.lr_scheduler_configs:
            schema = self._resolve(None, self.sharded.optimizer, facts).schema
            if schema.scheduler is not None:
                scheduler = create_scheduler(schema.scheduler, self.sharded.optimizer, schema.min_lr)
                self.lr_scheduler_configs = [_LRSchedulerConfig(scheduler, interval="step")]

    def on_exception(self, exception: BaseException) -> None:
        """Record the exception: other ranks may have stopped elsewhere, so nothing may wait for them afterwards."""
        self._aborted = True

    def teardown(self) -> None:
        """End the sharding. The module is then whole, or, after an exception, has the values that this rank holds."""
        sharded = self.sharded
        self.sharded = None
        module = self._lightning_module
        if sharded is not None:
            self._gave_states_up |= bool(self.optimizers)
            if not self._give_back(sharded):
                self._lightning_module = self.model = None  # parameters without values cannot be moved to the CPU
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _give_back(self, sharded: Sharded) -> bool:
        """End the sharding and return whether the parameters are whole."""
        if self._checkpointer is not None:
            self._checkpointer.remove()
            self._checkpointer = None
        whole = True
        if not self._aborted:
            sharded.remove()
        elif sharded.policy.parameters.sharded and self.world_size > 1:
            whole = False
            sharded.abandon()
        else:
            try:
                sharded.remove()
            except ZeroshardError:  # the first exception is reported
                sharded.abandon()
        for group in sharded.optimizer.param_groups:
            group["params"].clear()  # schedulers keep the optimizer, so its memory is freed here
        sharded.optimizer.state.clear()
        self.optimizers = []
        return whole

    # ------------------------------------------------------------------ steps

    def _step(self, name: str, context: str, *args: Any) -> Any:
        """Run a step through the module's forward, so that parameters outside all blocks are gathered once."""
        with getattr(self.precision_plugin, context)():
            if self.sharded is None:
                return getattr(self.lightning_module, name)(*args)
            return self._forward_redirection(self.model, self.lightning_module, name, *args)

    training_step = partialmethod(_step, "training_step", "train_step_context")
    validation_step = partialmethod(_step, "validation_step", "val_step_context")
    test_step = partialmethod(_step, "test_step", "test_step_context")
    predict_step = partialmethod(_step, "predict_step", "predict_step_context")

    def post_backward(self, closure_loss: Tensor) -> None:
        if self.sharded is not None:
            self.sharded.finish_backward()

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Mark backwards inside the context as not the last of their step."""
        if self.sharded is None:
            return nullcontext()
        return self.sharded.accumulate()

    def model_sharded_context(self) -> AbstractContextManager[None]:
        """Return the context of `configure_model`: if parameters are sharded, modules are sharded as they are built."""
        if not self._shards_parameters(self._facts()):
            return nullcontext()
        return sharded_init()

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizer: only from a file. A folder's states are loaded with the model's."""
        return self._loads_file

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict. While the module is sharded, `save_checkpoint` saves its weights.

        If hooks may change the state dict, they get the parameters as they are on this rank: at stage 3, without values. If no
        hook can, they get {}.
        """
        if self.sharded is None:
            return dict(self.lightning_module.state_dict())
        self._shown = {}
        if self._has_hook("on_save_checkpoint"):
            if self.sharded.policy.parameters.sharded:
                self._shown = state_dict_in_memory(self.lightning_module, keeps=False)
            else:
                self._shown = dict(self.lightning_module.state_dict())
        return dict(self._shown)

    def _has_hook(self, name: str) -> bool:
        """Return whether the module or a callback has this hook. Lightning's own callbacks have those of weight averages alone."""
        module_class, callback_class = trainer_class("core", "LightningModule"), trainer_class("callbacks", "Callback")
        callbacks = self.lightning_module.trainer.callbacks
        hooks = [(self.lightning_module, module_class), *((one, callback_class) for one in callbacks)]
        return any(getattr(getattr(one, name), "__func__", None) is not getattr(base, name) for one, base in hooks)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}: the sharded checkpoint holds the optimizer's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        filepath = self.broadcast(filepath)
        if self.sharded is not None and "optimizer_states" in checkpoint:
            if storage_options is not None:
                raise UsageError(
                    "storage_options have no meaning for ZeroStrategy: ranks write their own files. Leave the "
                    "argument out."
                )
            edits = self._edits_of_hooks(checkpoint)
            rest = checkpoint | {"state_dict": {}, "optimizer_states": []}
            folders.save_sharded(self.sharded, filepath, rest, self.barrier, edits)
            return
        if self.sharded is not None:
            edits = self._edits_of_hooks(checkpoint)
            state = self.sharded.consolidated_state_dict() or {}
            checkpoint["state_dict"] = edits.apply(state) if edits else state
        elif self._gave_states_up and checkpoint.pop("optimizer_states", None) is not None and self.is_global_zero:
            trainer_class("utilities.rank_zero", "rank_zero_warn")(
                f"{filepath} holds weights and no optimizer state, since fit is over. To resume, save during fit, with "
                "ModelCheckpoint(save_last=True)."
            )
        if self.is_global_zero and folders.is_sharded(filepath):
            shutil.rmtree(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _edits_of_hooks(self, checkpoint: Mapping[str, Any]) -> folders.Edits:
        """Return the changes of hooks to the state dict that `lightning_module_state_dict` returned."""
        edits = folders.Edits.of(self._shown, checkpoint.get("state_dict") or {})
        if edits or self._shown:
            rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
            edits.refuse_missing_values(rest, self._shown)
        self._shown = {}
        return edits

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        self._loads_file = not folders.is_sharded(path)
        if self._loads_file:
            folders.refuse_what_is_none(path)
            loaded: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return loaded
        if self.sharded is None:
            raise UsageError(
                f"{path} is a sharded checkpoint, and no model is set up: pass it to fit, validate or test as ckpt_path."
            )
        rest = folders.read_rest(path, weights_only)
        edits = folders.edits_of(rest)
        if edits or self._has_hook("on_load_checkpoint"):  # load what the hooks leave, in `load_model_state_dict`
            self._given, self._in_folder = folders.read_state_dict(path, edits)
            self._load = partial(self._load_given, path, edits)
            return {**rest, "state_dict": dict(self._given)}
        self._load = None
        wanted = self._wanted()
        return folders.load_sharded(
            self.sharded, path, weights_only, strict=self.lightning_module.strict_loading, **wanted
        )

    def _wanted(self) -> dict[str, bool]:
        fits = bool(self.optimizers)
        return {"optimizer_states": fits, "random": fits}

    def _load_given(self, path: Any, saved: folders.Edits, state: Mapping[str, Any], strict: bool) -> None:
        """Load a folder as the hooks of its save and of this load have edited its state dict.

        Optimizer states are those of the folder, as with a file: edits of the state dict do not change them.
        """
        assert self.sharded is not None
        own = {name_of(name): name for name in state_dict_in_memory(self.lightning_module, keeps=False)}
        edits = folders.Edits.of(self._given, state)
        if strict:
            given = {name_of(name) for name in state}
            missing = [name for name in own if name not in given and not name.endswith("_extra_state")]
            unexpected = sorted(given - own.keys())
            if missing or unexpected:
                raise CheckpointError(
                    f"{path} is of a different model: it lacks {some_of(missing)}, and the model lacks {some_of(unexpected)}. Set "
                    "strict_loading=False in the module to load the entries that both have."
                )
        named = named_parameters(self.lightning_module, all_names=True)
        trained = {name: one.shape for name, one in named if one.requires_grad}
        rename: dict[str, str | None] = {}
        kept: dict[str, Tensor | None] = {}
        for name, shape in self._in_folder.items():
            rename[name] = edits.name_of(saved.name_of(name))
            if (
                rename[name] is None and trained.get(name) == shape
            ):  # its value stays, and its optimizer states are loaded
                kept[name] = self.sharded.states.get(name)
                del rename[name]
        folders.load_sharded(self.sharded, path, False, strict=False, rename=rename, **self._wanted())
        for name, value in kept.items():
            assert value is not None
            self.sharded.states.set(name, "parameters", value)
        changed = edits.apply(saved.changed)
        changed = {own[name]: value for name, value in changed.items() if name in own}
        if changed:
            self.lightning_module.load_state_dict(changed, strict=False)
        self._given, self._in_folder = {}, {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._loads_file:
            super().load_model_state_dict(checkpoint, strict)
        elif self._load is not None:
            self._load(checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if any(checkpoint["optimizer_states"]):
            raise UsageError(
                "the checkpoint is one file with another strategy's optimizer states, and ZeroStrategy resumes only "
                "from its own folders. To use only the weights, load them into the module and fit without ckpt_path."
            )
