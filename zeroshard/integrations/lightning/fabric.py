"""Owns `FabricZeroStrategy`: zeroshard under `lightning.Fabric`. Made by users, called by Fabric."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.integrations.lightning import folders
from zeroshard.integrations.lightning.package import fabric_class
from zeroshard.integrations.lightning.scaling import NormOfShards
from zeroshard.integrations.lightning.sharding import Facts, Sharding, refuse_strangers, the_one
from zeroshard.policy import Policy, Units
from zeroshard.sharded import Sharded
from zeroshard.sharded_init import sharded_init
from zeroshard.step.sharded_optimizer import ShardedOptimizer

_DDPStrategy: Any = fabric_class("strategies", "DDPStrategy")
_Mixed: Any = fabric_class("plugins.precision", "MixedPrecision")
_KNOWN = tuple(fabric_class("plugins.precision", name) for name in ("Precision", "HalfPrecision", "DoublePrecision"))


class MixedPrecision(_Mixed):  # type: ignore[misc]
    """ "bf16-mixed" and "16-mixed", whose scaler is shown the norm of all shards."""

    def __init__(self, precision: Any, device: str, scaler: Any = None) -> None:
        super().__init__(precision, device, scaler)
        self._shown: NormOfShards | None = None

    def unscale_gradients(self, optimizer: Any) -> None:
        if self.scaler is not None:
            device = optimizer.views[0].value.device if optimizer.views else torch.device(self.device)
            self._shown = NormOfShards(optimizer, self.scaler.get_scale(), device)
            self.scaler.unscale_(self._shown)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        if kwargs.get("closure") is not None:
            raise UsageError("16-mixed takes no closure: call fabric.backward, then optimizer.step().")
        if self._shown is None:
            self.unscale_gradients(optimizer)
        shown, self._shown = self._shown, None
        result = self.scaler.step(shown)
        self.scaler.update()
        return result


class _Accumulates:
    """What `fabric.no_backward_sync` enters."""

    def __init__(self, find: Callable[[nn.Module], Sharded]) -> None:
        self._find = find

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._find(module).accumulate(enabled)


class FabricZeroStrategy(_DDPStrategy):  # type: ignore[misc]
    """Trains each model with its one optimizer under ZeRO, with any number of processes, on CPUs and accelerators.

        fabric = lightning.Fabric(strategy=FabricZeroStrategy(stage=3), devices=2)
        model, optimizer = fabric.setup(model, optimizer)

    Also registered as "zeroshard" (stage 2) and "zeroshard_stage_1" to "zeroshard_stage_3". `fabric.setup(model)` alone is for
    evaluation. Modules that are built inside `fabric.init_module()` are sharded as they are built, where the policy shards them.

    `fabric.save(path, {"model": model, "optimizer": optimizer, ...})` writes a folder, each rank its part; `fabric.load`
    reads it at any number of processes and any stage. One file of weights: `write_single_file(path, out)` afterwards.

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

    def __init__(
        self, stage: int | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, *,
        policy: Policy | None = None, units: Units | None = None, auto: Mapping[str, Any] | None = None, **ddp: Any,
    ) -> None:  # fmt: skip
        refuse_strangers("FabricZeroStrategy", ddp, "precision")
        self._sharding = Sharding(stage, config, policy, units, auto)
        self._models: list[Sharded] = []
        super().__init__(**ddp)
        self._backward_sync_control = _Accumulates(self.sharded)

    @property
    def precision(self) -> Any:
        """What Fabric was told, over shards."""
        return self._precision if self._precision is not None else _KNOWN[0]()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if type(plugin) is _Mixed:
            plugin = MixedPrecision(plugin.precision, plugin.device, plugin.scaler)
        if plugin is not None and type(plugin) not in (*_KNOWN, MixedPrecision):
            raise UsageError(
                f"FabricZeroStrategy does not know the precision plugin {type(plugin).__name__}: it takes 32-true, 64-true, "
                "bf16-true, 16-true, bf16-mixed and 16-mixed."
            )
        self._precision = plugin

    def sharded(self, model: nn.Module) -> Sharded:
        """What `zeroshard.shard` returned for a model that was set up: `states`, `export`, `remove` and so on."""
        model = getattr(model, "module", model) if type(model).__name__ == "_FabricModule" else model
        for one in self._models:
            if one.model is model:
                return one
        raise UsageError(f"this {type(model).__name__} was not set up by fabric.setup.")

    # ------------------------------------------------------------------ set up

    def _shard(self, module: nn.Module, optimizer: Any) -> Sharded:
        one = self._sharding.shard(module, optimizer, Facts(str(self.precision.precision)))
        self._models = [
            *(other for other in self._models if other.model is not module),
            one,
        ]  # it may have been removed before
        return one

    def setup_module(self, module: nn.Module) -> nn.Module:
        """For evaluation: a model that is trained is set up with its optimizer."""
        if any(True for _ in module.parameters()):
            self._shard(module, None)
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, ...]:
        sharded = self._shard(module, the_one(optimizers, "FabricZeroStrategy"))
        return module, [sharded.optimizer], scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise UsageError(
            "FabricZeroStrategy sets a model up together with its optimizer: fabric.setup(model, optimizer)."
        )

    def module_init_context(self, empty_init: bool | None = None) -> ExitStack:
        stack: ExitStack = super().module_init_context(empty_init)
        if self._sharding.policy(Facts(str(self.precision.precision))).parameters.sharded:
            stack.enter_context(sharded_init())
        return stack

    # ------------------------------------------------------------------ gradients

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the L2 norm of all gradients; returns the norm before. Every rank must call it."""
        if norm_type != 2.0:
            raise UsageError(f"FabricZeroStrategy clips by the L2 norm, not by the norm of type {norm_type}.")
        self.precision.unscale_gradients(optimizer)
        norm = float(optimizer.clip_grad_norm_(float(max_norm)))
        if error_if_nonfinite and not math.isfinite(norm):
            raise UsageError(f"the norm of the gradients is {norm}: pass error_if_nonfinite=False to go on.")
        return torch.tensor(norm, device=self.root_device)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        raise UsageError(
            "clip_gradients(clip_val=...) is not offered by FabricZeroStrategy: clip by norm, max_norm=..."
        )

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write a folder. Every rank must call it.

        Args:
            path: its name.
            state: one model, its optimizer if you like, and whatever else, rank 0's.
            storage_options, filter: not offered.
        """
        if storage_options is not None or filter is not None:
            raise UsageError(
                "storage_options and filter are not offered by FabricZeroStrategy: leave keys out of the state."
            )
        sharded, rest = self._the_model(state)
        if sharded is None:
            super().save_checkpoint(path, state)
            return
        rest = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in rest.items()}
        folders.save_sharded(sharded, self.broadcast(path), rest, self.barrier)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a folder into `state`, or a file that other strategies saved, but for its optimizer. Every rank must call it."""
        path = self.broadcast(path)
        if not folders.is_sharded(path):
            folders.refuse_what_is_none(path)
            values = list(state.values()) if isinstance(state, dict) else [state]
            if any(isinstance(value, ShardedOptimizer) for value in values):
                raise UsageError(
                    f"{path} is one file: it holds no optimizer state that can be sharded. Leave the optimizer out."
                )
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return loaded
        if isinstance(state, nn.Module):
            state = {"model": state}
        sharded, rest = self._the_model(state or {})
        if sharded is None:
            raise UsageError(f'{path} is a sharded checkpoint: give fabric.load the model, {{"model": model, ...}}.')
        takes_states = any(isinstance(value, ShardedOptimizer) for value in state.values())
        remainder = folders.load_sharded(
            sharded, path, weights_only, strict=strict, optimizer_states=takes_states, random=takes_states
        )
        missing = [key for key in rest if key not in remainder]
        if missing and strict:
            raise UsageError(
                f"{path} has no {missing[0]!r}, which the state asks for: strict=False leaves it as it is."
            )
        for key in rest:
            if key in remainder and hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(remainder.pop(key))
            elif key in remainder:
                state[key] = remainder.pop(key)
        return remainder

    def _the_model(self, state: Mapping[str, Any]) -> tuple[Sharded | None, dict[str, Any]]:
        """The sharded model of a state, and what else there is, its optimizer left out."""
        models = [self.sharded(value) for value in state.values() if isinstance(value, nn.Module)]
        optimizers = [value for value in state.values() if isinstance(value, ShardedOptimizer)]
        if len(models) > 1:
            raise UsageError(f"a checkpoint holds one model, not {len(models)}: save each to a path of its own.")
        if any(not models or one is not models[0].optimizer for one in optimizers):
            raise UsageError("the state holds an optimizer without its model: save and load them together.")
        rest = {k: v for k, v in state.items() if not isinstance(v, nn.Module | ShardedOptimizer)}
        return (models[0] if models else None), rest

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by its names."""
        for name, stage in (("zeroshard", 2), *((f"zeroshard_stage_{stage}", stage) for stage in (1, 2, 3))):
            strategy_registry.register(
                name, cls, description=f"zeroshard, ZeRO stage {stage}", override=True, stage=stage
            )
